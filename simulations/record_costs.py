"""Record what training each task costs on this machine: `python -m simulations.record_costs`.

Virtual devices are multiples of the machine that recorded. Run it on a quiet machine and check the file in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

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
    """Exit code: 0 recorded, 2 bad arguments."""
    arguments = _parser().parse_args(argv)
    try:
        refs = task_refs("", arguments.tasks or ",".join(BUILT_IN))
    except TaskError as error:
        print(error, file=sys.stderr)
        return 2
    device = discover(arguments.cores, CPU)
    name = arguments.name or f"cpu-{device.num_cores}-cores"
    found = record(refs, device, budget_s=arguments.budget_s, repeats=arguments.repeats)
    print(write(name, device, found, f"lower-quartile training steps, median of {arguments.repeats} turns"))
    return 0


def record(refs: Sequence[str], device: Device, *, budget_s: float, repeats: int) -> dict[str, TaskCost]:
    """Cost by task name: of `repeats` measurements the one in the middle. The tasks take turns."""
    samples: dict[str, list[TaskCost]] = {}
    for _ in range(repeats):
        for ref in refs:
            cost = measure(cast(Workload, build(ref, DataSpec())), device, budget_s=budget_s)
            samples.setdefault(task_name(ref), []).append(cost)
    middle = {}
    for task, costs in samples.items():
        ordered = sorted(costs, key=lambda cost: cost.solo_cost_s)
        middle[task] = ordered[len(ordered) // 2]
        low, high = ordered[0].solo_cost_s, ordered[-1].solo_cost_s
        text = f"{task}: {middle[task].solo_cost_s * 1e6:.1f} us an example ({low * 1e6:.1f} to {high * 1e6:.1f})"
        print(f"{text}, demand {middle[task].demand:.2f}", file=sys.stderr)
    return middle


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
    parser.add_argument("--name", default="", help="file in simulations/costs; default: cpu-<N>-cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
