"""Loads each task's examples once per process and cuts out the part a client holds.

Clients of one process share what they load: the cache key leaves out which part is whose.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from gpu_runtime.contracts import DataSpec
from tasks.base import Task, TaskData, TaskError, TensorExamples
from tasks.partitioning import check_name, partition_indices

T = TypeVar("T")


class Once(Generic[T]):
    """Values computed at most once per key and kept for the life of the process; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[Any, T] = {}

    def get(self, key: Any, compute: Callable[[], T]) -> T:
        """The value of `key`, computed by the first caller. A failure is not kept."""
        with self._lock:
            if key not in self._values:
                self._values[key] = compute()
            return self._values[key]

    def clear(self) -> None:
        """Forget all values, for tests and to give memory back."""
        with self._lock:
            self._values.clear()


_loaded: Once[TaskData] = Once()
_indices: Once[list[Any]] = Once()
_parts: Once[TensorExamples] = Once()


def source(data: DataSpec) -> DataSpec:
    """`data` reduced to what decides which examples exist, without how they are dealt out."""
    return DataSpec(directory=data.directory, download=data.download, seed=data.seed)


def loaded(task: Task) -> TaskData:
    """All examples of the task, loaded once per process. Raises TaskError when they are missing or do not fit."""
    return _loaded.get((type(task), source(task.data)), lambda: _checked(task, task.load()))


def part_of(task: Task) -> TensorExamples:
    """The training examples of the part named by `task.data.partition`.

    Raises:
        TaskError: the part does not exist or the data cannot be dealt out that way.
    """
    part = task.data.partition
    if not 0 <= part.index < part.count:
        raise TaskError(f"task {task.name!r}: there is no part {part.index} of {part.count} (parts count from 0)")
    return _parts.get((type(task), task.data), lambda: _cut(task))


def clear() -> None:
    """Forget all loaded examples."""
    for cache in (_loaded, _indices, _parts):
        cache.clear()


def _cut(task: Task) -> TensorExamples:
    data = loaded(task)
    dealt = dataclasses.replace(task.data, partition=dataclasses.replace(task.data.partition, index=0))
    try:
        check_name(task.data.partitioner)
        if task.data.partition.count == 1:
            return data.train
        parts = _indices.get((type(task), dealt), lambda: list(partition_indices(data, task.data)))
    except TaskError as error:
        raise TaskError(f"task {task.name!r}: {error}") from None
    inputs, targets = data.train.batch(torch.from_numpy(parts[task.data.partition.index]))
    return TensorExamples(inputs=inputs, targets=targets)


def _checked(task: Task, data: TaskData) -> TaskData:
    """Refuse examples whose parts differ in length, at the door instead of in the middle of a round."""
    for split, examples in (("train", data.train), ("test", data.test)):
        targets = examples.targets if isinstance(examples.targets, tuple) else (examples.targets,)
        if len(examples) == 0:
            raise TaskError(f"task {task.name!r}: no {split} examples")
        if any(len(part) != len(examples) for part in targets):
            raise TaskError(f"task {task.name!r}: {split} inputs and targets differ in length")
    for what, ids in (("partition_labels", data.partition_labels), ("natural_ids", data.natural_ids)):
        if ids is not None and len(ids) != len(data.train):
            raise TaskError(f"task {task.name!r}: {len(ids)} {what} for {len(data.train)} training examples")
    return data
