"""What all classification tasks have in common: cross-entropy, accuracy and random batches of their shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from tasks.base import Task
from tasks.metrics import ClassAccuracy


class Classification(Task):
    """One class out of `num_classes` for inputs of `input_shape`, trained with Adam."""

    primary_metric: ClassVar[str] = "accuracy"
    num_classes: ClassVar[int]
    input_shape: ClassVar[tuple[int, ...]]

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Cross-entropy, the mean over examples."""
        return F.cross_entropy(outputs, targets)

    def metrics(self) -> ClassAccuracy:
        """Accuracy."""
        return ClassAccuracy(self.num_classes)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """Adam: the small models here settle in the few steps a client has in a round."""
        return torch.optim.Adam(parameters, lr=learning_rate)

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        """Normal inputs and uniform classes."""
        inputs = torch.randn(batch_size, *self.input_shape, generator=generator)
        return inputs, torch.randint(self.num_classes, (batch_size,), generator=generator)
