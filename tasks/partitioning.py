"""Deals training examples out to clients through flwr-datasets' partitioners; every example goes to exactly one part.

The partitioners see a small table of indices, labels and owners, never the examples; nothing here uses a network.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import numpy as np

from gpu_runtime.contracts import DataSpec
from tasks.base import TaskData
from tasks.errors import TaskError, nearest
from tasks.settings import PARTITIONERS

log = logging.getLogger(__name__)

_BY_OWNER = "natural-id"
_BY_SHARES = ("iid", "dirichlet")
_BY_SIZE = ("linear", "square", "exponential")
_OR = "natural-id-or-"

ATTEMPTS = 10

_warned: set[str] = set()


def partition_indices(data: TaskData, spec: DataSpec) -> list[np.ndarray]:
    """Indices into `data.train` of every part, a pure function of the data and `spec`.

    Every example goes to exactly one part. A part is empty only if its share is 0.
    `natural-id-or-iid` and `natural-id-or-dirichlet` go by owner where the data knows owners, otherwise as they say.

    Raises:
        TaskError: unknown partitioner, impossible counts or shares, or data that lacks what the partitioner goes by.
    """
    name, count, total = spec.partitioner, spec.partition.count, len(data.train)
    check_name(name)
    if name.startswith(_OR):
        name = _BY_OWNER if data.natural_ids is not None else name.removeprefix(_OR)
    if not 1 <= count <= total:
        raise TaskError(f"cannot deal {total} examples out to {count} partitions")
    shares = _checked_shares(spec.partition.shares, count)
    if name not in _BY_SHARES and len(set(shares)) > 1:
        _warn_once(f"partitioner {name!r} decides the sizes of its parts itself; data shares {shares} are ignored")
        shares = (1.0,) * count
    held = [index for index, share in enumerate(shares) if share > 0]
    sizes = exact_sizes(total, [shares[index] for index in held])
    order = np.random.default_rng(spec.seed).permutation(total)
    dealt = _deal(name, data, spec, order, sizes)
    parts = [np.empty(0, dtype=np.int64)] * count
    for index, part in zip(held, dealt, strict=True):
        parts[index] = part
    if sum(map(len, parts)) != total:
        raise TaskError(f"partitioner {name!r} left {total - sum(map(len, parts))} of {total} examples out")
    return parts


def check_name(name: str) -> None:
    """Raise TaskError, with the nearest name, for a partitioner that does not exist."""
    if name not in PARTITIONERS:
        raise TaskError(f"unknown partitioner {name!r}; {nearest(name, PARTITIONERS)}")


def exact_sizes(total: int, shares: list[float]) -> list[int]:
    """Whole sizes proportional to positive `shares` that sum to `total`, each at least 1 (largest remainders)."""
    if len(shares) > total:
        raise TaskError(f"cannot deal {total} examples out to {len(shares)} partitions")
    weights = np.asarray(shares, dtype=np.float64)
    exact = total * weights / weights.sum()
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - int(sizes.sum())]] += 1
    for empty in np.flatnonzero(sizes == 0):
        sizes[np.argmax(sizes)] -= 1
        sizes[empty] = 1
    return [int(size) for size in sizes]


def _checked_shares(shares: tuple[float, ...], count: int) -> tuple[float, ...]:
    if not shares:
        return (1.0,) * count
    if len(shares) != count:
        raise TaskError(f"{len(shares)} data shares for {count} partitions; give one share per partition")
    if not all(np.isfinite(share) and share >= 0 for share in shares) or sum(shares) <= 0:
        raise TaskError(f"data shares must be finite, not negative and not all 0, got {shares}")
    return shares


def _deal(name: str, data: TaskData, spec: DataSpec, order: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Parts of the given sizes where the partitioner takes sizes, else as many parts as there are sizes."""
    if name == _BY_OWNER:
        return _by_owner(data, spec, order, len(sizes))
    labels = np.unique(data.partition_labels, return_inverse=True)[1]
    _check_options(name, labels, spec, len(sizes))
    problem = ""
    for attempt in range(ATTEMPTS):
        # A draw can miss a class or leave a part empty, so further seeds are tried; all follow from spec.seed.
        partitioner = _partitioner(name, spec, sizes, spec.seed + 1000 * attempt)
        try:
            parts = _run(partitioner, order, labels[order], len(sizes))
        except ValueError as error:
            problem = " ".join(str(error).split())
            continue
        missing = len(order) - sum(map(len, parts))
        if missing == 0 and all(len(part) for part in parts):
            return parts
        problem = f"{missing} examples left out" if missing else "a part would be empty"
        if name in _BY_SIZE:
            break
    raise TaskError(f"partitioner {name!r} cannot deal {len(order)} examples out to {len(sizes)} partitions: {problem}")


