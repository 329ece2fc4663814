"""Models as ordered blocks, with GroupNorm only: statistics over a batch would not survive averaging or micro-batches.

What passes between two blocks is a tensor or a tuple of tensors, so a model can be cut at every boundary.
"""

from __future__ import annotations

from torch import nn

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
