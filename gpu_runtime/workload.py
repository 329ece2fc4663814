"""What the runtime asks of a learning problem, as protocols: it never imports tasks by name.

`tasks.base.Task` satisfies `Workload`; a machine without the tasks package can bring its own through `--factory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gpu_runtime.contracts import DataSpec


class Examples(Protocol):
    """Training or test examples held in memory."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        """Inputs and targets of the examples at `indices` (repeats allowed): tensors, or nested tuples of tensors."""
        ...


class MetricSet(Protocol):
    """Running metrics over batches."""

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> dict[str, float]: ...


class Workload(Protocol):
    """One learning problem: model, loss, optimiser, metrics and data."""

    name: str
    batch_size: int
    learning_rate: float

    def build_model(self) -> nn.Module:
        """A new model whose attribute `blocks` is an ordered `nn.Sequential`; `forward` runs them in order."""
        ...

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Scalar mean over the examples of the batch."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer: ...

    def metrics(self) -> MetricSet: ...

    def train_examples(self) -> Examples:
        """The examples of this client's part of the training data."""
        ...

    def test_examples(self) -> Examples: ...

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        """Random inputs and valid targets of the task's shapes, for profiling without data."""
        ...


class WorkloadFactory(Protocol):
    """`tasks.registry:build` and anything like it: a workload from its reference and its data."""

    def __call__(self, ref: str, data: DataSpec) -> Workload: ...
