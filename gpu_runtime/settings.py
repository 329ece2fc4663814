"""Typed settings from flat `key = scalar` tables, with all faults reported at once. Standard library only.

A section is a frozen dataclass whose fields are made by `setting`; `parse` fills sections from Flower's run config.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_runtime.contracts import SHARING_MODES

Scalar = bool | int | float | str
BACKENDS = ("auto", "cpu", "processes", "streams", "green", "mps")


class SettingsError(ValueError):
    """One or more faulty settings; `faults` has one line for each."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


def setting(
    key: str,
    default: Scalar,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A dataclass field read from config `key`. `minimum` and `maximum` are inclusive, `above` is exclusive."""
    metadata = {"key": key, "help": help, "min": minimum, "above": above, "max": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """How one device is shared among its tasks."""

    mode: str = setting("sharing.mode", "competitive", "how tasks share a device", choices=SHARING_MODES)
    backend: str = setting("sharing.backend", "auto", "what lanes are made of", choices=BACKENDS)
    cores: int = setting("sharing.cores", 0, "CPU cores the runtime may use; 0: those it is given", minimum=0)


def nearest(word: str, valid: Sequence[str]) -> str:
    """` (did you mean 'x'?)` or, where nothing is near, the empty string."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def keys_of(section: type) -> dict[str, dataclasses.Field[Any]]:
    """Config key of each field of a section; fields without a key, or with a value per task, are not settings."""
    fields = (field for field in dataclasses.fields(section) if "key" in field.metadata)
    return {field.metadata["key"]: field for field in fields if not field.metadata.get("per_task")}


def parse(flat: Mapping[str, Scalar], sections: Sequence[type], faults: list[str]) -> list[Any]:
    """Build each section from `flat`; missing keys take their defaults; faults are appended, never raised.

    Keys that belong to none of the sections are ignored here; see `unknown_keys`.
    """
    built = []
    for section in sections:
        hints = typing.get_type_hints(section)
        values = {}
        for key, field in keys_of(section).items():
            if key in flat:
                value = _checked(key, flat[key], hints[field.name], field.metadata, faults)
                if value is not None:
                    values[field.name] = value
        try:
            built.append(section(**values))
        except ValueError as error:
            faults.append(str(error))
            built.append(section())
    return built


def unknown_keys(flat: Mapping[str, Scalar], sections: Sequence[type]) -> list[str]:
    """One fault for each key of `flat` that no section knows."""
    valid = [key for section in sections for key in keys_of(section)]
    return [f"unknown key {key!r}{nearest(key, valid)}" for key in flat if key not in valid]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested tables to dotted keys, as Flower does."""
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# How each limit in a field's metadata reads, and when a value breaks it.
_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "min": ("at least", lambda value, limit: value < limit),
    "above": ("above", lambda value, limit: value <= limit),
    "max": ("at most", lambda value, limit: value > limit),
}
_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}


def describe_range(metadata: Mapping[str, Any]) -> str:
    """The allowed values in words, with a leading space; empty where anything goes."""
    if metadata.get("choices"):
        return " one of " + ", ".join(metadata["choices"])
    parts = [f"{words} {metadata[name]:g}" for name, (words, _) in _LIMITS.items() if metadata.get(name) is not None]
    return " " + " and ".join(parts) if parts else ""


def _checked(key: str, value: Any, kind: Any, metadata: Mapping[str, Any], faults: list[str]) -> Any:
    """`value` as `kind`, or None after noting the fault."""
    if kind is float and type(value) is int:
        value = float(value)
    choices = metadata.get("choices")
    broken = (
        type(value) is not kind
        or (isinstance(value, float) and not math.isfinite(value))
        or (choices and value not in choices)
        or any(breaks(value, metadata[name]) for name, (_, breaks) in _LIMITS.items() if metadata.get(name) is not None)
    )
    if broken:
        expected = describe_range(metadata) if choices else f" {_KINDS[kind]}{describe_range(metadata)}"
        faults.append(f"{key} must be{expected}, not {value!r}{nearest(str(value), choices) if choices else ''}")
        return None
    if isinstance(value, str) and "\0" in value:  # no name, path or option has one, and what takes them crashes
        faults.append(f"{key} must be a string without NUL characters, not {value!r}")
        return None
    return value
