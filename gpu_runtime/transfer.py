"""Batches on their way to the device: nested tensors moved, on CUDA through pinned memory one batch ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gpu_runtime.work import TrainingError

Batch = tuple[Any, Any]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in nested tuples, lists and dicts replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def num_examples_in(batch: Batch) -> int:
    """Length of the first dimension of the batch's first tensor."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tensor))
        return tensor

    map_tensors(note, batch)
    if not sizes:
        raise TrainingError("a batch holds no tensors")
    return sizes[0]


def batches_on(device: torch.device, batches: Iterable[Batch], cuda: Any = torch.cuda) -> Iterator[Batch]:
    """The batches, on `device`. Call `next` in the lane that computes with them.

    Args:
        device: where to.
        batches: on the host; on CUDA they are drawn one ahead.
        cuda: `torch.cuda`, or a fake of it in tests.
    """
    return _prefetched(device, batches, cuda) if device.type == "cuda" else iter(batches)


def _prefetched(device: torch.device, batches: Iterable[Batch], cuda: Any) -> Iterator[Batch]:
    """Copies run on a stream of their own, one batch ahead of the computation.

    A tensor made on the copy stream and used on the lane's must be recorded there, or the caching allocator could hand
    its memory to the next copy while the lane still reads it.
    """
    copies = cuda.Stream(device)

    def upload(batch: Batch) -> tuple[Batch, Any]:
        with cuda.stream(copies):
            moved = map_tensors(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), batch)
        return moved, copies.record_event()

    def received(batch: Batch, uploaded: Any) -> Batch:
        lane = cuda.current_stream(device)
        lane.wait_event(uploaded)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(lane)
            return tensor

        kept: Batch = map_tensors(keep, batch)
        return kept

    ahead: tuple[Batch, Any] | None = None
    for batch in batches:
        ready, ahead = ahead, upload(batch)
        if ready is not None:
            yield received(*ready)
    if ahead is not None:
        yield received(*ahead)
