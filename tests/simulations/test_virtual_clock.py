"""Laws of the virtual clock, and rounds that a person can work out on paper."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.contracts import TaskCost
from simulations.virtual_clock import Work, lower_bound_s, run_device, share_for, speed_at, transfer_s

CONCURRENT = ("competitive", "exclusive")


def cost(seconds: float, demand: float = 1.0, curve: tuple[tuple[float, float], ...] = ()) -> TaskCost:
    return TaskCost(demand=demand, solo_cost_s=seconds, speed_curve=curve)


def work(task: str, examples: float, seconds: float, demand: float = 1.0, **more: float) -> Work:
    return Work(task=task, num_examples=examples, cost=cost(seconds, demand), **more)  # type: ignore[arg-type]


@st.composite
def loads(draw: st.DrawFn, with_errors: bool = True) -> list[Work]:
    """Up to five tasks with concave speed curves; the executor's belief may be wrong by a factor of 2."""
    found = []
    for i in range(draw(st.integers(1, 5))):
        demand = draw(st.floats(0.05, 1.0))
        curve = ((demand, 1.0), (1.0, 1.0)) if demand < 1 else ((1.0, 1.0),)
        seconds = draw(st.floats(1e-5, 1e-1))
        wrong = draw(st.floats(0.5, 2.0)) if with_errors else 1.0
        found.append(
            Work(
                task=f"t{i}",
                num_examples=draw(st.integers(1, 10_000)),
                cost=TaskCost(demand=demand, solo_cost_s=seconds, speed_curve=curve),
                expected_cost_s=seconds * wrong,
                share=draw(st.none() | st.floats(0.05, 1.0)),
            )
        )
    return found


# -------------------------------------------------------------------------------------------------------------- laws


@given(loads(), st.sampled_from(CONCURRENT), st.floats(0.5, 2.0), st.floats(0, 1))
def test_never_below_demand_over_capacity_nor_below_the_longest_task(
    items: list[Work], mode: str, capacity: float, fixed_s: float
) -> None:
    timeline = run_device(items, mode=mode, capacity=capacity, fixed_s=fixed_s)
    assert timeline.makespan_s >= (lower_bound_s(items, capacity=capacity) + fixed_s) * (1 - 1e-9)


@given(loads(with_errors=False), st.floats(0.5, 2.0))
def test_true_expectations_and_free_shares_reach_the_bound_and_finish_together(
    items: list[Work], capacity: float
) -> None:
    free = [Work(task=item.task, num_examples=item.num_examples, cost=item.cost) for item in items]
    timeline = run_device(free, mode="competitive", capacity=capacity)
    assert math.isclose(timeline.makespan_s, lower_bound_s(free, capacity=capacity), rel_tol=1e-9)
    assert all(math.isclose(end, timeline.makespan_s, rel_tol=1e-9) for end in timeline.finish_s.values())


@given(loads())
def test_sequential_is_the_sum(items: list[Work]) -> None:
    total = sum(item.num_examples * item.cost.solo_cost_s for item in items)
    assert math.isclose(run_device(items, mode="sequential").makespan_s, total, rel_tol=1e-9)


@given(loads(), st.sampled_from(("sequential", *CONCURRENT)), st.floats(0.1, 10))
def test_a_device_k_times_as_fast_needs_a_kth_of_the_time(items: list[Work], mode: str, k: float) -> None:
    faster = [
        Work(
            task=item.task,
            num_examples=item.num_examples,
            cost=cost(item.cost.solo_cost_s / k, item.cost.demand, item.cost.speed_curve),
            expected_cost_s=item.expected_s / k,
            share=item.share,
        )
        for item in items
    ]
    slow, fast = run_device(items, mode=mode), run_device(faster, mode=mode)
    assert math.isclose(slow.makespan_s, k * fast.makespan_s, rel_tol=1e-6)


@given(loads(), st.sampled_from(("sequential", *CONCURRENT)), st.floats(0.5, 2.0))
def test_no_task_takes_less_time_than_alone(items: list[Work], mode: str, capacity: float) -> None:
    timeline = run_device(items, mode=mode, capacity=capacity)
    for item in items:
        ours = [span for span in timeline.spans if span.task == item.task]
        assert math.isclose(max(span.end_s for span in ours), timeline.finish_s[item.task])
        busy_s = sum(span.end_s - span.start_s for span in ours)
        assert busy_s >= item.num_examples * item.cost.solo_cost_s - 1e-9 * timeline.makespan_s


