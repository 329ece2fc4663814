"""Program, run alone in a process: converts seglearn's pickled smartwatch recordings to an archive of plain arrays.

Unpickling runs whatever the file says, so nothing is read from a file whose SHA-256 is not the one known.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np

SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"


def convert(source: Path, target: Path) -> None:
    """Write `target` (.npz) from `source`, whole or not at all. Raises ValueError when `source` is another file."""
    content = source.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"{source} has SHA-256 {found[:12]}..., expected {SHA256[:12]}... (seglearn 1.2.5)")
    recordings = np.load(BytesIO(content), allow_pickle=True).item()
    series = recordings["X"]
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                samples=np.concatenate(series).astype(np.float32),
                lengths=np.asarray([len(one) for one in series], dtype=np.int64),
                exercises=np.asarray(recordings["y"], dtype=np.int64),
                subjects=np.asarray(recordings["subject"], dtype=np.int64),
            )
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
