"""Laws of equal-finish shares, and cases a person can check by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.allocator import (
    TaskLoad,
    equal_finish,
    packed,
    predicted_makespan,
    share_for,
    speed,
    whole_shares,
)

numbers = st.floats(0.05, 20.0)
fractions = st.floats(0.05, 1.0)


@st.composite
def curves(draw: st.DrawFn) -> tuple[tuple[float, float], ...]:
    """A concave rising curve from (0, 0) to (1, 1)."""
    slopes = sorted(draw(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4)), reverse=True)
    height = sum(slopes)
    points, value = [], 0.0
    for index, slope in enumerate(slopes, start=1):
        value += slope
        points.append((index / len(slopes), value / height))
    points[-1] = (1.0, 1.0)
    return tuple(points)


@st.composite
def task_loads(draw: st.DrawFn) -> list[TaskLoad]:
    count = draw(st.integers(1, 5))
    return [
        TaskLoad(
            task=f"t{index}",
            num_examples=draw(numbers),
            solo_cost_s=draw(numbers),
            demand=draw(fractions),
            speed_curve=draw(curves()),
            maximum_share=draw(st.one_of(st.just(1.0), fractions)),
        )
        for index in range(count)
    ]


def load(task: str, solo_s: float, demand: float = 1.0, **more: float) -> TaskLoad:
    return TaskLoad(task=task, num_examples=solo_s, solo_cost_s=1.0, demand=demand, **more)


def test_two_tasks_that_fill_the_device_share_it_by_work() -> None:
    allocation = equal_finish([load("a", 3.0), load("b", 1.0)])
    assert allocation.shares == pytest.approx({"a": 0.75, "b": 0.25})
    assert allocation.finish_s == pytest.approx({"a": 4.0, "b": 4.0})


def test_a_task_that_cannot_be_sped_up_decides_the_finish() -> None:
    # Both demand half the device: they fit side by side, and b slows down to end with a.
    allocation = equal_finish([load("a", 4.0, demand=0.5), load("b", 1.0, demand=0.5)])
    assert allocation.finish_s == pytest.approx({"a": 4.0, "b": 4.0})
    assert allocation.shares == pytest.approx({"a": 0.5, "b": 0.125})


def test_capacity_above_one_serves_more() -> None:
    loads = [load("a", 2.0), load("b", 2.0)]
    assert predicted_makespan(loads) == 4.0
    assert predicted_makespan(loads, capacity=1.25) == pytest.approx(3.2)
    assert equal_finish(loads, capacity=1.25).finish_s == pytest.approx({"a": 3.2, "b": 3.2})


def test_no_tasks() -> None:
    assert equal_finish([]).shares == {}
    assert predicted_makespan([]) == 0.0


@given(loads=task_loads(), minimum=st.floats(0.0, 0.5), capacity=st.floats(0.5, 2.0))
def test_tasks_not_at_a_bound_finish_together_within_the_capacity(
    loads: list[TaskLoad], minimum: float, capacity: float
) -> None:
    allocation = equal_finish(loads, capacity=capacity, minimum_share=minimum)
    free, demand = [], 0.0
    for each in loads:
        share = allocation.shares[each.task]
        assert minimum - 1e-9 <= share <= max(minimum, each.maximum_share) + 1e-9
        demand += each.demand * speed(each.curve, share)
        if minimum + 1e-6 < share < each.maximum_share - 1e-6:
            free.append(allocation.finish_s[each.task])
    if free:
        assert max(free) <= min(free) * (1 + 1e-6)
    at_minimum = sum(each.demand * speed(each.curve, minimum) for each in loads)
    assert demand <= max(capacity, at_minimum) * (1 + 1e-6)


@given(loads=task_loads(), capacity=st.floats(0.5, 2.0))
def test_nothing_ends_before_the_predicted_makespan_unless_it_is_a_bound(
    loads: list[TaskLoad], capacity: float
) -> None:
    uncapped = [dataclasses.replace(each, maximum_share=1.0) for each in loads]
    finish = equal_finish(uncapped, capacity=capacity).finish_s
    assert max(finish.values()) == pytest.approx(predicted_makespan(uncapped, capacity), rel=1e-6)


@given(loads=task_loads(), factor=st.floats(1.1, 3.0), capacity=st.floats(0.5, 2.0))
def test_more_work_never_ends_sooner_and_more_capacity_never_later(
    loads: list[TaskLoad], factor: float, capacity: float
) -> None:
    heavier = [dataclasses.replace(loads[0], num_examples=loads[0].num_examples * factor), *loads[1:]]
    now = predicted_makespan(loads, capacity)
    assert predicted_makespan(heavier, capacity) >= now
    assert predicted_makespan(loads, capacity * factor) <= now
    before, after = equal_finish(loads, capacity=capacity).finish_s, equal_finish(heavier, capacity=capacity).finish_s
    assert max(after.values()) >= max(before.values()) * (1 - 1e-6)


@given(loads=task_loads(), unit=st.floats(1e-3, 1e3), capacity=st.floats(0.5, 2.0))
def test_units_do_not_matter(loads: list[TaskLoad], unit: float, capacity: float) -> None:
    scaled = [dataclasses.replace(each, solo_cost_s=each.solo_cost_s * unit) for each in loads]
    before, after = equal_finish(loads, capacity=capacity), equal_finish(scaled, capacity=capacity)
    assert dict(after.shares) == pytest.approx(dict(before.shares), rel=1e-6)
    assert dict(after.finish_s) == pytest.approx({t: s * unit for t, s in before.finish_s.items()}, rel=1e-6)


@given(curve=curves(), share=st.floats(0.0, 1.0))
def test_share_for_inverts_speed(curve: tuple[tuple[float, float], ...], share: float) -> None:
    reached = speed(curve, share)
    assert share_for(curve, reached) <= share + 1e-9
    assert speed(curve, share_for(curve, reached)) == pytest.approx(reached)


@pytest.mark.parametrize("field", ["num_examples", "solo_cost_s", "demand", "maximum_share"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_loads_are_finite_and_positive(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"a: {field} must be finite and above 0"):
        TaskLoad(**({"task": "a", "num_examples": 1.0, "solo_cost_s": 1.0} | {field: value}))  # type: ignore[arg-type]


@given(shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), spare=st.integers(0, 20))
def test_whole_shares_use_every_core_and_forget_nobody(shares: list[float], spare: int) -> None:
    named = {f"t{index}": share for index, share in enumerate(shares)}
    counts = whole_shares(named, len(named) + spare)
    assert sum(counts.values()) == len(named) + spare
    assert min(counts.values()) >= 1
    for a in named:
        for b in named:
            assert counts[a] >= counts[b] or named[a] <= named[b]


def test_whole_shares_by_hand() -> None:
    assert whole_shares({"a": 0.75, "b": 0.25}, 8) == {"a": 6, "b": 2}
    with pytest.raises(ValueError, match="3 tasks cannot"):
        whole_shares({"a": 1.0, "b": 1.0, "c": 1.0}, 2)


@given(values=st.lists(numbers, min_size=1, max_size=12), groups=st.integers(1, 5))
def test_packing_is_within_a_third_of_even(values: list[float], groups: int) -> None:
    loads = {f"t{index}": value for index, value in enumerate(values)}
    parts = packed(loads, groups)
    assert sorted(task for part in parts for task in part) == sorted(loads)
    heaviest = max(sum(loads[task] for task in part) for part in parts)
    # Graham (1969): LPT stays within 4/3 - 1/(3m) of the optimum, which is no less than this.
    two_of = sorted(values, reverse=True)
    pair = two_of[groups - 1] + two_of[groups] if len(values) > groups else 0.0
    assert heaviest <= (4 / 3) * max(sum(values) / groups, max(values), pair) + 1e-9
