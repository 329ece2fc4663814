"""Workloads on random tensors for benchmarks: networks of the usual kinds, and the suites' models and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_runtime.bench import architectures, suite_models
from gpu_runtime.contracts import DataSpec
from gpu_runtime.transfer import map_tensors
from gpu_runtime.workload import Workload

# Examples held in memory; training wraps around.
NUM_HELD = 256

Draw = Callable[[int, torch.Generator], tuple[Any, Any]]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model, random examples of its shape, its loss, its batch size, and Adam or SGD with momentum."""

    build: Callable[[], nn.Module]
    draw: Draw
    loss: Loss = functional.cross_entropy
    batch_size: int = 32
    adam: bool = False


def classes(num_classes: int, input_shape: tuple[int, ...], target_shape: tuple[int, ...] = ()) -> Draw:
    """Normal inputs, uniform classes: one for each example, or one for each place of `target_shape`."""

    def draw(count: int, generator: torch.Generator) -> tuple[Any, Any]:
        inputs = torch.randn(count, *input_shape, generator=generator)
        return inputs, torch.randint(num_classes, (count, *target_shape), generator=generator)

    return draw


def words(num_classes: int, length: int) -> Draw:
    """Uniform word numbers and classes."""

    def draw(count: int, generator: torch.Generator) -> tuple[Any, Any]:
        inputs = torch.randint(architectures.NUM_WORDS, (count, length), generator=generator)
        return inputs, torch.randint(num_classes, (count,), generator=generator)

    return draw


def grid_scenes(count: int, generator: torch.Generator) -> tuple[Any, Any]:
    """Normal pixels, two objects a scene."""
    return torch.randn(count, 1, 64, 64, generator=generator), suite_models.grid_targets(count, generator)


KINDS: dict[str, Kind] = {
    "lenet": Kind(build=architectures.lenet, draw=classes(10, (1, 28, 28))),
    "resnet8": Kind(build=architectures.resnet8, draw=classes(10, (1, 28, 28))),
    "grid-detector": Kind(build=architectures.grid_detector, draw=grid_scenes, loss=suite_models.grid_loss),
    "unet": Kind(build=architectures.unet, draw=classes(4, (1, 64, 64), (64, 64))),
    "perceptron": Kind(build=architectures.perceptron, draw=classes(6, (36,))),
    "sensor-net": Kind(build=architectures.sensor_net, draw=classes(7, (6, 100))),
    "word-bag": Kind(build=architectures.word_bag, draw=words(10, 128)),
    "digits": Kind(build=suite_models.digits, draw=classes(10, (1, 28, 28)), batch_size=8, adam=True),
    "detection": Kind(
        build=suite_models.detection, draw=grid_scenes, loss=suite_models.grid_loss, batch_size=8, adam=True
    ),
    "segmentation": Kind(
        build=suite_models.segmentation, draw=classes(4, (1, 64, 64), (64, 64)), batch_size=16, adam=True
    ),
    "watch": Kind(build=suite_models.watch, draw=classes(7, (6, 100)), adam=True),
    "breast-cancer": Kind(build=suite_models.breast_cancer, draw=classes(2, (30,)), batch_size=16, adam=True),
}


@dataclass(frozen=True, kw_only=True)
class TensorExamples:
    """Examples in memory; `targets` is a tensor or a tuple of tensors."""

    inputs: torch.Tensor
    targets: Any

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self.inputs[chosen], map_tensors(lambda tensor: tensor[chosen], self.targets)


class NoMetrics:
    def update(self, outputs: Any, targets: Any) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {}


class SyntheticTask:
    """A workload of one kind on random tensors. `name` may carry a suffix, so that a mix can hold a kind twice."""

    learning_rate = 0.003

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.batch_size, self._kind = name, kind.batch_size, kind
        inputs, targets = kind.draw(NUM_HELD, torch.Generator().manual_seed(0))
        self._examples = TensorExamples(inputs=inputs, targets=targets)

    def build_model(self) -> nn.Module:
        return self._kind.build()

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self._kind.loss(outputs, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        if self._kind.adam:
            return torch.optim.Adam(parameters, lr=learning_rate)
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    def metrics(self) -> NoMetrics:
        return NoMetrics()

    def train_examples(self) -> TensorExamples:
        return self._examples

    def test_examples(self) -> TensorExamples:
        return self._examples

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return self._kind.draw(batch_size, generator)


def build(ref: str, data: DataSpec) -> Workload:
    """A workload factory for synthetic tasks: `--factory gpu_runtime.bench.models:build`."""
    kind = kind_of(ref)
    if kind not in KINDS:
        raise ValueError(f"there is no synthetic task {ref!r}; there are {', '.join(KINDS)}")
    return SyntheticTask(ref, KINDS[kind])


def kind_of(ref: str) -> str:
    """`lenet` of `lenet` and of its twin `lenet.2`."""
    return ref.split(".")[0]
