"""Measured task costs on disk, one small JSON file each, so that a device is measured once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from gpu_runtime.contracts import ContractError, TaskCost, from_json, to_json

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CostKey:
    """All that a measured cost depends on; `revision` counts up when what is measured changes."""

    device: str
    num_cores: int
    driver: str
    torch_version: str
    model_hash: str
    batch_size: int
    task: str = ""
    code_hash: str = ""
    revision: int = 2

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class MixKey:
    """All that the result of a trial of several tasks depends on; `costs` of each task, in words."""

    device: str
    num_cores: int
    driver: str
    torch_version: str
    candidates: tuple[str, ...]
    costs: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class MixResult:
    """What a trial of several tasks has found: capacity by backend, in the order of preference, and the one to use."""

    capacities: Mapping[str, float]
    best: str

    @property
    def capacity(self) -> float:
        return self.capacities[self.best]


@dataclass(frozen=True, kw_only=True)
class _StoredMix:
    """As on disk. Files of older versions do not name the best: they are measured again."""

    capacities: tuple[tuple[str, float], ...]
    best: str


def cache_directory() -> Path:
    """PACELINE_CACHE_DIR, else `paceline` in the user's cache directory."""
    given = os.environ.get("PACELINE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def load(key: CostKey) -> TaskCost | None:
    """The cost stored under `key`; None when there is none, or the file cannot be read or is damaged."""
    return _load(TaskCost, f"{key.digest}.json")


def store(key: CostKey, cost: TaskCost) -> bool:
    """Store `cost`, atomically. False where the directory cannot be written: then the next process measures again."""
    return _store(f"{key.digest}.json", cost)


def load_mix(key: MixKey) -> MixResult | None:
    """What a trial has found; None as of `load`."""
    found = _load(_StoredMix, f"mix-{key.digest}.json")
    if found is None or found.best not in dict(found.capacities):
        return None
    return MixResult(capacities=dict(found.capacities), best=found.best)


def store_mix(key: MixKey, found: MixResult) -> bool:
    """As `store`."""
    return _store(f"mix-{key.digest}.json", _StoredMix(capacities=tuple(found.capacities.items()), best=found.best))


def _load(kind: type[T], name: str) -> T | None:
    try:
        return from_json(kind, _path(name).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ContractError, UnicodeDecodeError):
        return None


def _store(name: str, value: object) -> bool:
    try:
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(to_json(value))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError):
        return False
    return True


def _path(name: str) -> Path:
    return cache_directory() / "profiles" / name
