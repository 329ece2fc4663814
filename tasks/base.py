"""The task protocol: what one learning problem must say about itself.

A task is a model as an ordered list of blocks (so that it can be split anywhere), a loss, metrics, an optimiser and
data. `tasks.registry` finds tasks by name or by `package.module:Class`; `gpu_runtime` runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from gpu_runtime.contracts import DataSpec
from tasks.errors import NAME_PATTERN, TaskError

__all__ = ["NAME_PATTERN", "BlockModel", "Task", "TaskData", "TaskError", "TensorExamples"]


class BlockModel(nn.Module):
    """Blocks run in order. What passes between blocks is a tensor or a tuple of tensors (skip connections travel)."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential()
        for name, block in blocks.items():
            self.blocks.add_module(name, block)

    def forward(self, inputs: Any) -> Any:
        return self.blocks(inputs)


@dataclass(frozen=True, kw_only=True)
class TensorExamples:
    """Examples held as tensors that share their first dimension; `targets` is a tensor or a tuple of tensors."""

    inputs: torch.Tensor
    targets: torch.Tensor | tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        if isinstance(self.targets, tuple):
            return self.inputs[chosen], tuple(part[chosen] for part in self.targets)
        return self.inputs[chosen], self.targets[chosen]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """All examples of a task before they are dealt out to clients.

    `partition_labels` has one class per training example, for partitioners that go by label; `natural_ids` one
    owner per training example (a subject, a writer) where the data knows it.
    """

    train: TensorExamples
    test: TensorExamples
    partition_labels: np.ndarray
    natural_ids: np.ndarray | None = field(default=None)


class Task(ABC):
    """One learning problem. Subclass it, set the class attributes, implement the abstract methods.

    Attributes:
        name: unique among the tasks of a run, `[a-z][a-z0-9-]*`.
        batch_size: examples per optimiser step. 32 is a good start.
        learning_rate: of the client's optimiser.
        primary_metric: key of `metrics().compute()` that decides which weights are best; larger is better.
    """

    name: ClassVar[str]
    batch_size: ClassVar[int] = 32
    learning_rate: ClassVar[float] = 0.01
    primary_metric: ClassVar[str]

    def __init__(self, data: DataSpec) -> None:
        self.data = data

    @abstractmethod
    def build_model(self) -> BlockModel:
        """A new model, initialised from torch's current RNG state."""

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Scalar loss: the mean over the examples of the batch."""

    @abstractmethod
    def metrics(self) -> Any:
        """A new metric set with `update(outputs, targets)` and `compute() -> dict[str, float]`."""

    @abstractmethod
    def load(self) -> TaskData:
        """All examples, a pure function of `self.data` without its partition. Cached by `tasks.registry`."""

    @abstractmethod
    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        """Random inputs and valid targets of the task's shapes."""

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """Optimiser of a client's local steps; new each round. SGD with momentum 0.9 unless overridden."""
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    def train_examples(self) -> TensorExamples:
        """The part of the training data named by `self.data.partition`."""
        from tasks.data import part_of

        return part_of(self)

    def test_examples(self) -> TensorExamples:
        """Held-out examples for the server's evaluation."""
        from tasks.data import loaded

        return loaded(self).test