@given(st.floats(0.01, 1.0), st.floats(0.1, 1.0))
def test_share_for_is_the_inverse_of_speed_at(demand: float, speed: float) -> None:
    for curve in ((), ((0.25, 0.4), (0.5, 0.7), (1.0, 1.0))):
        task = cost(1.0, demand, curve)
        assert math.isclose(speed_at(task, share_for(task, speed)), speed, rel_tol=1e-9)


# ------------------------------------------------------------------------------------------------- worked by hand


def test_two_tasks_that_fill_the_device_together() -> None:
    # 100 examples of 10 ms at demand 1 and 100 of 20 ms at demand 0.5: demand 1 + 1 = 2 s, longest 2 s.
    items = [work("a", 100, 0.01), work("b", 100, 0.02, 0.5)]
    timeline = run_device(items, mode="competitive")
    assert timeline.finish_s == pytest.approx({"a": 2.0, "b": 2.0})


def test_fixed_seconds_and_links_come_on_top() -> None:
    timeline = run_device([work("a", 100, 0.01)], mode="competitive", fixed_s=0.5, download_s=0.25, upload_s=0.125)
    assert timeline.finish_s["a"] == pytest.approx(1.75)
    assert timeline.makespan_s == pytest.approx(1.875)
    assert timeline.spans[0].start_s == pytest.approx(0.75)


def test_capacity_above_one_lets_two_full_tasks_overlap() -> None:
    items = [work("a", 100, 0.01), work("b", 100, 0.01)]
    assert run_device(items, mode="competitive", capacity=1.25).makespan_s == pytest.approx(1.6)


def test_a_wrong_expectation_costs_time_until_the_first_task_ends() -> None:
    # Both believed 1 s, so each gets speed 1/2. "a" truly takes 0.5 s alone: it ends at 1 s, when half of "b" is left.
    # From then on "b" is alone: 0.5 s more. Had the truth been known: 0.5 + 1 = 1.5 s as well, since no demand is lost.
    items = [work("a", 100, 0.005, expected_cost_s=0.01), work("b", 100, 0.01)]
    timeline = run_device(items, mode="competitive")
    assert timeline.finish_s == pytest.approx({"a": 1.0, "b": 1.5})


def test_exclusive_halves_do_not_pass_on_what_a_finished_task_leaves() -> None:
    # Shares 1/2 each; "a" ends after 1 s, "b" keeps its half and ends after 4 s instead of 2.5 s.
    items = [work("a", 50, 0.01, share=0.5), work("b", 200, 0.01, share=0.5)]
    timeline = run_device(items, mode="exclusive")
    assert timeline.finish_s == pytest.approx({"a": 1.0, "b": 4.0})


def test_exclusive_shares_of_equal_finish_add_up_to_one() -> None:
    items = [work("a", 100, 0.01), work("b", 300, 0.01)]
    timeline = run_device(items, mode="exclusive")
    assert timeline.finish_s == pytest.approx({"a": 4.0, "b": 4.0})


def test_given_shares_that_ask_for_too_much_are_slowed_alike() -> None:
    # Both want speed 1 at demand 1: each gets 1/2. "a" ends at 1 s; "b" has 1 s left and is alone.
    items = [work("a", 50, 0.01, share=1.0), work("b", 150, 0.01, share=1.0)]
    assert run_device(items, mode="competitive").finish_s == pytest.approx({"a": 1.0, "b": 2.0})


def test_sequential_keeps_the_order() -> None:
    timeline = run_device([work("a", 100, 0.01), work("b", 50, 0.01)], mode="sequential")
    assert timeline.finish_s == pytest.approx({"a": 1.0, "b": 1.5})


def test_no_work_is_the_fixed_part_only() -> None:
    assert run_device([], mode="competitive", fixed_s=0.5).makespan_s == 0.5
    assert run_device([work("a", 0, 0.01)], mode="competitive", fixed_s=0.5).finish_s == {"a": 0.5}


def test_transfer() -> None:
    assert transfer_s(1_000_000, 500_000.0, 0.1) == pytest.approx(2.1)
    assert transfer_s(1_000_000, None, None) == 0.0


@pytest.mark.parametrize(
    ("items", "mode", "fault"),
    [
        ([], "fair", "sharing mode"),
        ([work("a", 1, 0.0)], "competitive", "task 'a': seconds per example"),
        ([work("a", 1, 1.0, 1.5)], "competitive", "demand must lie in 0..1"),
        ([work("a", 1, 1.0, share=0.0)], "competitive", "share must be above 0"),
    ],
)
def test_bad_input_is_named(items: list[Work], mode: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        run_device(items, mode=mode)
