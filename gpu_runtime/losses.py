"""Losses of one training, kept on the device and read now and then."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gpu_runtime.work import TrainingError


@dataclass(frozen=True, kw_only=True)
class LossStatistics:
    """Losses of a training: of its first step, the mean over examples, of its last step. None before the first step."""

    first: float | None = None
    mean: float | None = None
    last: float | None = None


class LossRecord:
    """Losses kept on the device; read, and so waited for, every `stride` steps only."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._first: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._num_steps = 0
        self._num_examples = 0

    def add(self, loss: torch.Tensor, num_examples: int) -> None:
        """Note the mean loss of a step. Raises TrainingError, at the latest `stride` steps on, if it is not finite."""
        # Double on the host, for a mean that does not depend on the order of magnitude of the number of steps.
        weighted = loss.double() * num_examples
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._first = loss if self._first is None else self._first
        self._last = loss
        self._num_steps += 1
        self._num_examples += num_examples
        if self._num_steps % self._stride == 0:
            self.check()

    def check(self) -> None:
        """Raises TrainingError if any loss so far was not finite. Waits for the device."""
        if self._sum is not None and not math.isfinite(self._sum.item()):
            where = f"step {self._num_steps}" if self._stride == 1 else f"or before step {self._num_steps}"
            raise TrainingError(f"loss is not finite at {where}")

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self._first, self._last, self._sum) if tensor is not None]

    @property
    def numbers(self) -> tuple[float, ...]:
        """First and last loss, their sum weighted by examples, steps and examples: all there is. Waits for the device.

        Empty before the first step.
        """
        if self._first is None or self._sum is None or self._last is None:
            return ()
        return (self._first.item(), self._last.item(), self._sum.item(), self._num_steps, self._num_examples)

    def restore(self, numbers: tuple[float, ...]) -> None:
        """Go on from the `numbers` of another record."""
        if numbers:
            self._first, self._last, self._sum = (torch.tensor(value, dtype=torch.double) for value in numbers[:3])
            self._num_steps, self._num_examples = int(numbers[3]), int(numbers[4])

    def statistics(self) -> LossStatistics:
        return statistics_of(self.numbers)


def statistics_of(numbers: tuple[float, ...]) -> LossStatistics:
    """What the `numbers` of a record say."""
    if not numbers:
        return LossStatistics()
    values = (numbers[0], numbers[2] / numbers[4], numbers[1])
    first, mean, last = (value if math.isfinite(value) else None for value in values)
    return LossStatistics(first=first, mean=mean, last=last)
