"""Competitive sharing of one device; the benchmark itself is `gpu_runtime.bench.competitive`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gpu_runtime.bench import competitive
from gpu_runtime.bench.table import table
from gpu_runtime.device import discover

__all__ = ["add_arguments", "run", "table"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told beside the common options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: cuda where there is one")
    parser.add_argument("--mixes", default="", help="comma-separated mixes of tasks; default: all")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The benchmark's JSON object. Raises ValueError on options that cannot be followed."""
    mixes = competitive.mixes_of(options.mixes)
    size = competitive.size_of(quick=options.quick)
    return competitive.run(discover(0, options.device), mixes, size=size, say=say)
