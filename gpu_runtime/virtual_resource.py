"""How much of a device each operator of a training step keeps busy, and from that the step's demand V.

V = sum_o r_o t_o / T: t_o seconds of operator o in a step alone on the device, r_o the part of the device it fills, T
the seconds of the step. With T = sum_o t_o this is the virtual resource of the competitive-sharing paper
(docs/architecture.md); gaps between operators, in which the device idles, make V smaller. On CUDA operators are kernels
and r_o is the part of the SMs that their grid covers; on a CPU r_o is how well an operator uses all cores given.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class OperatorDemand:
    """One operator: `seconds` t_o in a step, all calls together, and the part of the device it fills, r_o in 0..1."""

    name: str
    seconds: float
    filled: float


def demand_of(operators: Sequence[OperatorDemand], step_s: float | None = None) -> float:
    """V of a step that takes `step_s` seconds; None: as long as its operators. 0 without operators."""
    total_s = sum(operator.seconds for operator in operators) if step_s is None else step_s
    if not total_s > 0:
        return 0.0
    return min(1.0, sum(operator.filled * operator.seconds for operator in operators) / total_s)


def kernels_in(trace: Mapping[str, Any], num_sms: int, num_steps: int = 1) -> list[OperatorDemand]:
    """Kernels of a Chrome trace as torch's profiler writes it, the longest first.

    A grid of b blocks covers min(1, b / SMs) of the device: an SM takes a second block only when all have one.

    Args:
        trace: parsed JSON; events of category "kernel" have `dur` in microseconds and `args.grid`.
        num_sms: of the device.
        num_steps: that the trace covers.
    """
    weights: dict[str, tuple[float, float]] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("cat") != "kernel":
            continue
        seconds = float(event.get("dur", 0.0)) / 1e6 / num_steps
        grid = event.get("args", {}).get("grid") or [num_sms]
        filled = min(1.0, math.prod(int(size) for size in grid) / num_sms)
        known_s, known = weights.get(str(event.get("name")), (0.0, 0.0))
        weights[str(event.get("name"))] = known_s + seconds, known + filled * seconds
    return _longest_first(
        OperatorDemand(name=name, seconds=seconds, filled=weighted / seconds if seconds > 0 else 0.0)
        for name, (seconds, weighted) in weights.items()
    )


def from_thread_times(one_s: Mapping[str, float], all_s: Mapping[str, float], cores: int) -> list[OperatorDemand]:
    """Operators of a CPU from their seconds in a step on one thread and on all `cores`, the longest first.

    r_o = one / (cores * all): 1 for an operator that is `cores` times as fast on all of them. An operator that is
    slower on all threads than on one counts as if it were run on one: t_o = one, r_o = 1 / cores.
    """
    found = []
    for name, alone_s in one_s.items():
        seconds = min(alone_s, all_s.get(name, alone_s))
        filled = min(1.0, alone_s / (cores * seconds)) if seconds > 0 else 0.0
        found.append(OperatorDemand(name=name, seconds=seconds, filled=filled))
    return _longest_first(found)


def cuda_operators(
    step: Step, device: torch.device, num_sms: int, *, num_steps: int = 5, record: Callable[..., Any] = profile
) -> list[OperatorDemand]:
    """Kernels of a warmed-up training step on a device that does nothing else.

    Raises:
        RuntimeError: the profiler cannot read the device (CUPTI missing or not permitted): it names no kernel.
    """
    torch.cuda.synchronize(device)
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize(device)
    found = kernels_in(_exported(recorded), num_sms, num_steps)
    if not found:
        raise RuntimeError("the profiler has seen no kernel on the device")
    return found


def cpu_operators(step: Step, cores: int, *, num_steps: int = 5) -> list[OperatorDemand]:
    """Operators of a training step on a CPU that does nothing else. The calling thread's width is restored."""
    before = torch.get_num_threads()
    times: dict[int, dict[str, float]] = {}
    try:
        for threads in (1, cores):
            torch.set_num_threads(threads)
            step()
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                for _ in range(num_steps):
                    step()
            times[threads] = {
                event.key: event.self_cpu_time_total / 1e6 / num_steps for event in recorded.key_averages()
            }
    finally:
        torch.set_num_threads(before)
    return from_thread_times(times[1], times[cores], cores)


def _longest_first(operators: Iterable[OperatorDemand]) -> list[OperatorDemand]:
    return sorted(operators, key=lambda operator: (-operator.seconds, operator.name))


def _exported(recorded: Any) -> Mapping[str, Any]:
    descriptor, path = tempfile.mkstemp(suffix=".json")
    os.close(descriptor)
    try:
        recorded.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            trace: Mapping[str, Any] = json.load(file)
    finally:
        os.unlink(path)
    return trace
