"""Competitive sharing against running one task after another: fixed work, variants interleaved, paired ratios."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_runtime.allocator import TaskLoad, predicted_makespan
from gpu_runtime.bench.models import build
from gpu_runtime.contracts import TRAINED, DataSpec, TaskCost, TaskPlan
from gpu_runtime.device import CPU, Device
from gpu_runtime.executor import Executor
from gpu_runtime.lanes import LaneOptions, choose
from gpu_runtime.profiler import Profiler
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.workload import Workload

MIN_PAIRS = 5
NUM_BOOTSTRAP = 2000
BASELINE, ONE_THREAD, OURS = "sequential", "sequential-one-thread", "competitive"

# Seconds of each task alone, relative to each other.
MIXES: dict[str, dict[str, float]] = {
    "driving": {"lenet": 1.0, "grid-detector": 2.0, "unet": 4.0},
    "imbalanced": {"lenet": 1.0, "resnet8": 2.5, "unet": 9.0},
    "balanced": {"lenet": 1.0, "resnet8": 1.0, "unet": 1.0},
    "small": {"perceptron": 1.0, "perceptron.2": 1.0, "sensor-net": 1.0},
    "alone": {"unet": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Median of paired ratios with a bootstrap 95% interval."""

    median: float
    low: float
    high: float


def run(
    device: Device,
    mixes: Sequence[str] = ("driving", "balanced", "small"),
    *,
    seconds: float = 2.0,
    pairs: int = MIN_PAIRS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the benchmark and return its JSON object.

    Args:
        device: where.
        mixes: names in `MIXES`.
        seconds: about how long one run of the baseline takes for each mix.
        pairs: interleaved repeats of all variants.
        say: called with a line of progress after each mix.
    """
    rows = []
    for mix in mixes:
        row = _run_mix(device, mix, seconds, max(MIN_PAIRS, pairs))
        rows.append(row)
        ours = row["ratios"][OURS]
        say(f"{mix}: {OURS} takes {ours['median']:.2f} [{ours['low']:.2f}, {ours['high']:.2f}] of {BASELINE}")
    return {
        "name": "competitive",
        "device": device.name,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "driver": device.driver},
        "settings": {"num_cores": device.num_cores, "seconds": seconds, "pairs": pairs, "mixes": list(mixes)},
        "rows": rows,
        "headline": {
            "speedup": {row["mix"]: 1.0 / row["ratios"][OURS]["median"] for row in rows},
            "ratio_to_floor": {row["mix"]: row["ratio_to_floor"] for row in rows},
        },
    }


def paired_ratio(values: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Interval:
    """Median of `values[i] / baseline[i]` and its bootstrap 95% interval."""
    ratios = [value / base for value, base in zip(values, baseline, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(NUM_BOOTSTRAP))
    low, high = medians[int(0.025 * NUM_BOOTSTRAP)], medians[int(0.975 * NUM_BOOTSTRAP) - 1]
    return Interval(median=statistics.median(ratios), low=low, high=high)


def _run_mix(device: Device, mix: str, seconds: float, pairs: int) -> dict[str, Any]:
    weights = MIXES[mix]
    workloads = {task: build(task, DataSpec()) for task in weights}
    # Twin tasks of one kind share a measurement; nothing is kept on disk, so that a benchmark measures now.
    profiler = Profiler(budget_s=min(1.0, seconds), use_disk=False)
    costs = {task: profiler.cost(workload, device) for task, workload in workloads.items()}
    loads = [_load(task, weights, costs[task], workloads[task].batch_size, seconds) for task in weights]
    variants: dict[str, Callable[[], float]] = {
        BASELINE: lambda: _timed(device, workloads, loads, mode="sequential"),
        OURS: lambda: _timed(device, workloads, loads, mode="competitive"),
    }
    if device.kind == CPU:
        variants[ONE_THREAD] = lambda: _timed(device, workloads, loads, mode="sequential", deterministic=True)
    for variant in variants.values():
        variant()
    seconds_of: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(pairs):
        order = list(variants) if index % 2 == 0 else list(reversed(variants))
        for name in order:
            seconds_of[name].append(variants[name]())
    floor_s = predicted_makespan(loads)
    ratios = {name: vars(paired_ratio(seconds_of[name], seconds_of[BASELINE])) for name in variants}
    return {
        "mix": mix,
        "tasks": {load.task: {"num_examples": int(load.num_examples), "solo_s": load.solo_s} for load in loads},
        "seconds": seconds_of,
        "ratios": ratios,
        "floor_s": floor_s,
        "ratio_to_floor": statistics.median(seconds_of[OURS]) / floor_s,
    }


def _load(task: str, weights: Mapping[str, float], cost: TaskCost, batch_size: int, seconds: float) -> TaskLoad:
    wanted_s = seconds * weights[task] / sum(weights.values())
    num_steps = max(2, round(wanted_s / (cost.solo_cost_s * batch_size)))
    return TaskLoad(
        task=task,
        num_examples=num_steps * batch_size,
        solo_cost_s=cost.solo_cost_s,
        demand=cost.demand,
        speed_curve=cost.speed_curve,
    )


def _timed(
    device: Device,
    workloads: Mapping[str, Workload],
    loads: Sequence[TaskLoad],
    *,
    mode: str,
    deterministic: bool = False,
) -> float:
    trainings = [
        TaskTraining(
            workload=workloads[load.task],
            plan=TaskPlan(task=load.task, num_examples=int(load.num_examples)),
            arrays=_initial(workloads[load.task]),
            origin=Origin(client="bench", server_round=1, seed=0),
            device=device.torch_device,
        )
        for load in loads
    ]
    executor = Executor(choose("auto", mode, device), LaneOptions(mode=mode, deterministic=deterministic))
    started = time.perf_counter()
    execution = executor.run(trainings, loads)
    seconds = time.perf_counter() - started
    failed = [f"{result.task}: {result.error}" for result in execution.results.values() if result.outcome != TRAINED]
    if failed:
        raise RuntimeError("benchmark tasks failed: " + "; ".join(failed))
    return seconds


def _initial(workload: Workload) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    return {name: value.numpy() for name, value in workload.build_model().state_dict().items()}
