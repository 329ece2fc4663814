"""Paired ratios, the time budget and the measure of foreign CPU use, against numbers by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.disturbance import ForeignLoad, cpu_seconds
from gpu_runtime.bench.paired import interval, paired_ratio

VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_paired_by_round() -> None:
    ratio = paired_ratio({0: 1.0, 1: 2.0, 2: 3.0, 4: 9.0}, {0: 2.0, 1: 4.0, 2: 6.0, 3: 1.0})
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high, ratio.num_pairs) == (0.5, 0.5, 0.5, 3)


def test_no_common_round_is_no_ratio() -> None:
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


def test_one_odd_pair_of_five_moves_the_interval_and_not_the_median() -> None:
    found = interval([1.0, 1.0, 1.0, 1.0, 3.0])
    assert (found.median, found.low) == (1.0, 1.0)
    # Three or more of five draws are the odd one with probability 0.058: more than 2.5 %.
    assert found.high == 3.0


def test_two_odd_values_of_nine() -> None:
    # The median of nine draws is the odd one with probability 0.030 for two of nine, 0.001 for one of nine.
    assert interval([1.0] * 7 + [3.0] * 2).high == 3.0
    assert interval([1.0] * 8 + [3.0]).high == 1.0


@given(VALUES, st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_intervals_hold_their_median_and_repeat(values: list[float], seed: int) -> None:
    found = interval(values, seed)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert found == interval(values, seed)


@given(VALUES)
@settings(max_examples=25, deadline=None)
def test_intervals_scale(values: list[float]) -> None:
    one, two = interval(values), interval([2.0 * value for value in values])
    assert (two.median, two.low, two.high) == pytest.approx((2 * one.median, 2 * one.low, 2 * one.high))


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_an_interval_needs_finite_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values)


def test_budget() -> None:
    clock = Clock()
    budget = Budget(60.0, clock)
    first = budget.part(1.0, of=3.0)
    assert (budget.left_s, first.left_s) == (60.0, 20.0)
    clock.now_s += 12.0
    assert (budget.spent_s, budget.left_s, first.left_s) == (12.0, 48.0, 8.0)
    # What the first part left over is dealt out over the other two.
    assert budget.part(1.0, of=2.0).left_s == 24.0
    clock.now_s += 100.0
    assert (budget.left_s, first.left_s) == (0.0, 0.0)


def test_foreign_load_by_hand() -> None:
    clock, readings = Clock(), iter([(1000.0, 50.0), (1007.0, 54.0)])
    foreign = ForeignLoad(lambda: next(readings), clock)
    foreign.start()
    clock.now_s += 2.0
    assert foreign.cores == pytest.approx(1.5)


def test_foreign_load_unknown() -> None:
    foreign = ForeignLoad(lambda: None)
    foreign.start()
    assert foreign.cores is None


def test_cpu_seconds_by_hand(tmp_path: Path) -> None:
    def process(pid: int, parent: int, *ticks: int) -> None:
        (tmp_path / str(pid)).mkdir()
        text = f"{pid} (odd ) name) S {parent} 0 0 0 0 0 0 0 0 0 " + " ".join(map(str, ticks)) + " 20 0"
        (tmp_path / str(pid) / "stat").write_text(text)

    # user nice system idle iowait irq softirq steal guest guest_nice: guest time is in user already.
    (tmp_path / "stat").write_text("cpu  1000 10 200 5000 300 4 5 60 70 8\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    process(7, 1, 100, 20, 3, 4)
    process(8, 7, 10, 5, 0, 0)
    process(9, 8, 1, 0, 0, 0)
    process(10, 1, 5000, 0, 0, 0)
    per_s = os.sysconf("SC_CLK_TCK")
    assert cpu_seconds(tmp_path, pid=7) == (1279 / per_s, 143 / per_s)
    assert cpu_seconds(tmp_path / "nowhere") is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_own_children_are_not_foreign() -> None:
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    before = cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", code])
    while child.poll() is None:
        time.sleep(0.01)
    after = cpu_seconds()
    assert before is not None
    assert after is not None
    assert after[1] - before[1] >= 0.45
    assert after[0] >= before[0]
