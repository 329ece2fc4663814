"""Partitions of a device's SMs: disjoint where they must be, evenly laid where they may overlap."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.sm_partitions import Partition, SmUnits, disjoint, overlapping

H200 = SmUnits(num_sms=132, num_units=16, unit_sms=8)


def shares_of(values: list[float]) -> dict[str, float]:
    return {f"t{index}": value for index, value in enumerate(values)}


def units_of(partition: Partition, device: SmUnits) -> tuple[int, ...]:
    return tuple(range(device.num_units)) if partition.units is None else partition.units


@given(
    shares=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=24).map(shares_of),
    device=st.builds(
        lambda num_units, unit_sms, rest: SmUnits(
            num_sms=num_units * unit_sms + rest, num_units=num_units, unit_sms=unit_sms
        ),
        st.integers(1, 40),
        st.integers(1, 8),
        st.integers(0, 7),
    ),
)
def test_every_task_has_sms_that_exist(shares: dict[str, float], device: SmUnits) -> None:
    for partitions in (overlapping(shares, device), disjoint(shares, shares, device)):
        assert sorted(task for partition in partitions for task in partition.tasks) == sorted(shares)
        for partition in partitions:
            units = units_of(partition, device)
            assert len(set(units)) == len(units) >= 1
            assert set(units) <= set(range(device.num_units))
            assert 1 <= partition.got_sms(device) <= device.num_sms
            assert 1 <= partition.asked_sms <= device.num_sms

    parts = disjoint(shares, shares, device)
    used = Counter(unit for partition in parts for unit in units_of(partition, device))
    assert used == Counter(range(device.num_units))

    runs = [partition for partition in overlapping(shares, device) if partition.units is not None]
    layers = Counter(dict.fromkeys(range(device.num_units), 0))
    layers.update(unit for partition in runs for unit in units_of(partition, device))
    assert max(layers.values()) - min(layers.values()) <= 1


def test_shares_of_half_and_half_do_not_touch() -> None:
    first, second = overlapping({"a": 0.5, "b": 0.5}, H200)
    assert (first.asked_sms, first.got_sms(H200)) == (66, 64)
    assert not set(first.units or ()) & set(second.units or ())


def test_shares_above_one_in_all_overlap() -> None:
    first, second, third = overlapping({"a": 0.75, "b": 0.75, "c": 1.0}, H200)
    assert len(set(first.units or ()) & set(second.units or ())) == 8
    assert third == Partition(tasks=("c",), asked_sms=132, units=None)
    assert third.got_sms(H200) == 132


def test_a_tiny_share_gets_one_unit() -> None:
    (only,) = overlapping({"a": 1e-6}, H200)
    assert (only.asked_sms, only.got_sms(H200)) == (1, 8)


def test_disjoint_parts_by_hand() -> None:
    parts = disjoint({"a": 0.25, "b": 0.25, "c": 0.5}, {}, H200)
    assert [(part.tasks, part.asked_sms, part.got_sms(H200)) for part in parts] == [
        (("a",), 33, 32),
        (("b",), 33, 32),
        (("c",), 66, 64),
    ]
    assert H200.rest_sms == 4


def test_one_task_has_the_whole_device() -> None:
    assert disjoint({"a": 0.3}, {}, H200) == [Partition(tasks=("a",), asked_sms=132, units=None)]


def test_more_tasks_than_units_are_packed_by_work() -> None:
    device = SmUnits(num_sms=16, num_units=2, unit_sms=8)
    parts = disjoint({"a": 0.2, "b": 0.2, "c": 0.6}, {"a": 1.0, "b": 2.0, "c": 3.0}, device)
    assert {part.tasks for part in parts} == {("c",), ("b", "a")}
    assert all(part.got_sms(device) == 8 for part in parts)


@pytest.mark.parametrize(("share", "units"), [(60 / 132, 8), (68 / 132, 9), (0.99, 16)])
def test_a_share_goes_to_the_nearest_unit(share: float, units: int) -> None:
    (only,) = overlapping({"a": share}, H200)
    assert len(only.units or ()) == units
