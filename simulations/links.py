"""Links to act out: named ones, and TOML files with changes over time, as `contracts.Emulation`.

A file has the keys of `LinkSettings` at the top, or `link = "4g"` to start from a named link, and [[change]] tables.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_runtime.contracts import Emulation, LinkChange
from gpu_runtime.settings import keys_of, nearest, parse, setting

BYTES_PER_MBIT = 125_000


class LinkFileError(ValueError):
    """A link that cannot be used; `faults` has one line for each fault."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """A link in the units that people use."""

    uplink_mbit_per_s: float = setting("uplink-mbit-per-s", 0.0, "0: unlimited", minimum=0.0, maximum=1e7)
    downlink_mbit_per_s: float = setting("downlink-mbit-per-s", 0.0, "0: unlimited", minimum=0.0, maximum=1e7)
    latency_ms: float = setting("latency-ms", 0.0, "one way", minimum=0.0, maximum=1e6)
    message_ms: float = setting("message-ms", 0.0, "what a message occupies the link for", minimum=0.0, maximum=1e6)


@dataclass(frozen=True, kw_only=True)
class ChangeSettings:
    """New rates from a moment on; a direction that is not named stays as it was."""

    at_s: float = setting("at-s", -1.0, "seconds since the first message", minimum=0.0, maximum=1e9)
    uplink_mbit_per_s: float = setting("uplink-mbit-per-s", -1.0, "0: unlimited", minimum=0.0, maximum=1e7)
    downlink_mbit_per_s: float = setting("downlink-mbit-per-s", -1.0, "0: unlimited", minimum=0.0, maximum=1e7)


# Rates of 4g, 4g-plus and wifi are those of PiPar's experiments (arXiv 2302.12803). 3g, and the latency of 4g, which is
# half of the round trip of its "LTE", are WebPageTest's connection profiles. Latencies of the others are assumed.
PRESETS: Mapping[str, LinkSettings] = {
    "3g": LinkSettings(uplink_mbit_per_s=0.768, downlink_mbit_per_s=1.6, latency_ms=150.0),
    "4g": LinkSettings(uplink_mbit_per_s=10.0, downlink_mbit_per_s=25.0, latency_ms=35.0),
    "4g-plus": LinkSettings(uplink_mbit_per_s=20.0, downlink_mbit_per_s=40.0, latency_ms=25.0),
    "wifi": LinkSettings(uplink_mbit_per_s=50.0, downlink_mbit_per_s=50.0, latency_ms=2.0),
    "lan": LinkSettings(uplink_mbit_per_s=1000.0, downlink_mbit_per_s=1000.0, latency_ms=0.1),
}


def link_names() -> tuple[str, ...]:
    """The named links."""
    return tuple(PRESETS)


def load_link(name_or_path: str) -> Emulation:
    """A link by its name, or from a TOML file. The device keeps its speed: see `dataclasses.replace`.

    Raises:
        LinkFileError: no such link, or a file with faults, all of them reported.
    """
    if name_or_path in PRESETS:
        return _emulation(PRESETS[name_or_path], ())
    if not (name_or_path.endswith(".toml") or "/" in name_or_path):
        known = ", ".join(PRESETS)
        raise LinkFileError([f"no link {name_or_path!r}{nearest(name_or_path, link_names())}; there are: {known}"])
    try:
        path = Path(name_or_path).expanduser()
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LinkFileError([f"link file {name_or_path!r} cannot be read: {reason}"]) from None
    return parse_link(path.stem, text)


def parse_link(name: str, text: str) -> Emulation:
    """A link from TOML text.

    Raises:
        LinkFileError: with one line for every fault.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LinkFileError([f"link {name!r} is not TOML: {error}; strings need quotes"]) from None
    faults: list[str] = []
    changes: Any = table.pop("change", [])
    preset: Any = table.pop("link", None)
    faults += _unknown(table, LinkSettings, ("link", "change"))
    base = LinkSettings()
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        faults.append(f"link must be one of {', '.join(PRESETS)}, not {preset!r}{nearest(str(preset), link_names())}")
    elif preset is not None:
        base = PRESETS[preset]
    own: LinkSettings = parse(table, [LinkSettings], faults)[0]
    given = {field.name: getattr(own, field.name) for key, field in keys_of(LinkSettings).items() if key in table}
    base = replace(base, **given)
    read: list[ChangeSettings] = []
    if not isinstance(changes, list) or not all(isinstance(change, Mapping) for change in changes):
        faults.append("changes are written as [[change]] tables")
    else:
        read = [_parse_change(position, change, faults) for position, change in enumerate(changes, start=1)]
    times = [change.at_s for change in read if change.at_s >= 0]
    if any(later <= earlier for earlier, later in itertools.pairwise(times)):
        faults.append("changes must be in order of at-s, each later than the one before")
    if faults:
        raise LinkFileError([f"link {name!r}: {fault}" for fault in faults])
    return _emulation(base, read)


def _parse_change(position: int, table: Mapping[str, Any], faults: list[str]) -> ChangeSettings:
    own = _unknown(table, ChangeSettings, ())
    change: ChangeSettings = parse(table, [ChangeSettings], own)[0]
    if "at-s" not in table:
        own.append("at-s is missing")
    if not {"uplink-mbit-per-s", "downlink-mbit-per-s"} & set(table):
        own.append("a change needs uplink-mbit-per-s or downlink-mbit-per-s")
    faults += [f"change {position}: {fault}" for fault in own]
    return change


def _emulation(base: LinkSettings, changes: Sequence[ChangeSettings]) -> Emulation:
    up, down = base.uplink_mbit_per_s, base.downlink_mbit_per_s
    timed = []
    for change in changes:
        up = up if change.uplink_mbit_per_s < 0 else change.uplink_mbit_per_s
        down = down if change.downlink_mbit_per_s < 0 else change.downlink_mbit_per_s
        rates = {"uplink_bytes_per_s": _bytes_per_s(up), "downlink_bytes_per_s": _bytes_per_s(down)}
        timed.append(LinkChange(at_s=change.at_s, **rates))
    return Emulation(
        uplink_bytes_per_s=_bytes_per_s(base.uplink_mbit_per_s),
        downlink_bytes_per_s=_bytes_per_s(base.downlink_mbit_per_s),
        latency_s=base.latency_ms / 1000,
        message_s=base.message_ms / 1000,
        changes=tuple(timed),
    )


def _bytes_per_s(mbit_per_s: float) -> float | None:
    return mbit_per_s * BYTES_PER_MBIT or None


def _unknown(table: Mapping[str, Any], section: type, extra: Sequence[str]) -> list[str]:
    known = [*keys_of(section), *extra]
    return [f"unknown key {key!r}{nearest(key, known)}" for key in table if key not in known]
