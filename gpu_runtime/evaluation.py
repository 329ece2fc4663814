"""Evaluation of one task's weights, one batch at a time, in a lane like any other work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from gpu_runtime.training import loaded_model
from gpu_runtime.transfer import Batch, batches_on, map_tensors, num_examples_in
from gpu_runtime.work import Work
from gpu_runtime.workload import Examples, Workload

# Larger batches than in training: no activations are kept, and small models are bound by the cost of a call.
MIN_BATCH_SIZE = 64


class TaskEvaluation(Work):
    """Loss and metrics of `arrays` on `examples`. The model is built in the first step; see `results`."""

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

    def results(self) -> dict[str, float]:
        """`num-examples`, and unless that is 0 `loss` (mean over examples) and the metrics."""
        if self.examples_done == 0:
            return {"num-examples": 0.0}
        metrics = {name: float(value) for name, value in self._metrics.compute().items()}
        return metrics | {"loss": self._loss_sum / self.examples_done, "num-examples": float(self.examples_done)}

    def finish(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._model = None
        self._arrays = {}
        self._batches = iter(())

    def _in_order(self, examples: Examples) -> Iterator[Batch]:
        for start in range(0, len(examples), self.batch_size):
            yield examples.batch(range(start, min(start + self.batch_size, len(examples))))
