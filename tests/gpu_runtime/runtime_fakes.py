"""Small workloads, work that misbehaves on cue, and backends that watch what the executor does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_runtime.contracts import DataSpec, HeldTask, Plan, TaskPlan, array_key
from gpu_runtime.work import Work
from gpu_runtime.workload import Workload


@dataclass
class Examples:
    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[Any, Any]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self.inputs[chosen], self.targets[chosen]


class Accuracy:
    def __init__(self) -> None:
        self.right = self.seen = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / self.seen}


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.blocks(inputs)


class Pictures:
    """Three classes of 1x8x8 pictures and a small convolutional net."""

    batch_size = 8
    learning_rate = 0.05

    def __init__(self, name: str, num_examples: int = 50) -> None:
        self.name, self._num_examples = name, num_examples

    def build_model(self) -> nn.Module:
        return Blocks(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        )

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    def metrics(self) -> Accuracy:
        return Accuracy()

    def train_examples(self) -> Examples:
        return _pictures(self._num_examples, seed=1)

    def test_examples(self) -> Examples:
        return _pictures(30, seed=2)

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        inputs = torch.randn(batch_size, 1, 8, 8, generator=generator)
        return inputs, torch.randint(0, 3, (batch_size,), generator=generator)


class Dropping(Pictures):
    """With dropout: draws random numbers in every forward pass."""

    def build_model(self) -> nn.Module:
        return Blocks(nn.Flatten(), nn.Linear(64, 32), nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 3)))


class Normed(Pictures):
    """With batch norm: integer and running buffers."""

    def build_model(self) -> nn.Module:
        return Blocks(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
        )


class Rows(Pictures):
    """A model without convolutions."""

    def build_model(self) -> nn.Module:
        return Blocks(nn.Flatten(), nn.Linear(64, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 3)))


class Empty(Pictures):
    def train_examples(self) -> Examples:
        return _pictures(0, seed=1)


class RaisesAtStep(Pictures):
    """Raises in the loss of step `at` (counted from 1)."""

    at = 3

    def __init__(self, name: str, num_examples: int = 50) -> None:
        super().__init__(name, num_examples)
        self.calls = 0

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("injected fault\nwith details")
        return super().loss(outputs, targets)


class NanAtStep(RaisesAtStep):
    """The loss of step `at` is not a number."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super(RaisesAtStep, self).loss(outputs, targets) * (float("nan") if self.calls == self.at else 1.0)


KINDS: dict[str, type[Pictures]] = {
    "pictures": Pictures,
    "dropping": Dropping,
    "normed": Normed,
    "rows": Rows,
    "empty": Empty,
    "raises": RaisesAtStep,
    "nan": NanAtStep,
}


def build(ref: str, data: DataSpec) -> Workload:
    """Factory: `kind` or `kind-suffix`, named as its reference."""
    kind = ref.split("-")[0]
    if kind not in KINDS:
        raise ValueError(f"there is no task {ref!r}")
    return KINDS[kind](ref)


def hold(*refs: str) -> list[HeldTask]:
    return [HeldTask(ref=ref, data=DataSpec()) for ref in refs]


def start_arrays(*refs: str) -> dict[str, np.ndarray]:
    arrays = {}
    for ref in refs:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(len(ref))
            model = build(ref, DataSpec()).build_model()
        arrays.update({array_key(ref, name): value.numpy().copy() for name, value in model.state_dict().items()})
    return arrays


def plan_of(*refs: str, num_examples: int = 60, **options: Any) -> Plan:
    tasks = tuple(TaskPlan(task=ref, num_examples=num_examples) for ref in refs)
    return Plan(client="a", server_round=1, seed=7, tasks=tasks, **options)


@dataclass(eq=False)
class FakeWork(Work):
    """Counts steps; `during` is called inside each step with the number of the step, from 1."""

    task: str
    num_examples: int = 10
    batch_size: int = 1
    during: Callable[[int], None] = lambda number: None
    ended: str = ""
    overlaps: list[str] = field(default_factory=list)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def step(self) -> None:
        if not self._busy.acquire(blocking=False):
            self.overlaps.append(f"step {self.steps_done + 1}")
            return
        try:
            self.steps_done += 1
            self.during(self.steps_done)
            self.examples_done += min(self.batch_size, self.num_examples - self.examples_done)
        finally:
            self._busy.release()

    def finish(self) -> None:
        self.ended += "finished"

    def abandon(self) -> None:
        self.ended += "abandoned"


def _pictures(count: int, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (count,), generator=generator)
    inputs = 0.5 * torch.randn(count, 1, 8, 8, generator=generator) + targets.float().reshape(-1, 1, 1, 1)
    return Examples(inputs, targets)


class Slow(Pictures):
    """Each step takes a twentieth of a second."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().loss(outputs, targets)


class Dying(Pictures):
    """Kills its process in the first step."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(outputs, targets)


class Exiting(Pictures):
    """Exits in the first step."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise SystemExit("enough")


class Endless(Pictures):
    """Its first step never returns."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        while True:
            time.sleep(1)


class Staying(Pictures):
    """May not move."""

    movable = False


KINDS |= {"slow": Slow, "dying": Dying, "staying": Staying, "exiting": Exiting, "endless": Endless}
