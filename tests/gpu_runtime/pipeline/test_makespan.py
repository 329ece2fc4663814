"""Formula, recurrence and simulation of a step of split training: all three agree, and small cases by hand."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_cases import ALONE, CUTS, STAGES, even_cut, random_cut

from gpu_runtime.pipeline.makespan import (
    RESOURCES,
    Affine,
    Busy,
    CutCost,
    busy_s,
    equal_makespan_s,
    micro_batch_sizes,
    schedule,
    step_s,
    steps_s,
    total,
)
from gpu_runtime.pipeline.simulator import SimulatedSession, simulate

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def simulated_s(cut: CutCost, *steps: tuple[int, ...]) -> float:
    return simulate([SimulatedSession(client="a", cut=cut, steps=steps)]).end_s


# ------------------------------------------------------------------------------------------------------------ by hand


def test_equal_stages_by_hand() -> None:
    # Forwards end at 3 s, gradients arrive at 4, 5 and 6 s, the last backward ends at 7 s.
    assert equal_makespan_s(even_cut(), 1, 3) == 7.0
    assert step_s(even_cut(), 3, 3) == 7.0
    assert schedule(even_cut(), (1, 1, 1)).step_s == 7.0
    assert simulated_s(even_cut(), (1, 1, 1)) == 7.0


@pytest.mark.parametrize(
    ("cut", "seconds"),
    [
        # Device bound: N (cf + cb).
        (even_cut(0.0, device_forward=Affine(example_s=2.0), device_backward=Affine(example_s=3.0)), 20.0),
        # One slow server: it is done with the fourth at 2 + 4 * 2, and the device 2 s later.
        (even_cut(server=Affine(example_s=2.0)), 12.0),
        # Latency is paid once each way.
        (even_cut(latency_up_s=10.0, latency_down_s=10.0), 28.0),
        # The first gradient comes late, and backwards are slow: L + N cb.
        (even_cut(device_backward=Affine(example_s=3.0)), 16.0),
        # The device's update counts, the server's is hidden behind download, backward, forward and upload.
        (even_cut(update_s=0.5, server_update_s=4.5), 8.5),
        # The server's update is half a second too long to be hidden.
        (even_cut(update_s=0.5, server_update_s=5.0), 9.0),
    ],
)
def test_bounds_by_hand(cut: CutCost, seconds: float) -> None:
    assert step_s(cut, 4, 4) == seconds


def test_an_uneven_step_by_hand() -> None:
    # Sizes 2, 1. Forwards end at 2, 3; uploads at 4, 5; server at 6, 7; gradients at 8, 9; backwards at 10, 11.
    assert schedule(even_cut(), (2, 1)).step_s == 11.0
    assert step_s(even_cut(), 3, 2) == 11.0
    # Sizes 1, 2: forwards at 1, 3; uploads 2, 5; server 3, 7; gradients 4, 9; backwards 5, 11.
    assert schedule(even_cut(), (1, 2)).step_s == 11.0


def test_idle_fractions_by_hand() -> None:
    done = schedule(even_cut(update_s=1.0), (1, 1, 1))
    assert done.step_s == 8.0
    assert done.busy == Busy(device=7.0, uplink=3.0, server=3.0, downlink=3.0)
    assert [done.idle_fraction(resource) for resource in RESOURCES] == [0.125, 0.625, 0.625, 0.625]


def test_fixed_seconds_make_many_micro_batches_dear() -> None:
    # The uplink is the slowest: first forward, all uploads, and what follows the last one.
    cut = even_cut(1.0, uplink=Affine(call_s=3.0, example_s=1.0))
    assert [step_s(cut, 4, count) for count in (1, 2, 4)] == [4.0 + 7 + 12, 2.0 + 10 + 6, 1.0 + 16 + 3]


def test_busy_seconds_add() -> None:
    busy = busy_s(even_cut(server_update_s=2.0), 8, 4)
    assert busy == Busy(device=16.0, uplink=8.0, server=10.0, downlink=8.0)
    assert total([busy, busy]) == Busy(device=32.0, uplink=16.0, server=20.0, downlink=16.0)


# -------------------------------------------------------------------------------------------------------- micro-batches


@given(st.integers(1, 300), st.integers(1, 300))
def test_micro_batches_are_even_and_none_is_dropped(batch_size: int, count: int) -> None:
    sizes = micro_batch_sizes(batch_size, count)
    assert sum(sizes) == batch_size
    assert len(sizes) == min(batch_size, count)
    assert 1 <= sizes[-1] <= sizes[0] <= sizes[-1] + 1
    assert sizes == tuple(sorted(sizes, reverse=True))


def test_micro_batches_by_hand() -> None:
    assert micro_batch_sizes(10, 4) == (3, 3, 2, 2)
    with pytest.raises(ValueError, match="0 examples"):
        micro_batch_sizes(0, 4)
    with pytest.raises(ValueError, match="0 micro-batches"):
        micro_batch_sizes(4, 0)


# ----------------------------------------------------------------------------------------------------------- agreement


def test_formula_recurrence_and_simulation_agree_on_thousands_of_cases() -> None:
    draw = random.Random(0)
    for _ in range(4000):
        cut = random_cut(draw, server_update=False)
        size, count = draw.randint(1, 6), draw.randint(1, 12)
        expected = pytest.approx(equal_makespan_s(cut, size, count) + cut.update_s, rel=1e-9)
        assert step_s(cut, size * count, count) == expected
        assert schedule(cut, (size,) * count).step_s == expected
        assert simulated_s(cut, (size,) * count) == expected


def test_closed_form_of_uneven_micro_batches_agrees_on_thousands_of_cases() -> None:
    draw = random.Random(1)
    for _ in range(4000):
        cut = random_cut(draw, server_update=False)
        batch_size = draw.randint(1, 40)
        count = draw.randint(1, batch_size)
        assert step_s(cut, batch_size, count) == pytest.approx(
            schedule(cut, micro_batch_sizes(batch_size, count)).step_s, rel=1e-9
        )


@given(CUTS, st.lists(SIZES, min_size=1, max_size=4))
def test_recurrence_of_uneven_steps_agrees_with_simulation(cut: CutCost, steps: list[list[int]]) -> None:
    ends = simulate([SimulatedSession(client="a", cut=cut, steps=steps)]).step_ends_s[0]
    for number, end_s in enumerate(ends, start=1):
        assert steps_s(cut, steps[:number]) == pytest.approx(end_s, rel=1e-9)


@given(CUTS, SIZES)
def test_busy_seconds_are_those_of_the_simulation(cut: CutCost, sizes: list[int]) -> None:
    timeline = simulate([SimulatedSession(client="a", cut=cut, steps=[sizes])])
    busy = schedule(cut, sizes).busy
    for resource in RESOURCES:
        name = resource if resource == "server" else f"a/{resource}"
        assert timeline.busy_s(name) == pytest.approx(getattr(busy, resource), rel=1e-9)


@given(CUTS, st.integers(1, 20), st.data())
def test_a_step_among_others_takes_no_longer_than_said(cut: CutCost, batch_size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, batch_size))
    sizes = micro_batch_sizes(batch_size, count)
    said_s = 8 * step_s(cut, batch_size, count)
    assert steps_s(cut, [sizes] * 8) <= said_s * (1 + 1e-9)
    away_s = schedule(replace(cut, server=Affine()), (sizes[-1],)).step_s
    if cut.server_update_s <= away_s:
        assert steps_s(cut, [sizes] * 8) == pytest.approx(said_s, rel=1e-9)


@given(CUTS, st.integers(1, 30), st.data())
def test_a_faster_resource_never_slows_a_step(cut: CutCost, batch_size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, batch_size))
    name = data.draw(st.sampled_from((*STAGES, *ALONE)))
    part = data.draw(st.floats(0.0, 1.0))
    value = getattr(cut, name)
    faster = replace(
        cut,
        **{
            name: Affine(call_s=value.call_s * part, example_s=value.example_s * part)
            if isinstance(value, Affine)
            else value * part
        },
    )
    assert step_s(faster, batch_size, count) <= step_s(cut, batch_size, count) * (1 + 1e-9)
    sizes = micro_batch_sizes(batch_size, count)
    assert schedule(faster, sizes).step_s <= schedule(cut, sizes).step_s * (1 + 1e-9)


@given(CUTS, st.integers(1, 30), st.data())
def test_no_step_beats_its_busiest_resource(cut: CutCost, batch_size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, batch_size))
    busy = busy_s(cut, batch_size, count)
    floor = max(busy.device, busy.uplink, busy.server, busy.downlink)
    assert step_s(cut, batch_size, count) >= floor * (1 - 1e-9)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["call_s", "example_s"])
def test_nonsense_seconds_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Affine(**{name: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALONE)
def test_nonsense_in_a_cut_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        even_cut(**{name: value})


def test_nonsense_counts_are_named() -> None:
    with pytest.raises(ValueError, match="split_point"):
        replace(even_cut(), split_point=0)
    for count in (0, 5):
        with pytest.raises(ValueError, match=r"count must be in 1\.\.4"):
            step_s(even_cut(), 4, count)
    for sizes in ((), (1, 0)):
        with pytest.raises(ValueError, match="sizes"):
            schedule(even_cut(), sizes)
