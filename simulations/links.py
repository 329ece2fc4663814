"""Links by name, to be acted out by split training (`gpu_runtime.pipeline.link`).

Rates of 4g, 4g-plus and wifi are those of PiPar's evaluation (arXiv 2302.12803); latencies are ours.
"""

from __future__ import annotations

from gpu_runtime.contracts import Emulation

BYTES_PER_MBIT = 125_000.0


def _link(up_mbit_per_s: float, down_mbit_per_s: float, latency_s: float) -> Emulation:
    return Emulation(
        uplink_bytes_per_s=up_mbit_per_s * BYTES_PER_MBIT,
        downlink_bytes_per_s=down_mbit_per_s * BYTES_PER_MBIT,
        latency_s=latency_s,
    )


PRESETS: dict[str, Emulation] = {
    "3g": _link(2.0, 8.0, 0.05),
    "4g": _link(10.0, 25.0, 0.02),
    "4g-plus": _link(20.0, 40.0, 0.015),
    "wifi": _link(50.0, 50.0, 0.002),
    "lan": _link(1000.0, 1000.0, 0.0002),
}


def link_named(name: str) -> Emulation:
    """The preset of that name. Raises ValueError, naming those there are."""
    if name not in PRESETS:
        raise ValueError(f"unknown link {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
