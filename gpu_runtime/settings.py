"""Typed settings from flat `key = scalar` tables, with all faults reported at once. Standard library only.

A section is a frozen dataclass whose fields are made by `setting`; `parse` fills sections from Flower's run config.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_runtime.contracts import SHARING_MODES

Scalar = bool | int | float | str
BACKENDS = ("auto", "cpu", "streams")


class SettingsError(ValueError):
    """One or more faulty settings; `faults` has one line for each."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


def setting(
    key: str,
    default: Scalar,
    help: str,  # noqa: A002 - the word users know from argparse
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
    """Config key of each field of a section; fields without a key are not settings."""
    return {field.metadata["key"]: field for field in dataclasses.fields(section) if "key" in field.metadata}


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
        built.append(section(**values))
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


def describe_range(metadata: Mapping[str, Any]) -> str:
    """The allowed values in words, with a leading space; empty where anything goes."""
    if metadata.get("choices"):
        return " one of " + ", ".join(metadata["choices"])
    low, above, high = metadata.get("min"), metadata.get("above"), metadata.get("max")
    parts = []
    if low is not None:
        parts.append(f"at least {low:g}")
    if above is not None:
        parts.append(f"above {above:g}")
    if high is not None:
        parts.append(f"at most {high:g}")
    return " " + " and ".join(parts) if parts else ""


def _checked(key: str, value: Any, kind: type, metadata: Mapping[str, Any], faults: list[str]) -> Any:
    """`value` as `kind`, or None after noting the fault."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    allowed = describe_range(metadata)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        faults.append(f"{key} must be {words[kind]}{allowed}, not {value!r}")
        return None
    if kind is float and not math.isfinite(value):
        faults.append(f"{key} must be a finite number{allowed}, not {value!r}")
        return None
    choices = metadata.get("choices")
    if choices and value not in choices:
        faults.append(f"{key} must be{allowed}, not {value!r}{nearest(str(value), list(choices))}")
        return None
    low, above, high = metadata.get("min"), metadata.get("above"), metadata.get("max")
    if (low is not None and value < low) or (above is not None and value <= above) or (high is not None and value > high):
        faults.append(f"{key} must be{allowed}, not {value!r}")
        return None
    return value
