"""The models of the suites `driving` and `mixed`, reproduced so that a machine without the tasks can measure them.

gpu_runtime must not import tasks; `tests/gpu_runtime/test_bench_models.py` compares these with the tasks' own, layer by
layer, output by output and loss by loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

OBJECT_WEIGHT, BOX_WEIGHT, TYPICAL_SIDE = 4.0, 2.0, 0.3
NUM_CELLS = 8

GridTargets = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Blocks(nn.Module):
    """Named blocks run in order."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential()
        for name, block in blocks.items():
            self.blocks.add_module(name, block)

    def forward(self, inputs: Any) -> Any:
        return self.blocks(inputs)


class ChannelsLast(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.contiguous(memory_format=torch.channels_last)


class Keep(nn.Module):
    """`(x, *skips)` becomes `(body(x), x, *skips)`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, state: Any) -> tuple[torch.Tensor, ...]:
        inputs, *skips = (state,) if isinstance(state, torch.Tensor) else state
        return (self.body(inputs), inputs, *skips)


class Merge(nn.Module):
    """`(x, skip, *rest)` becomes `(body(skip + project(x) upsampled twofold), *rest)`."""

    def __init__(self, project: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.project = project
        self.body = body

    def forward(self, state: tuple[torch.Tensor, ...]) -> Any:
        inputs, skip, *rest = state
        merged = self.body(skip + functional.interpolate(self.project(inputs), scale_factor=2.0, mode="nearest"))
        return (merged, *rest) if rest else merged


def digits() -> nn.Module:
    return Blocks(
        {
            "conv1": nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
            "conv2": nn.Sequential(nn.Conv2d(8, 16, 5), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2)),
            "dense1": nn.Sequential(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
            "dense2": nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            "head": nn.Linear(84, 10),
        }
    )


def detection() -> nn.Module:
    return Blocks(
        {
            "stem": nn.Sequential(_unit(1, 16, 2), ChannelsLast()),
            "stage1": nn.Sequential(_unit(16, 32, 2), _unit(32, 32)),
            "stage2": nn.Sequential(_unit(32, 64, 2), _unit(64, 64)),
            "neck": _unit(64, 64),
            "head": nn.Conv2d(64, 15, 1),
        }
    )


def segmentation() -> nn.Module:
    return Blocks(
        {
            "stem": nn.Sequential(_unit(1, 16, 2), ChannelsLast()),
            "down1": Keep(nn.Sequential(_unit(16, 32, 2), _unit(32, 32))),
            "down2": Keep(nn.Sequential(_unit(32, 64, 2), _unit(64, 64))),
            "up1": Merge(nn.Conv2d(64, 32, 1), _unit(32, 32)),
            "up0": Merge(nn.Conv2d(32, 16, 1), _unit(16, 16)),
            "head": nn.Sequential(nn.Conv2d(16, 16, 1), nn.PixelShuffle(2)),
        }
    )


def watch() -> nn.Module:
    return Blocks(
        {
            "conv1": nn.Sequential(nn.Conv1d(6, 24, 7, padding=3), nn.GroupNorm(3, 24), nn.ReLU()),
            "conv2": nn.Sequential(nn.Conv1d(24, 48, 5, stride=2), nn.GroupNorm(6, 48), nn.ReLU()),
            "conv3": nn.Sequential(nn.Conv1d(48, 48, 3, stride=2), nn.GroupNorm(6, 48), nn.ReLU()),
            "pool": nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten()),
            "head": nn.Linear(48, 7),
        }
    )


def breast_cancer() -> nn.Module:
    return Blocks(
        {
            "dense1": nn.Sequential(nn.Linear(30, 32), nn.ReLU()),
            "dense2": nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
            "head": nn.Linear(32, 2),
        }
    )


def grid_targets(count: int, generator: torch.Generator) -> GridTargets:
    """Two objects an image, one in each half: objectness, boxes (x1, y1, x2, y2 of the side) and classes of cells."""
    corner = torch.rand(count, 2, 2, generator=generator) * 0.25
    corner[:, 1] += 0.5
    boxes = torch.cat([corner, corner + 0.25], dim=-1)
    classes = torch.randint(10, (count, 2), generator=generator)
    column, row = ((corner + 0.125) * NUM_CELLS).long().clamp(0, NUM_CELLS - 1).unbind(-1)
    image = torch.arange(count)[:, None].expand(-1, 2)
    objectness = torch.zeros(count, NUM_CELLS, NUM_CELLS)
    cell_boxes = torch.zeros(count, NUM_CELLS, NUM_CELLS, 4)
    cell_classes = torch.zeros(count, NUM_CELLS, NUM_CELLS, dtype=torch.long)
    objectness[image, row, column] = 1.0
    cell_boxes[image, row, column] = boxes
    cell_classes[image, row, column] = classes
    return objectness, cell_boxes, cell_classes


def grid_loss(outputs: torch.Tensor, targets: GridTargets) -> torch.Tensor:
    """Objectness of every cell; generalised IoU and class of occupied ones; the mean over images."""
    objectness, boxes, classes = targets
    occupied = objectness > 0
    weight = torch.where(occupied, OBJECT_WEIGHT, 1.0)
    found = functional.binary_cross_entropy_with_logits(outputs[:, 0], objectness, weight=weight, reduction="sum")
    image, row, column = torch.nonzero(occupied, as_tuple=True)
    placed = (1.0 - _generalized_iou(_told_boxes(outputs)[image, row, column], boxes[image, row, column])).sum()
    named = functional.cross_entropy(outputs[image, 5:, row, column], classes[image, row, column], reduction="sum")
    return (found + BOX_WEIGHT * placed + named) / len(outputs)


def _told_boxes(outputs: torch.Tensor) -> torch.Tensor:
    num_cells, raw = outputs.shape[-1], outputs[:, 1:5]
    axis = torch.arange(num_cells, device=outputs.device, dtype=outputs.dtype)
    x = (axis + raw[:, 0].sigmoid() * 2 - 0.5) / num_cells
    y = (axis[:, None] + raw[:, 1].sigmoid() * 2 - 0.5) / num_cells
    half = raw[:, 2:4].clamp(-4, 2).exp() * (TYPICAL_SIDE / 2)
    return torch.stack([x - half[:, 0], y - half[:, 1], x + half[:, 0], y + half[:, 1]], dim=-1)


def _generalized_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    inner = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    overlap = inner.clamp(min=0).prod(-1)
    areas = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    union = (areas - overlap).clamp(min=1e-9)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1).clamp(min=1e-9)
    return overlap / union - (hull - union) / hull


def _unit(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(max(1, channels_out // 8), channels_out),
        nn.ReLU(),
    )
