"""Workloads of the suites' kinds and shapes on random tensors, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_runtime.contracts import DataSpec
from gpu_runtime.workload import Workload

NUM_CLASSES = 10
# Examples held in memory; training wraps around.
NUM_HELD = 256


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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model, the shape of one example, the shape of its target (empty for one class) and the number of classes."""

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...] = ()
    num_classes: int = NUM_CLASSES


KINDS: dict[str, Kind] = {
    "lenet": Kind(build=lenet, input_shape=(1, 28, 28)),
    "resnet8": Kind(build=resnet8, input_shape=(1, 28, 28)),
    "grid-detector": Kind(build=grid_detector, input_shape=(1, 64, 64), target_shape=(8, 8)),
    "unet": Kind(build=unet, input_shape=(1, 64, 64), target_shape=(64, 64), num_classes=4),
    "perceptron": Kind(build=perceptron, input_shape=(36,), num_classes=6),
    "sensor-net": Kind(build=sensor_net, input_shape=(6, 100), num_classes=7),
}


@dataclass(frozen=True, kw_only=True)
class TensorExamples:
    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self.inputs[chosen], self.targets[chosen]


class NoMetrics:
    def update(self, outputs: Any, targets: Any) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {}


class SyntheticTask:
    """A workload of one kind on random tensors. `name` may carry a suffix, so that a mix can hold a kind twice."""

    batch_size = 32
    learning_rate = 0.01

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self._kind = name, kind
        self._examples = TensorExamples(**dict(zip(("inputs", "targets"), self._random(NUM_HELD), strict=True)))

    def build_model(self) -> nn.Module:
        return self._kind.build()

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        if outputs.ndim == 4 and outputs.shape[1] > self._kind.num_classes:
            objectness, boxes, classes = outputs[:, 0], outputs[:, 1:5], outputs[:, 5:]
            occupied = (targets > 0).float()
            found = functional.binary_cross_entropy_with_logits(objectness, occupied)
            sizes = (boxes.abs().mean(1) * occupied).mean()
            total: torch.Tensor = found + sizes + functional.cross_entropy(classes, targets)
            return total
        return functional.cross_entropy(outputs, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    def metrics(self) -> NoMetrics:
        return NoMetrics()

    def train_examples(self) -> TensorExamples:
        return self._examples

    def test_examples(self) -> TensorExamples:
        return self._examples

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return self._random(batch_size, generator)

    def _random(self, count: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        generator = generator or torch.Generator().manual_seed(0)
        inputs = torch.randn(count, *self._kind.input_shape, generator=generator)
        shape = (count, *self._kind.target_shape)
        return inputs, torch.randint(0, self._kind.num_classes, shape, generator=generator)


def build(ref: str, data: DataSpec) -> Workload:
    """A workload factory for synthetic tasks: `--factory gpu_runtime.bench.models:build`."""
    kind = ref.split(".")[0]
    if kind not in KINDS:
        raise ValueError(f"there is no synthetic task {ref!r}; there are {', '.join(KINDS)}")
    return SyntheticTask(ref, KINDS[kind])


def _convolution(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    return [convolution, nn.GroupNorm(min(8, channels_out // 2), channels_out), nn.ReLU()]


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(*_convolution(channels_in, channels_out), *_convolution(channels_out, channels_out))
