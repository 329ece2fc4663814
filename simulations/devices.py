"""Classes of device that a fleet's clients may name, from `simulations/devices.toml`. Plain keys of a [[client]]."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

DEVICES_FILE = Path(__file__).parent / "devices.toml"
LINK_KEYS = ("uplink-mbit-per-s", "downlink-mbit-per-s", "latency-ms")


@cache
def device_classes() -> Mapping[str, Mapping[str, Any]]:
    """Keys of a [[client]] table by name of device."""
    return tomllib.loads(DEVICES_FILE.read_text(encoding="utf-8"))


def with_device(client: Mapping[str, Any]) -> dict[str, Any]:
    """The client's table without `device`, and with the keys of that device which it does not have itself.

    A client that names a `link` keeps that instead of the device's rates.

    Raises:
        KeyError: no such device.
    """
    own = {key: value for key, value in client.items() if key != "device"}
    if "device" not in client:
        return own
    defaults = device_classes()[str(client["device"])]
    return {**{key: value for key, value in defaults.items() if "link" not in own or key not in LINK_KEYS}, **own}
