"""Metric sets over torchmetrics: batches go in from any device, plain floats come out.

torchmetrics is imported when a metric set is made: it costs seconds that training clients need not pay.
"""

from __future__ import annotations

from typing import Any

import torch

from tasks.base import TaskError


class ClassAccuracy:
    """`accuracy`: fraction of examples whose largest logit is at the true class."""

    def __init__(self, num_classes: int) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        self._metric = MulticlassAccuracy(num_classes=num_classes, average="micro")
        self._num_examples = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: logits (N, classes) and true classes (N,)."""
        if len(outputs):
            self._metric.update(outputs.detach().argmax(1).cpu(), targets.cpu())
            self._num_examples += len(outputs)

    def compute(self) -> dict[str, float]:
        """Raises TaskError when no example was given."""
        require_examples(self._num_examples)
        return {"accuracy": float(self._metric.compute())}


def require_examples(count: int) -> None:
    """Raise TaskError instead of reporting a metric of nothing."""
    if count == 0:
        raise TaskError("a metric needs at least one example, but none was given")


def to_cpu(tensor: Any) -> torch.Tensor:
    """A tensor detached from its graph, on the CPU."""
    return torch.as_tensor(tensor).detach().cpu()
