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
# Of Linux, less what a run's own folders and files add to out-dir.
LONGEST_NAME = 255
LONGEST_PATH = 4096 - 256
SHOWN = 80
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
        key = value = ""
        try:
            if text.endswith(".toml") and "=" not in text:
                file = Path(absolute_path(text, Path.cwd()))
                found.update(flatten(tomllib.loads(file.read_text(encoding="utf-8"))))
                continue
            rest = _PAIR.sub("", text).strip()
            if rest:
                raise ValueError(f"{rest!r} is not of the form key=value")
            for key, value in _PAIR.findall(text):
                found.update(flatten(tomllib.loads(f"{key} = {value}")))
        except OSError as error:
            faults.append(f"--run-config {text}: {error.strerror}")
        except ValueError as error:
            hint = _quotes_hint(key, value) if isinstance(error, tomllib.TOMLDecodeError) else ""
            faults.append(f"--run-config {text!r}: {' '.join(str(error).split())}{hint}")
    if faults:
        raise SettingsError(faults)
    return found


def absolute_paths(config: Mapping[str, Scalar], base: Path) -> dict[str, Scalar]:
    """The config with relative paths made absolute from `base`; a fleet is a path only if it looks like one.

    Raises:
        SettingsError: with one line for each path that cannot be one.
    """
    found = dict(config)
    faults = []
    for key in (*PATH_KEYS, "fleet.name"):
        value = found.get(key)
        if not isinstance(value, str) or not value:
            continue
        if key != "fleet.name" or value.endswith(".toml") or "/" in value:
            try:
                found[key] = absolute_path(value, base)
            except ValueError as error:
                faults.append(f"{key} cannot be a path: {error}: {value[:SHOWN]!r}")
    if faults:
        raise SettingsError(faults)
    return found


def absolute_path(text: str, base: Path) -> str:
    """A path made absolute from `base`, with `~` and links resolved.

    Raises:
        ValueError: no system could open it; the text says why.
    """
    if "\0" in text:
        raise ValueError("it has a NUL character")
    try:
        path = (base / Path(text).expanduser()).resolve()
        encoded = [part.encode() for part in path.parts]
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text") from None
    except (OSError, RuntimeError) as error:  # an unknown user's home; links in a circle
        raise ValueError((error.strerror if isinstance(error, OSError) else None) or str(error)) from None
    if max(map(len, encoded)) > LONGEST_NAME:
        raise ValueError(f"a name in it is longer than {LONGEST_NAME} bytes")
    if len(str(path).encode()) > LONGEST_PATH:
        raise ValueError(f"it is longer than {LONGEST_PATH} bytes")
    return str(path)


def _quotes_hint(key: str, value: str) -> str:
    """How to write a value that is not TOML, here and through make, where one more shell takes quotes away."""
    if not key:
        return "; strings need quotes"
    pair = f'{key}="{value.strip(chr(34) + chr(39))}"'
    escaped = pair.replace('"', '\\"')
    return f"; strings need quotes of their own: --run-config '{pair}', or make run ARGS=\"--run-config '{escaped}'\""


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
