"""The server's own view of the models: first weights, and loss and metrics of each task on held-out data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_runtime.contracts import HeldTask, Partition, array_key, split_key
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings
from tasks.base import Task
from tasks.errors import TaskError
from tasks.registry import build, check_model
from tasks.settings import DataSettings

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task on held-out data; `loss` is None where it is not a finite number."""

    loss: float | None
    metrics: dict[str, float]


class Evaluator:
    """Builds the tasks of a run on the server and scores whole models.

    Raises:
        TaskError: a task that cannot be built or whose held-out data is missing.
    """

    def __init__(self, refs: Sequence[str], data: DataSettings, sharing: SharingSettings) -> None:
        self._held = [HeldTask(ref=ref, data=data.spec(Partition())) for ref in refs]
        self.tasks: dict[str, Task] = {task.name: task for task in (build(held.ref, held.data) for held in self._held)}
        self._runtime = EmbeddedRuntime(sharing=sharing)

    def load(self) -> None:
        """Build each model and load all held-out data now, so that a fault ends the run before it starts."""
        for task in self.tasks.values():
            check_model(task)
            if len(task.test_examples()) == 0:
                raise TaskError(f"task {task.name!r}: it has no held-out examples to evaluate on")

    def initial_arrays(self, seed: int) -> Arrays:
        """First weights of all tasks: each task's own seed, so that adding a task changes no other."""
        arrays: Arrays = {}
        for name, task in self.tasks.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1)
                state = task.build_model().state_dict()
            arrays.update({array_key(name, key): value.numpy() for key, value in state.items()})
        return arrays

    def scores(self, arrays: Mapping[str, np.ndarray]) -> dict[str, TaskScore]:
        """Loss and metrics per task.

        Raises:
            TaskError: a metric that is not a finite number.
        """
        found = self._runtime.evaluate(arrays, self._held, split="test")
        for task, values in found.items():
            for name, value in values.items():
                if name != "loss" and not (isinstance(value, int | float) and math.isfinite(value)):
                    raise TaskError(f"task {task!r}: metric {name!r} must be a finite number, not {value!r}")
        return {
            task: TaskScore(
                loss=values["loss"] if math.isfinite(values["loss"]) else None,
                metrics={name: value for name, value in values.items() if name not in ("loss", "num-examples")},
            )
            for task, values in found.items()
        }


class BestWeights:
    """Per task the weights with the highest primary metric so far, and the round they come from."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._primary = {name: task.primary_metric for name, task in tasks.items()}
        self.arrays: Arrays = {}
        self.rounds: dict[str, int] = {}
        self.values: dict[str, float] = {}

    def update(self, server_round: int, arrays: Mapping[str, np.ndarray], scores: Mapping[str, TaskScore]) -> None:
        """Take over the tasks that got better."""
        for task, score in scores.items():
            if self._primary[task] not in score.metrics:
                raise TaskError(
                    f"task {task!r}: primary_metric {self._primary[task]!r} is not among what its metrics compute: "
                    + ", ".join(score.metrics)
                )
        better = {
            task
            for task, score in scores.items()
            if task not in self.values or score.metrics[self._primary[task]] > self.values[task]
        }
        for task in better:
            self.rounds[task] = server_round
            self.values[task] = scores[task].metrics[self._primary[task]]
        self.arrays.update({key: value for key, value in arrays.items() if split_key(key)[0] in better})
