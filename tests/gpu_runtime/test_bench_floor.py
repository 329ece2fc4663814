"""The lower bound on the makespan: by hand, against HiGHS, and its laws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from gpu_runtime.bench.floor import SoloTimes, floor

TIMES = st.floats(0.01, 100.0)
TASKS = st.lists(st.builds(lambda one, all_: SoloTimes(one_s=one, all_s=all_), TIMES, TIMES), min_size=1, max_size=8)


def solo(*times: tuple[float, float]) -> dict[str, SoloTimes]:
    return {f"t{index}": SoloTimes(one_s=one, all_s=all_) for index, (one, all_) in enumerate(times)}


def by_highs(tasks: dict[str, SoloTimes], cores: int) -> float:
    """The linear program of the docstring as it stands: variables x_1 ... x_n, T."""
    times = list(tasks.values())
    objective = [0.0] * len(times) + [1.0]
    rows = [[cores * task.all_s - task.one_s for task in times] + [-float(cores)]]
    limits = [-sum(task.one_s for task in times)]
    for index, task in enumerate(times):
        row = [0.0] * len(times) + [-1.0]
        row[index] = task.all_s - task.one_s
        rows.append(row)
        limits.append(-task.one_s)
    bounds = [(0.0, 1.0)] * len(times) + [(0.0, None)]
    solution = linprog(objective, A_ub=rows, b_ub=limits, bounds=bounds, method="highs")
    assert solution.status == 0
    return float(solution.fun)


@pytest.mark.parametrize(
    ("tasks", "cores", "expected"),
    [
        # Alone: all threads, and one thread where they do not help.
        (solo((10, 6)), 2, 6.0),
        (solo((10, 12)), 2, 10.0),
        # Two equal tasks on two cores: one each, whatever all threads would gain.
        (solo((3, 2), (3, 2)), 2, 3.0),
        # Three on two cores: 9 core-seconds.
        (solo((3, 2), (3, 2), (3, 2)), 2, 4.5),
        # One dominates: with x of it on both threads 10 - 4x = T and (10 + 2x + 2) / 2 = T, so x = 0.8 and T = 6.8.
        (solo((10, 6), (2, 2)), 2, 6.8),
        # All threads are more than P times as fast (a cache that fits): then everything runs on all threads.
        (solo((10, 4), (10, 4)), 2, 8.0),
        (solo((8, 2), (1, 1)), 4, 2.25),
    ],
)
def test_by_hand(tasks: dict[str, SoloTimes], cores: int, expected: float) -> None:
    assert floor(tasks, cores).makespan_s == pytest.approx(expected)


def test_what_must_be_widened() -> None:
    found = floor(solo((10, 6), (2, 2)), 2)
    assert found.wide_fraction == {"t0": pytest.approx(0.8), "t1": 0.0}


@given(TASKS, st.integers(1, 16))
@settings(max_examples=300, deadline=None)
def test_equals_the_linear_program(times: list[SoloTimes], cores: int) -> None:
    tasks = {f"t{index}": task for index, task in enumerate(times)}
    assert floor(tasks, cores).makespan_s == pytest.approx(by_highs(tasks, cores), rel=1e-6)


@given(TASKS, st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_laws(times: list[SoloTimes], cores: int) -> None:
    tasks = {f"t{index}": task for index, task in enumerate(times)}
    least = floor(tasks, cores)
    # Never above running one after another at the better width, never below the slowest task or perfect use.
    best = [min(task.one_s, task.all_s) for task in times]
    assert max(best) * (1 - 1e-9) <= least.makespan_s <= sum(best) * (1 + 1e-9)
    perfect = sum(min(task.one_s, cores * task.all_s) for task in times) / cores
    assert least.makespan_s >= perfect * (1 - 1e-9)
    assert all(0.0 <= fraction <= 1.0 for fraction in least.wide_fraction.values())
    # More work is never sooner done.
    more = floor({**tasks, "more": SoloTimes(one_s=1.0, all_s=0.7)}, cores)
    assert more.makespan_s >= least.makespan_s * (1 - 1e-9)


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_times_must_be_above_zero(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        SoloTimes(one_s=times[0], all_s=times[1])
