"""The config of a run before Flower sees it: defaults of pyproject.toml under the command line's overrides.

Checked here so that a bad key fails within a second and with all faults, instead of after Flower has started.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_runtime.settings import Scalar, SettingsError, flatten

# Relative paths in these are those of the caller; Flower's processes run elsewhere.
PATH_KEYS = ("out-dir", "resume-from", "data.directory")
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")


def defaults(app: Path) -> dict[str, Scalar]:
    """`[tool.flwr.app.config]` of an app, flattened to dotted keys.

    Raises:
        SettingsError: no pyproject.toml, or one that is not TOML.
    """
    try:
        table: Any = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError([f"no Flower app in {app}: {error.strerror}"]) from None
    except ValueError as error:
        raise SettingsError([f"pyproject.toml in {app}: {error}"]) from None
    for key in ("tool", "flwr", "app", "config"):
        table = table.get(key, {})
    return flatten(table)


def parse_overrides(texts: Sequence[str]) -> dict[str, Scalar]:
    """`--run-config` values, read as Flower reads them: 'a=1 b="x"', or one path of a TOML file.

    Raises:
        SettingsError: with one line for each text that cannot be read.
    """
    found: dict[str, Scalar] = {}
    faults = []
    for text in texts:
        try:
            if text.endswith(".toml") and "=" not in text:
                found.update(flatten(tomllib.loads(Path(text).expanduser().read_text(encoding="utf-8"))))
                continue
            rest = _PAIR.sub("", text).strip()
            if rest:
                raise ValueError(f"{rest!r} is not of the form key=value")
            for key, value in _PAIR.findall(text):
                found.update(flatten(tomllib.loads(f"{key} = {value}")))
        except OSError as error:
            faults.append(f"--run-config {text}: {error.strerror}")
        except ValueError as error:
            hint = "; strings need quotes of their own" if isinstance(error, tomllib.TOMLDecodeError) else ""
            faults.append(f"--run-config {text!r}: {' '.join(str(error).split())}{hint}")
    if faults:
        raise SettingsError(faults)
    return found


def absolute_paths(config: Mapping[str, Scalar], base: Path) -> dict[str, Scalar]:
    """The config with relative paths made absolute from `base`; a fleet is a path only if it looks like one."""
    found = dict(config)
    for key in (*PATH_KEYS, "fleet.name"):
        value = found.get(key)
        if not isinstance(value, str) or not value:
            continue
        if key != "fleet.name" or value.endswith(".toml") or "/" in value:
            found[key] = str((base / Path(value).expanduser()).resolve())
    return found


def to_toml(config: Mapping[str, Scalar]) -> str:
    """Flat config as TOML text with dotted keys."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in config.items())


def _key(key: str) -> str:
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part) for part in key.split("."))


def _value(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # JSON strings are TOML strings, but for a character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
