"""Seconds and boundary bytes of each block of a model, by running its `blocks` one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpu_runtime.contracts import BlockCost
from gpu_runtime.micro_batches import cut
from gpu_runtime.pipeline.fit import fit_affine
from gpu_runtime.transfer import Batch, map_tensors, num_examples_in
from gpu_runtime.work import TrainingError

MIN_REPEATS = 2
MAX_REPEATS = 10


def measure_blocks(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    batch: Batch,
    budget_s: float,
    wait_for_device: Callable[[], None],
    clock: Callable[[], float] | None = None,
) -> tuple[BlockCost, ...]:
    """Cost of each block, of a call and per example, from a few passes; the loss counts to the last block.

    The passes take turns with the whole batch and a quarter of it. A batch of less than three examples, or with
    tensors that are not per example, says nothing of what a call costs whatever its size: then that is 0.
    Empty for a model without `blocks`. Gradients are left in the model. Blocks are timed by
    `clock`, in real seconds by default; `budget_s` is in real seconds.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential) or len(blocks) == 0:
        return ()
    began = time.perf_counter()
    batches = _whole_and_small(batch)
    passes: list[list[list[tuple[float, float, int]]]] = [[] for _ in batches]
    for repeat in range(MAX_REPEATS + 1):
        if repeat > MIN_REPEATS and time.perf_counter() - began > budget_s:
            break
        for part, done in zip(batches, passes, strict=True):
            model.zero_grad(set_to_none=True)
            done.append(_one_pass(list(blocks), loss, part, wait_for_device, clock or time.perf_counter))
    sizes = [num_examples_in(part) for part in batches]
    costs = []
    for index in range(len(blocks)):
        # The first pass warms up.
        timed = [(size, each[index]) for size, done in zip(sizes, passes, strict=True) for each in done[1:]]
        forward = fit_affine((size, forward_s) for size, (forward_s, _, _) in timed)
        backward = fit_affine((size, backward_s) for size, (_, backward_s, _) in timed)
        costs.append(
            BlockCost(
                forward_s=forward.example_s,
                backward_s=backward.example_s,
                boundary_bytes=round(passes[0][0][index][2] / sizes[0]),
                forward_call_s=forward.call_s,
                backward_call_s=backward.call_s,
            )
        )
    return tuple(costs)


def bytes_per_example(batch_part: Any, num_examples: int) -> int:
    """Bytes of all tensors of the inputs or the targets of a batch, for one example."""
    return round(sum(tensor.numel() * tensor.element_size() for tensor in _tensors(batch_part)) / num_examples)


def _whole_and_small(batch: Batch) -> list[Batch]:
    """The small one has two examples or more: layers that normalise over a batch cannot train on one."""
    num_examples = num_examples_in(batch)
    small = max(2, num_examples // 4)
    if small >= num_examples:
        return [batch]
    try:
        return [batch, cut(batch, 0, small, num_examples)]
    except TrainingError:
        return [batch]


def _one_pass(
    blocks: Sequence[nn.Module],
    loss: Callable[[Any, Any], torch.Tensor],
    batch: Batch,
    wait_for_device: Callable[[], None],
    clock: Callable[[], float],
) -> list[tuple[float, float, int]]:
    """Forward seconds, backward seconds and output bytes of each block, cut apart at the boundaries."""
    inputs, targets = batch
    ins, outs, forward_s = [], [], []
    value: Any = inputs
    for index, block in enumerate(blocks):
        value = map_tensors(_leaf, value) if index > 0 else value
        ins.append(value)
        started = clock()
        value = block(value)
        if index == len(blocks) - 1:
            result = loss(value, targets)
        wait_for_device()
        forward_s.append(clock() - started)
        outs.append(value)
    backward_s = [0.0] * len(blocks)
    roots, gradients = [result], [torch.ones_like(result)]
    for index in reversed(range(len(blocks))):
        started = clock()
        if roots:
            torch.autograd.backward(roots, gradients)
        wait_for_device()
        backward_s[index] = clock() - started
        if index > 0:
            # A boundary tensor and the leaf made from it, where the later block has used it.
            pairs = list(zip(_tensors(outs[index - 1]), _tensors(ins[index]), strict=True))
            used = [(out, leaf) for out, leaf in pairs if leaf.grad is not None and out.requires_grad]
            roots, gradients = [out for out, _ in used], [leaf.grad for _, leaf in used if leaf.grad is not None]
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in _tensors(out)) for out in outs]
    return list(zip(forward_s, backward_s, sizes, strict=True))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found
