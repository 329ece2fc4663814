"""Evaluation of one task's weights, one batch at a time, in a lane like any other work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_runtime.training import loaded_model
from gpu_runtime.transfer import Batch, batches_on, map_tensors, num_examples_in
from gpu_runtime.work import TrainingError, Work
from gpu_runtime.workload import Examples, Workload

# Larger batches than in training: no activations are kept, and small models are bound by the cost of a call.
MIN_BATCH_SIZE = 64


@dataclass(frozen=True)
class FirstExamples:
    """The first `count` of `examples`."""

    examples: Examples
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.examples))

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        return self.examples.batch(indices)


class TaskEvaluation(Work):
    """Loss and metrics of `arrays` on `examples`. The model is built in the first step, `results` with the last.

    Attributes:
        results: `num-examples`, and unless that is 0 `loss` (mean over examples) and the metrics.
    """

    def __init__(
        self, *, workload: Workload, arrays: Mapping[str, np.ndarray], examples: Examples, device: torch.device
    ) -> None:
        self.task = workload.name
        self.num_examples = len(examples)
        self.batch_size = max(MIN_BATCH_SIZE, workload.batch_size)
        self._workload, self._arrays, self._device = workload, arrays, device
        self._batches = batches_on(device, self._in_order(examples))
        self._metrics = workload.metrics()
        self._model: nn.Module | None = None
        self._loss_sum = 0.0
        self.results: dict[str, float] = {"num-examples": 0.0}

    def step(self) -> None:
        """Evaluate one batch. Raises StateError in the first step when the arrays do not fit the model."""
        if self._model is None:
            self._model = loaded_model(self._workload, self._arrays, self._device).eval()
        with torch.inference_mode():
            inputs, targets = next(self._batches)
            outputs = self._model(inputs)
            num_examples = num_examples_in((inputs, targets))
            self._loss_sum += self._workload.loss(outputs, targets).item() * num_examples
            self._metrics.update(*map_tensors(torch.Tensor.cpu, (outputs, targets)))
        self.steps_done += 1
        self.examples_done += num_examples

    def finish(self) -> None:
        """Set `results`.

        Raises:
            TrainingError: the metrics compute something else than numbers by name. Theirs may raise anything else.
        """
        own = {"loss": self._loss_sum / self.examples_done, "num-examples": float(self.examples_done)}
        self.results = _numbers(self._metrics.compute()) | own
        self.abandon()

    def abandon(self) -> None:
        self._model = None
        self._arrays = {}
        self._batches = iter(())

    def _in_order(self, examples: Examples) -> Iterator[Batch]:
        for start in range(0, len(examples), self.batch_size):
            yield examples.batch(range(start, min(start + self.batch_size, len(examples))))


def _numbers(computed: object) -> dict[str, float]:
    """What `MetricSet.compute` gave, as plain numbers. They may be NaN: that depends on the examples."""
    if not isinstance(computed, Mapping):
        raise TrainingError(f"metrics().compute() must return a dict, not {type(computed).__name__}")
    numbers = {}
    for name, value in computed.items():
        try:
            numbers[str(name)] = float(value)
        except Exception:  # a tensor of two elements raises something else than a string does
            raise TrainingError(f"metric {str(name)!r} must be a number, not {value!r}") from None
    return numbers
