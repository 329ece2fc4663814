"""Measured task costs on disk, one small JSON file each, so that a device is measured once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_runtime.contracts import ContractError, TaskCost, from_json, to_json


@dataclass(frozen=True, kw_only=True)
class CostKey:
    """All that a measured cost depends on."""

    device: str
    num_cores: int
    driver: str
    torch_version: str
    model_hash: str
    batch_size: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def cache_directory() -> Path:
    """PACELINE_CACHE_DIR, else `paceline` in the user's cache directory."""
    given = os.environ.get("PACELINE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def load(key: CostKey) -> TaskCost | None:
    """The cost stored under `key`; None when there is none, or the file cannot be read or is damaged."""
    try:
        return from_json(TaskCost, _path(key).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ContractError, UnicodeDecodeError):
        return None


def store(key: CostKey, cost: TaskCost) -> bool:
    """Store `cost`, atomically. False where the directory cannot be written: then the next process measures again."""
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(to_json(cost))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError):
        return False
    return True


def _path(key: CostKey) -> Path:
    return cache_directory() / "profiles" / f"{key.digest}.json"
