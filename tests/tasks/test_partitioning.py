"""Dealing out examples: every example exactly once, deterministic, and one clear line for what cannot be done."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.contracts import DataSpec, Partition
from tasks import partitioning
from tasks.base import TaskData, TaskError, TensorExamples
from tasks.partitioning import exact_sizes, partition_indices
from tasks.settings import PARTITIONERS

few = settings(max_examples=20, deadline=None)


def data_of(total: int, num_classes: int = 5, num_owners: int = 0) -> TaskData:
    numbers = torch.arange(total)
    examples = TensorExamples(inputs=numbers, targets=numbers % num_classes)
    owners = np.arange(total) % num_owners if num_owners else None
    return TaskData(train=examples, test=examples, partition_labels=(numbers % num_classes).numpy(), natural_ids=owners)


def deal(data: TaskData, name: str, count: int, **options: object) -> list[np.ndarray]:
    shares = options.pop("shares", ())
    return partition_indices(
        data, DataSpec(partitioner=name, partition=Partition(count=count, shares=shares), **options)
    )  # type: ignore[arg-type]


def assert_each_once(parts: list[np.ndarray], total: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(total))


@pytest.mark.parametrize("name", PARTITIONERS)
@few
@given(count=st.integers(1, 6), total=st.integers(250, 400), seed=st.integers(0, 2**31 - 1))
def test_every_example_goes_to_exactly_one_part(name: str, count: int, total: int, seed: int) -> None:
    data = data_of(total, num_owners=7)
    parts = deal(data, name, count, seed=seed, classes_per_partition=5, alpha=1.0)
    assert_each_once(parts, total)
    assert len(parts) == count
    assert all(len(part) > 0 for part in parts)
    again = deal(data, name, count, seed=seed, classes_per_partition=5, alpha=1.0)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", ["iid", "dirichlet"])
@few
@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5),
    total=st.integers(20, 120),
    seed=st.integers(0, 1000),
)
def test_shares_give_exact_sizes(name: str, shares: list[float], total: int, seed: int) -> None:
    parts = deal(data_of(total), name, len(shares), shares=tuple(shares), seed=seed)
    assert_each_once(parts, total)
    if name == "iid" or len(set(shares)) > 1:
        assert sorted(map(len, parts)) == sorted(exact_sizes(total, shares))


@given(shares=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30), total=st.integers(30, 10_000))
def test_sizes_sum_to_the_total_and_are_near_their_shares(shares: list[float], total: int) -> None:
    sizes = exact_sizes(total, shares)
    assert sum(sizes) == total
    assert min(sizes) >= 1
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - total * share / sum(shares)) <= len(shares)


def test_sizes_by_hand() -> None:
    assert exact_sizes(4000, [0.4, 0.3, 0.2, 0.1]) == [1600, 1200, 800, 400]
    assert exact_sizes(7, [1, 1, 1]) == [3, 2, 2]
    assert exact_sizes(10, [1e-9, 1, 1]) == [1, 4, 5]


def test_another_seed_deals_differently() -> None:
    one, other = (deal(data_of(100), "iid", 4, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one[0], other[0])


def test_iid_parts_are_mixed() -> None:
    parts = deal(data_of(1000), "iid", 2)
    assert all(len(np.unique(part % 5)) == 5 for part in parts)


def test_owners_are_kept_whole() -> None:
    parts = deal(data_of(80, num_owners=8), "natural-id", 3)
    owners = [set(part % 8) for part in parts]
    assert sorted(map(len, owners)) == [2, 3, 3]
    assert_each_once(parts, 80)
    assert not owners[0] & owners[1]


def test_owners_where_known_otherwise_as_named() -> None:
    assert all(len(set(part % 4)) == 1 for part in deal(data_of(80, num_owners=4), "natural-id-or-iid", 4))
    assert [len(part) for part in deal(data_of(80), "natural-id-or-iid", 4)] == [20] * 4


def test_pathological_parts_hold_few_classes_and_none_is_left_out() -> None:
    parts = deal(data_of(100, num_classes=10), "pathological", 5, classes_per_partition=4)
    assert all(len(np.unique(part % 10)) == 4 for part in parts)
    assert_each_once(parts, 100)


def test_pathological_covers_all_classes_even_when_none_may_be_shared() -> None:
    parts = deal(data_of(100, num_classes=10), "pathological", 5, classes_per_partition=2)
    assert sorted(len(part) for part in parts) == [20] * 5
    assert_each_once(parts, 100)


def test_small_alpha_is_more_unequal() -> None:
    def spread(alpha: float) -> float:
        parts = deal(data_of(2000), "dirichlet", 4, alpha=alpha)
        counts = np.array([np.bincount(part % 5, minlength=5) / len(part) for part in parts])
        return float(counts.std(axis=0).mean())

    assert spread(0.2) > 2 * spread(50.0)


def test_a_share_of_zero_is_an_empty_part() -> None:
    parts = deal(data_of(20), "iid", 3, shares=(0.5, 0.0, 0.5))
    assert [len(part) for part in parts] == [10, 0, 10]


def test_shares_a_partitioner_cannot_follow_are_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioning, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="tasks.partitioning"):
        for _ in range(2):
            assert_each_once(deal(data_of(40), "shard", 2, shares=(0.7, 0.3)), 40)
    assert [record.getMessage() for record in caplog.records] == [
        "partitioner 'shard' decides the sizes of its parts itself; data shares (0.7, 0.3) are ignored"
    ]


@pytest.mark.parametrize(
    ("name", "count", "options", "message"),
    [
        ("dirchlet", 2, {}, "unknown partitioner 'dirchlet'; did you mean 'dirichlet'?"),
        ("iid", 21, {}, "cannot deal 20 examples out to 21 partitions"),
        ("iid", 0, {}, "cannot deal 20 examples out to 0 partitions"),
        ("iid", 3, {"shares": (0.5, 0.5)}, "2 data shares for 3 partitions; give one share per partition"),
        ("iid", 2, {"shares": (1.0, float("nan"))}, "data shares must be finite, not negative and not all 0"),
        ("iid", 2, {"shares": (1.0, -1.0)}, "data shares must be finite, not negative and not all 0"),
        ("iid", 2, {"shares": (0.0, 0.0)}, "data shares must be finite, not negative and not all 0"),
        ("natural-id", 2, {}, "needs data that knows its owners"),
        ("pathological", 2, {}, "2 partitions of 2 classes leave some of 5 classes out; take at least 3"),
        ("pathological", 2, {"classes_per_partition": 6}, "classes per partition must be 1 to 5 for this data, not 6"),
        ("exponential", 19, {}, "partitioner 'exponential' cannot deal 20 examples out to 19 partitions"),
        ("dirichlet", 20, {"alpha": 0.01}, "partitioner 'dirichlet' cannot deal 20 examples out to 20 partitions"),
        ("dirichlet", 2, {"alpha": 0.0}, "alpha of the dirichlet partitioner must be positive, not 0.0"),
        ("shard", 3, {"classes_per_partition": 0}, "classes per partition must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_one_line(
    name: str, count: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        deal(data_of(20), name, count, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_parts_than_owners_is_refused() -> None:
    with pytest.raises(TaskError, match="cannot deal 3 owners out to 4 partitions"):
        deal(data_of(20, num_owners=3), "natural-id", 4)
