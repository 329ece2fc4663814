"""A hash of the program text, so that server and clients can notice that they run different versions."""

from __future__ import annotations

import hashlib
from pathlib import Path

# What a client's training depends on.
PACKAGES = ("client_app", "gpu_runtime", "tasks")


def source_hash(root: Path | None = None) -> str:
    """Hex digest over the Python files of `PACKAGES` below `root` (default: where this package lies)."""
    root = root or Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
