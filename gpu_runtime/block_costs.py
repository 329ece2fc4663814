"""Seconds and boundary bytes of each block of a model, by running its `blocks` one at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpu_runtime.contracts import BlockCost
from gpu_runtime.transfer import Batch, map_tensors, num_examples_in

MIN_REPEATS = 2
MAX_REPEATS = 10


def measure_blocks(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    batch: Batch,
    budget_s: float,
    wait_for_device: Callable[[], None],
) -> tuple[BlockCost, ...]:
    """Cost of each block per example, medians of a few passes; the loss counts to the last block.

    Empty for a model without `blocks`. Gradients are left in the model.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential) or len(blocks) == 0:
        return ()
    began = time.perf_counter()
    passes: list[list[tuple[float, float, int]]] = []
    for repeat in range(MAX_REPEATS + 1):
        if repeat > MIN_REPEATS and time.perf_counter() - began > budget_s:
            break
        model.zero_grad(set_to_none=True)
        passes.append(_one_pass(list(blocks), loss, batch, wait_for_device))
    num_examples = num_examples_in(batch)
    costs = []
    for block in zip(*passes[1:], strict=True):  # the first pass warms up
        forward_s, backward_s, boundary_bytes = zip(*block, strict=True)
        costs.append(
            BlockCost(
                forward_s=statistics.median(forward_s) / num_examples,
                backward_s=statistics.median(backward_s) / num_examples,
                boundary_bytes=round(boundary_bytes[0] / num_examples),
            )
        )
    return tuple(costs)


def _one_pass(
    blocks: Sequence[nn.Module],
    loss: Callable[[Any, Any], torch.Tensor],
    batch: Batch,
    wait_for_device: Callable[[], None],
) -> list[tuple[float, float, int]]:
    """Forward seconds, backward seconds and output bytes of each block, cut apart at the boundaries."""
    inputs, targets = batch
    ins, outs, forward_s = [], [], []
    value: Any = inputs
    for index, block in enumerate(blocks):
        value = map_tensors(_leaf, value) if index > 0 else value
        ins.append(value)
        started = time.perf_counter()
        value = block(value)
        if index == len(blocks) - 1:
            result = loss(value, targets)
        wait_for_device()
        forward_s.append(time.perf_counter() - started)
        outs.append(value)
    backward_s = [0.0] * len(blocks)
    roots, gradients = [result], [torch.ones_like(result)]
    for index in reversed(range(len(blocks))):
        started = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, gradients)
        wait_for_device()
        backward_s[index] = time.perf_counter() - started
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