def _partitioner(name: str, spec: DataSpec, sizes: list[int], seed: int) -> Any:
    from flwr_datasets import partitioner as kinds

    count = len(sizes)
    uneven = len({share for share in spec.partition.shares if share > 0}) > 1
    if name == "iid":
        return kinds.SizePartitioner(partition_sizes=sizes) if uneven else kinds.IidPartitioner(num_partitions=count)
    if name == "dirichlet":
        if uneven:
            return kinds.InnerDirichletPartitioner(
                partition_sizes=sizes, partition_by="label", alpha=float(spec.alpha), seed=seed
            )
        return kinds.DirichletPartitioner(
            num_partitions=count, partition_by="label", alpha=float(spec.alpha), min_partition_size=1, seed=seed
        )
    if name == "pathological":
        return _pathological(count, spec.classes_per_partition, seed)
    if name == "shard":
        # By size and not by number of shards, since flwr-datasets leaves the remainder out when given the number.
        shard_size = math.ceil(sum(sizes) / (count * spec.classes_per_partition))
        return kinds.ShardPartitioner(
            num_partitions=count, partition_by="label", shard_size=shard_size, keep_incomplete_shard=True, seed=seed
        )
    by_size = {
        "linear": kinds.LinearPartitioner,
        "square": kinds.SquarePartitioner,
        "exponential": kinds.ExponentialPartitioner,
    }
    return by_size[name](num_partitions=count)


def _pathological(count: int, num_classes_per_partition: int, seed: int) -> Any:
    """PathologicalPartitioner whose classes are dealt from shuffled decks, so that none is left out by chance."""
    from flwr_datasets.partitioner import PathologicalPartitioner

    class FromDecks(PathologicalPartitioner):  # type: ignore[misc]
        def _determine_partition_id_to_unique_labels(self) -> None:
            self._unique_labels = sorted(self.dataset.unique(self._partition_by))
            deck: list[Any] = []
            for held in self._partition_id_to_unique_labels.values():
                while len(held) < self._num_classes_per_partition:
                    fresh = [label for label in deck if label not in held]
                    if not fresh:
                        deck += self._rng.permutation(self._unique_labels).tolist()
                        continue
                    held.append(fresh[0])
                    deck.remove(fresh[0])

    return FromDecks(
        num_partitions=count, partition_by="label", num_classes_per_partition=num_classes_per_partition, seed=seed
    )


def _by_owner(data: TaskData, spec: DataSpec, order: np.ndarray, count: int) -> list[np.ndarray]:
    """One owner per part, or whole owners merged evenly where there are more owners than parts."""
    from flwr_datasets.partitioner import NaturalIdPartitioner

    if data.natural_ids is None:
        raise TaskError(f"partitioner {_BY_OWNER!r} needs data that knows its owners; use '{_OR}iid' or another")
    owners = np.unique(data.natural_ids, return_inverse=True)[1]
    num_owners = int(owners.max()) + 1
    if count > num_owners:
        raise TaskError(f"cannot deal {num_owners} owners out to {count} partitions by {_BY_OWNER!r}")
    parts = _run(NaturalIdPartitioner(partition_by="label"), order, owners[order], num_owners)
    groups = np.array_split(np.random.default_rng(spec.seed).permutation(num_owners), count)
    return [np.concatenate([parts[owner] for owner in group]) for group in groups]


def _run(partitioner: Any, order: np.ndarray, labels: np.ndarray, count: int) -> list[np.ndarray]:
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"index": order, "label": labels})
    with warnings.catch_warnings():
        # What the partitioners warn about (a redraw, a class left out) is checked on their result.
        warnings.simplefilter("ignore")
        return [np.asarray(partitioner.load_partition(part)["index"], dtype=np.int64) for part in range(count)]


def _check_options(name: str, labels: np.ndarray, spec: DataSpec, count: int) -> None:
    """Refuse options the named partitioner cannot work with."""
    num_classes = int(labels.max()) + 1
    per_part = spec.classes_per_partition
    if name == "dirichlet" and not (math.isfinite(spec.alpha) and spec.alpha > 0):
        raise TaskError(f"alpha of the dirichlet partitioner must be positive, not {spec.alpha}")
    if name == "shard" and per_part < 1:
        raise TaskError(f"classes per partition must be at least 1, not {per_part}")
    if name != "pathological":
        return
    if not 1 <= per_part <= num_classes:
        raise TaskError(f"classes per partition must be 1 to {num_classes} for this data, not {per_part}")
    if per_part * count < num_classes:
        raise TaskError(
            f"{count} partitions of {per_part} classes leave some of {num_classes} classes out; "
            f"take at least {math.ceil(num_classes / count)} classes per partition"
        )


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text)
