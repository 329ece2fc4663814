"""Competitive sharing of one device; the benchmark itself is `gpu_runtime.bench.competitive`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_runtime.bench import competitive
from gpu_runtime.device import discover

# Seconds of one baseline run of a mix, and interleaved repeats.
QUICK = {"seconds": 1.0, "pairs": 5}
FULL = {"seconds": 4.0, "pairs": 11}


def run(*, device: str, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Three mixes of tasks on `device` ("cpu", "cuda" or "" for what there is)."""
    size = QUICK if quick else FULL
    return competitive.run(discover(0, device), seconds=size["seconds"], pairs=int(size["pairs"]), say=say)
