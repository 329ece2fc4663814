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
    """One learning problem: model, loss, optimiser, metrics and data.

    A workload may also have these, which the runtime reads with a default:

    `channels_last: bool`: memory format of its model; by default that of models with 2-d convolutions is channels-last.

    `autocast_dtype: None | "bfloat16" | "float16"`: run forward pass and loss of its training in mixed precision, on
    CUDA only (None by default; other devices train in full precision). "bfloat16" is the good start: it has the range
    of float32. "float16" scales its losses, waits for the device once a step, and skips steps that overflow. Losses
    must be safe to autocast: `binary_cross_entropy_with_logits`, not `binary_cross_entropy`. Evaluation is in full
    precision.

    `cuda_graph: bool` (True by default): whether its training steps may be captured as CUDA graphs. What cannot be
    captured, or does not do what an eager step does, is noticed and trained eagerly.

    `movable: bool` (True by default): whether worker processes may take turns at its training. Parameters, buffers and
    the optimiser's state move; a training that is seen to keep more in attributes stays with one worker. Set it to
    False where such state cannot be seen: in closures, or in C++.
    """

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


class SyntheticExamples:
    """A workload whose training examples are random: for trials that need no data.

    Each batch size has one batch, the same at every call.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._batches: dict[int, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def train_examples(self) -> Examples:
        return self

    def __len__(self) -> int:
        return 4 * self._workload.batch_size

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        size = len(indices)
        if size not in self._batches:
            self._batches[size] = self._workload.synthetic_batch(size, torch.Generator().manual_seed(0))
        return self._batches[size]
