"""Models as ordered blocks, with GroupNorm only: statistics over a batch would not survive averaging or micro-batches.

What passes between two blocks is a tensor or a tuple of tensors, so a model can be cut at every boundary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tasks.base import BlockModel


def conv_unit(channels_in: int, channels_out: int, *, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, GroupNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(max(1, channels_out // 8), channels_out),
        nn.ReLU(),
    )


class LeNet(BlockModel):
    """Two convolutions and two dense layers for 28x28 gray images, after LeCun et al. 1998, with GroupNorm."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(
            {
                "conv1": nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
                "conv2": nn.Sequential(nn.Conv2d(8, 16, 5), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2)),
                "dense1": nn.Sequential(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
                "dense2": nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
                "head": nn.Linear(84, num_classes),
            }
        )


class GridDetector(BlockModel):
    """One-stage detector: a gray image of 8 s pixels a side becomes s x s cells of (objectness, 4 box, class) logits."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        w = width
        super().__init__(
            {
                "stem": conv_unit(1, w, stride=2),
                "stage1": nn.Sequential(conv_unit(w, 2 * w, stride=2), conv_unit(2 * w, 2 * w)),
                "stage2": nn.Sequential(conv_unit(2 * w, 4 * w, stride=2), conv_unit(4 * w, 4 * w)),
                "neck": conv_unit(4 * w, 4 * w),
                "head": nn.Conv2d(4 * w, 5 + num_classes, 1),
            }
        )


class Keep(nn.Module):
    """Encoder step: `(x, *skips)` becomes `(body(x), x, *skips)`; a lone tensor is taken as `(x,)`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, state: Any) -> tuple[torch.Tensor, ...]:
        x, *skips = (state,) if isinstance(state, torch.Tensor) else state
        return (self.body(x), x, *skips)


class Merge(nn.Module):
    """Decoder step: `(x, skip, *rest)` becomes `(body(x upsampled twofold, with skip), *rest)`."""

    def __init__(self, body: nn.Module, project: nn.Module) -> None:
        super().__init__()
        self.project = project
        self.body = body

    def forward(self, state: tuple[torch.Tensor, ...]) -> Any:
        x, skip, *rest = state
        x = F.interpolate(self.project(x), scale_factor=2.0, mode="nearest")
        y = self.body(torch.cat([x, skip], dim=1))
        return (y, *rest) if rest else y


class UNet(BlockModel):
    """U-Net (Ronneberger et al. 2015) for gray images; skip connections travel between blocks in a tuple."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        w = width
        super().__init__(
            {
                "stem": conv_unit(1, w),
                "down1": Keep(nn.Sequential(conv_unit(w, 2 * w, stride=2), conv_unit(2 * w, 2 * w))),
                "down2": Keep(nn.Sequential(conv_unit(2 * w, 4 * w, stride=2), conv_unit(4 * w, 4 * w))),
                "down3": Keep(nn.Sequential(conv_unit(4 * w, 8 * w, stride=2), conv_unit(8 * w, 8 * w))),
                "up2": Merge(conv_unit(8 * w, 4 * w), nn.Conv2d(8 * w, 4 * w, 1)),
                "up1": Merge(conv_unit(4 * w, 2 * w), nn.Conv2d(4 * w, 2 * w, 1)),
                "up0": Merge(conv_unit(2 * w, w), nn.Conv2d(2 * w, w, 1)),
                "head": nn.Conv2d(w, num_classes, 1),
            }
        )
