"""Record what training each task costs on this machine: `python -m simulations.record_costs`.

Virtual devices are multiples of the machine that recorded. Run it on a quiet machine and check the file in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from gpu_runtime.contracts import DataSpec, TaskCost
from gpu_runtime.device import CPU, Device, discover
from gpu_runtime.profiler import measure
from gpu_runtime.workload import Workload
from simulations.task_costs import COSTS_DIR, CostsError, RecordedCosts, load_costs
from tasks.errors import TaskError
from tasks.registry import BUILT_IN, build, task_name, task_refs

SIGNIFICANT_DIGITS = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 recorded, 1 machine too busy, 2 bad arguments."""
    arguments = _parser().parse_args(argv)
    try:
        refs = task_refs("", arguments.tasks or ",".join(BUILT_IN))
    except TaskError as error:
        print(error, file=sys.stderr)
        return 2
    device = discover(arguments.cores, CPU)
    name = arguments.name or f"cpu-{device.num_cores}-cores"
    try:
        found = record(
            refs,
            device,
            budget_s=arguments.budget_s,
            repeats=arguments.repeats,
            max_foreign_cores=arguments.max_foreign_cores,
            patience_s=arguments.patience_s,
        )
    except BusyError as error:
        print(error, file=sys.stderr)
        return 1
    how = f"median of {arguments.repeats} measurements, others using at most {arguments.max_foreign_cores:g} cores"
    print(write(name, device, found, how))
    return 0


class BusyError(RuntimeError):
    """A machine too busy to measure on."""


def record(
    refs: Sequence[str], device: Device, *, budget_s: float, repeats: int, max_foreign_cores: float, patience_s: float
) -> dict[str, TaskCost]:
    """Cost by task name: of `repeats` undisturbed measurements the one in the middle. The tasks take turns.

    Raises:
        BusyError: no undisturbed measurements within `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    middle = {}
    samples: dict[str, list[TaskCost]] = {ref: [] for ref in refs}
    while waiting := [ref for ref in refs if len(samples[ref]) < repeats]:
        for ref in waiting:
            if time.monotonic() >= deadline:
                raise BusyError(f"others kept the machine busy for {patience_s:g} s; try again, or --max-foreign-cores")
            workload = cast(Workload, build(ref, DataSpec()))
            with foreign_load() as foreign:
                cost = measure(workload, device, budget_s=budget_s)
            if foreign.cores <= max_foreign_cores:
                samples[ref].append(cost)
    for ref, costs in samples.items():
        ordered = sorted(costs, key=lambda cost: cost.solo_cost_s)
        cost = middle[task_name(ref)] = ordered[len(ordered) // 2]
        low, high = ordered[0].solo_cost_s, ordered[-1].solo_cost_s
        text = f"{ref}: {cost.solo_cost_s * 1e6:.1f} us an example ({low * 1e6:.1f} to {high * 1e6:.1f})"
        print(f"{text}, demand {cost.demand:.2f}", file=sys.stderr)
    return middle


@dataclass
class Load:
    """CPU cores that other processes kept busy, on average over the block."""

    cores: float = 0.0


@contextlib.contextmanager
def foreign_load() -> Iterator[Load]:
    """Measure what others do on this machine during the block."""

    def now() -> tuple[float, float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
        return time.monotonic(), busy, own.user + own.system

    load = Load()
    before = now()
    yield load
    seconds, busy, own = (end - begin for end, begin in zip(now(), before, strict=True))
    load.cores = max(0.0, busy - own) / max(seconds, 1e-9)


def write(
    name: str, device: Device, costs: Mapping[str, TaskCost], provenance: str, directory: Path = COSTS_DIR
) -> Path:
    """Write the costs; tasks recorded before on the same kind of machine and not now are kept."""
    kept: dict[str, TaskCost] = {}
    try:
        before: RecordedCosts | None = load_costs(name, directory)
    except CostsError:
        before = None
    if before is not None and (before.device, before.torch) == (device.name, torch.__version__):
        kept = dict(before.tasks)
    body = {
        "device": device.name,
        "num_cores": device.num_cores,
        "torch": torch.__version__,
        "provenance": provenance,
        "tasks": {task: _rounded(asdict(cost)) for task, cost in sorted({**kept, **costs}.items())},
    }
    path = directory / f"{name}.json"
    path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _rounded(value: Any) -> Any:
    """Floats to the digits that a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.record_costs", description=__doc__)
    parser.add_argument("--tasks", default="", help="comma-separated; default: all built-in ones")
    parser.add_argument("--cores", type=int, default=0, help="cores to use; default: those given")
    parser.add_argument("--budget-s", type=float, default=3.0, help="seconds for each measurement; default: 3")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each task; default: 5")
    parser.add_argument(
        "--max-foreign-cores", type=float, default=0.1, help="discard what others disturb; default: 0.1"
    )
    parser.add_argument("--patience-s", type=float, default=900.0, help="for undisturbed measurements; default: 900")
    parser.add_argument("--name", default="", help="file in simulations/costs; default: cpu-<N>-cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
