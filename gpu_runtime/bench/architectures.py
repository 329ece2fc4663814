"""Small networks of the usual kinds: pictures, scenes, a table, a signal, a bag of words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

NUM_CLASSES = 10
NUM_WORDS = 10_000


class Chain(nn.Module):
    """Blocks run in order."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, inputs: Any) -> Any:
        return self.blocks(inputs)


class Residual(nn.Module):
    """Two convolutions and a shortcut, as in ResNet-8."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels_in, channels_out, stride), *_convolution(channels_out, channels_out)[:2]
        )
        same = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs))


class Down(nn.Module):
    """U-Net's way down: the tensors so far travel along for the way up."""

    def __init__(self, channels_in: int, channels_out: int, *, pool: bool) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.body = _double(channels_in, channels_out)

    def forward(self, inputs: Any) -> Any:
        stack = inputs if isinstance(inputs, tuple) else (inputs,)
        below = self.body(self.pool(stack[-1]))
        return (*stack, below) if isinstance(inputs, tuple) else (below,)


class Up(nn.Module):
    """U-Net's way up: joins the last two tensors of the stack."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)
        self.body = _double(2 * channels_out, channels_out)

    def forward(self, stack: Any) -> Any:
        return (*stack[:-2], self.body(torch.cat((stack[-2], self.up(stack[-1])), dim=1)))


class Head(nn.Module):
    def __init__(self, channels: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(channels, num_outputs, 1)

    def forward(self, inputs: Any) -> torch.Tensor:
        result: torch.Tensor = self.head(inputs[-1] if isinstance(inputs, tuple) else inputs)
        return result


def lenet() -> nn.Module:
    """Digits: 1x28x28, 62 thousand parameters."""
    return Chain(
        nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
        nn.Sequential(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, NUM_CLASSES)),
    )


def resnet8() -> nn.Module:
    """1x28x28 objects, 78 thousand parameters."""
    return Chain(
        nn.Sequential(*_convolution(1, 16)),
        Residual(16, 16),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES)),
    )


def grid_detector() -> nn.Module:
    """Detection on 1x64x64 scenes: 8x8 cells with objectness, box and classes."""
    return Chain(
        nn.Sequential(*_convolution(1, 16, 2)),
        nn.Sequential(*_convolution(16, 32, 2)),
        nn.Sequential(*_convolution(32, 64, 2)),
        nn.Sequential(*_convolution(64, 64)),
        Head(64, 5 + NUM_CLASSES),
    )


def unet() -> nn.Module:
    """Segmentation of 1x64x64 scenes into 4 classes, base width 8."""
    return Chain(
        Down(1, 8, pool=False), Down(8, 16, pool=True), Down(16, 32, pool=True), Up(32, 16), Up(16, 8), Head(8, 4)
    )


def perceptron() -> nn.Module:
    """A small table: 36 columns."""
    return Chain(
        nn.Sequential(nn.Linear(36, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 6)
    )


def sensor_net() -> nn.Module:
    """Windows of 100 samples from 6 sensor channels."""
    return Chain(
        nn.Sequential(nn.Conv1d(6, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)),
        nn.Sequential(nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 7)),
    )


class WordBag(nn.Module):
    """Mean of the embeddings of (N, length) word numbers."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(num_words, width, mode="mean")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embedding(words)
        return result


def word_bag() -> nn.Module:
    """Texts as 128 words out of 10 thousand: 641 thousand parameters, nearly all of them embeddings."""
    return Chain(WordBag(NUM_WORDS, 64), nn.Linear(64, NUM_CLASSES))


def _convolution(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    return [convolution, nn.GroupNorm(min(8, channels_out // 2), channels_out), nn.ReLU()]


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(*_convolution(channels_in, channels_out), *_convolution(channels_out, channels_out))
