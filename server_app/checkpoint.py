"""Weights on disk: safetensors plus JSON, each file replaced by one rename, so that a reader never sees half a file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save


class OutputError(RuntimeError):
    """A file or folder cannot be written; the text names it and says why, in one line."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names `path` in what goes wrong inside: a full disk alone does not say which file it hit.

    Raises:
        OutputError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, flush to disk, then rename over it.

    Raises:
        OutputError: it cannot be written; an older file is left as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file that is read while it grows.

    Raises:
        OutputError: it cannot be written.
    """
    with writing(path), path.open("a") as file:
        file.write(line + "\n")


def write_json(path: Path, value: Any) -> None:
    """Atomic; numbers must be finite. Raises OutputError as `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_weights(folder: Path, name: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """`<name>.safetensors` (keys `<task>/<parameter>`) and `<name>.json`, which says where the weights come from."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    contiguous = {key: np.ascontiguousarray(value).reshape(value.shape) for key, value in arrays.items()}
    write_atomically(folder / f"{name}.safetensors", save(contiguous))
    write_json(folder / f"{name}.json", about)


def load_weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    """What `save_weights` wrote."""
    return dict(load_file(folder / f"{name}.safetensors"))
