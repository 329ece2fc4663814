"""A benchmark's temporary folder: gone at its end, and one that a killed benchmark left, at the start of the next."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "paceline-bench-"
LOCK = "lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder for the block. Its lock is held as long as this process lives, and says that it is in use."""
    remove_stale(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True))
        lock = stack.enter_context((Path(name) / LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(name) / "files"
        folder.mkdir()
        yield folder


def remove_stale(parent: Path) -> None:
    """Remove the folders of benchmarks that no longer live. Whatever cannot be told or removed stays."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
