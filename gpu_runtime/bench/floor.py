"""The floor: no schedule of several tasks on P cores ends sooner than this. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SoloTimes:
    """Seconds that the whole work of one task takes alone: on one thread, and on all P threads."""

    one_s: float
    all_s: float

    def __post_init__(self) -> None:
        if not (self.one_s > 0 and self.all_s > 0):
            raise ValueError(f"solo times must be above 0, not {self.one_s} and {self.all_s}")


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least makespan, and the part of each task's work that runs on all threads in a schedule that reaches it."""

    makespan_s: float
    wide_fraction: Mapping[str, float]


def floor(solo: Mapping[str, SoloTimes], cores: int) -> Floor:
    """Lower bound on the makespan of malleable tasks whose every step runs on one thread or on all P.

    Task i alone takes a_i seconds on one thread and b_i on all P. With the fraction x_i of its work on all threads it
    occupies (1 - x_i) a_i + x_i P b_i core-seconds and, since it never runs two steps at once, (1 - x_i) a_i + x_i b_i
    seconds. The bound is the linear program over x and T:

        minimise   T
        subject to sum_i (1 - x_i) a_i + x_i P b_i <= P T      P cores serve at most P core-seconds per second
                   (1 - x_i) a_i + x_i b_i <= T                no task takes longer than T
                   0 <= x_i <= 1

    It holds for every schedule in which a step costs at least what it costs alone. Steps are taken as divisible, so
    a schedule of real steps may be unable to reach it.

    For a given T the tasks are independent: each takes the x_i of least area among those that let it end by T. That
    least area falls with T, is piecewise linear and convex, so Newton's method from below ends at the optimum after at
    most one step per task (`tests/gpu_runtime/test_bench_floor.py` compares it with HiGHS).

    Args:
        solo: times of each task, at least one.
        cores: P.
    """
    time_s = max(min(task.one_s, task.all_s) for task in solo.values())
    for _ in range(len(solo) + 2):
        excess = sum(_area(task, cores, time_s) for task in solo.values()) - cores * time_s
        if excess <= 1e-12 * cores * time_s:
            break
        time_s += excess / (cores + sum(_slope(task, cores, time_s) for task in solo.values()))
    return Floor(
        makespan_s=time_s,
        wide_fraction={name: _wide_fraction(task, cores, time_s) for name, task in solo.items()},
    )


def _wide_fraction(task: SoloTimes, cores: int, time_s: float) -> float:
    """x of least area among those with which the task ends by `time_s`."""
    if task.all_s >= task.one_s:
        return 0.0
    if cores * task.all_s < task.one_s:
        # Faster than P times: all threads cost less of everything.
        return 1.0
    return min(1.0, max(0.0, (task.one_s - time_s) / (task.one_s - task.all_s)))


def _area(task: SoloTimes, cores: int, time_s: float) -> float:
    wide = _wide_fraction(task, cores, time_s)
    return (1.0 - wide) * task.one_s + wide * cores * task.all_s


def _slope(task: SoloTimes, cores: int, time_s: float) -> float:
    """How fast the task's least area falls with T, to the right of `time_s`."""
    if not 0.0 < _wide_fraction(task, cores, time_s) <= 1.0 or cores * task.all_s < task.one_s:
        return 0.0
    return (cores * task.all_s - task.one_s) / (task.one_s - task.all_s)
