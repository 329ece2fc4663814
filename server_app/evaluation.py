"""The server's own view of the models: first weights, and loss and metrics of each task on held-out data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gpu_runtime.contracts import HeldTask, Partition, TaskCost, array_key, one_line, split_key
from gpu_runtime.randomness import seeded_draws
from gpu_runtime.runtime import EmbeddedRuntime, EvaluationError
from gpu_runtime.settings import SharingSettings
from tasks.base import Task
from tasks.errors import TaskError
from tasks.registry import build, check_model
from tasks.settings import DataSettings

Arrays = dict[str, np.ndarray]
# Held-out examples on which a run tries out each task's evaluation before round 1.
TRIAL_EXAMPLES = 64
# What an evaluation gives beside a task's metrics.
OWN_VALUES = ("loss", "num-examples")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task on held-out data; `loss` is None where it is not a finite number.

    `error` says why there is no score at all.
    """

    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Evaluator:
    """Builds the tasks of a run on the server and scores whole models.

    Raises:
        TaskError: a task that cannot be built or whose held-out data is missing.
    """

    def __init__(self, refs: Sequence[str], data: DataSettings, sharing: SharingSettings) -> None:
        self._held = [HeldTask(ref=ref, data=data.spec(Partition())) for ref in refs]
        self.tasks: dict[str, Task] = {task.name: task for task in (build(held.ref, held.data) for held in self._held)}
        self.held: dict[str, HeldTask] = dict(zip(self.tasks, self._held, strict=True))
        self._name_of = dict(zip(refs, self.tasks, strict=True))
        self._seed = data.seed
        self._sharing = sharing
        # The backend is made for the clients' devices; this machine may have another.
        self._runtime = EmbeddedRuntime(sharing=replace(sharing, backend="auto"))

    def load(self) -> None:
        """Build each model, load all held-out data and evaluate the first weights on a few of them.

        A fault ends the run before it starts. Values that are no numbers pass: so few examples need not have one.

        Raises:
            TaskError: naming every task that cannot be evaluated, and why.
        """
        for task in self.tasks.values():
            check_model(task)
            try:
                num_examples = len(task.test_examples())
            except TaskError:
                raise
            except Exception as error:  # a user's task may raise anything
                raise TaskError(
                    f"task {task.name!r}: its held-out examples cannot be loaded: "
                    f"{one_line(f'{type(error).__name__}: {error}')}"
                ) from error
            if num_examples == 0:
                raise TaskError(f"task {task.name!r}: it has no held-out examples to evaluate on")
        arrays = self.initial_arrays(self._seed)
        found, faults = self._evaluate(arrays, max_examples=TRIAL_EXAMPLES)
        if faults:
            # A metric may need more: examples of every class, say.
            again = {key: array for key, array in arrays.items() if split_key(key)[0] in faults}
            more, faults = self._evaluate(again)
            found |= more
        faults |= {task: fault for task, values in found.items() if (fault := self._no_primary_metric(task, values))}
        if faults:
            raise TaskError("; ".join(f"task {task!r}: {fault}" for task, fault in faults.items()))

    def initial_arrays(self, seed: int) -> Arrays:
        """First weights of all tasks: each task's own seed, so that adding a task changes no other."""
        arrays: Arrays = {}
        for name, task in self.tasks.items():
            own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
            with seeded_draws(own_seed, torch.device("cpu")):
                state = task.build_model().state_dict()
            arrays.update({array_key(name, key): value.numpy() for key, value in state.items()})
        return arrays

    def costs(self) -> dict[str, TaskCost]:
        """What training each task costs on this machine, measured now; tasks that cannot be measured are missing."""
        runtime = EmbeddedRuntime(sharing=replace(self._sharing, mode="sequential", backend="auto"))
        try:
            profile = runtime.profile("server", self._held)
        finally:
            runtime.close()
        return {task.task: task.cost for task in profile.tasks if task.cost is not None}

    def scores(self, arrays: Mapping[str, np.ndarray]) -> dict[str, TaskScore]:
        """Loss and metrics per task; the score of a task that cannot be evaluated says why instead."""
        found, faults = self._evaluate(arrays)
        return {
            task: TaskScore(error=faults[task]) if task in faults else self._score(task, found[task])
            for task in self.tasks
            if task in faults or task in found
        }

    def _evaluate(
        self, arrays: Mapping[str, np.ndarray], *, max_examples: int | None = None
    ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """What each task's evaluation gave, and why it gave nothing, by task name."""
        try:
            return self._runtime.evaluate(arrays, self._held, split="test", max_examples=max_examples), {}
        except EvaluationError as error:
            return error.results, {self._name_of.get(name, name): fault for name, fault in error.faults.items()}

    def _score(self, task: str, values: Mapping[str, float]) -> TaskScore:
        odd = [name for name, value in values.items() if name != "loss" and not math.isfinite(value)]
        fault = self._no_primary_metric(task, values)
        if odd:
            fault = f"metric {odd[0]!r} must be a finite number, not {values[odd[0]]!r}"
        if fault:
            return TaskScore(error=fault)
        return TaskScore(
            loss=values["loss"] if math.isfinite(values["loss"]) else None,
            metrics={name: value for name, value in values.items() if name not in OWN_VALUES},
        )

    def _no_primary_metric(self, task: str, values: Mapping[str, float]) -> str:
        computed = [name for name in values if name not in OWN_VALUES]
        primary = self.tasks[task].primary_metric
        if primary in computed:
            return ""
        return f"primary_metric {primary!r} is not among what its metrics compute: {', '.join(computed) or 'nothing'}"


class BestWeights:
    """Per task the weights with the highest primary metric so far, and the round they come from."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._primary = {name: task.primary_metric for name, task in tasks.items()}
        self.arrays: Arrays = {}
        self.rounds: dict[str, int] = {}
        self.values: dict[str, float] = {}

    def update(self, server_round: int, arrays: Mapping[str, np.ndarray], scores: Mapping[str, TaskScore]) -> None:
        """Take over the tasks that got better; one without a score keeps what it has."""
        better = {
            task
            for task, score in scores.items()
            if not score.error and (task not in self.values or score.metrics[self._primary[task]] > self.values[task])
        }
        for task in better:
            self.rounds[task] = server_round
            self.values[task] = scores[task].metrics[self._primary[task]]
        self.arrays.update({key: value for key, value in arrays.items() if split_key(key)[0] in better})
