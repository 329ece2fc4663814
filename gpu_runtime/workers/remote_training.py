"""A training as the executor sees it that really happens in worker processes, which take turns at it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from gpu_runtime.contracts import HeldTask, TaskPlan
from gpu_runtime.losses import LossStatistics, statistics_of
from gpu_runtime.micro_batches import MicroBatches
from gpu_runtime.training import Origin, Progress, check_plan
from gpu_runtime.work import Work
from gpu_runtime.workers.pool import WorkerProcess
from gpu_runtime.workers.shared_memory import new_memory
from gpu_runtime.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the steps of the calling thread go: a worker, by the name of its lane, on `width` threads."""

    worker: WorkerProcess
    lane: str
    width: int


# Set by the lane that runs the work.
place: ContextVar[Place] = ContextVar("place")


class RemoteTraining(Work):
    """The same training as `TaskTraining`, bit for bit, in whichever worker serves the lane that takes its next steps.

    Its tensors lie in memory that all workers share. What cannot lie there (an unusual optimiser's state) ties the
    training to the lane that took its first steps, and a note says so.

    Args:
        held: reference and data, from which workers build the workload.
        workload: the same, built here: batch size, and whether it may move.
        plan, arrays, origin, device: as of `TaskTraining`. On CUDA a training stays with its first worker.
        synthetic: train on random examples.

    Raises:
        TrainingError: a plan that cannot be followed.
    """

    def __init__(
        self,
        *,
        held: HeldTask,
        workload: Workload,
        plan: TaskPlan,
        arrays: Mapping[str, np.ndarray],
        origin: Origin,
        device: torch.device,
        synthetic: bool = False,
    ) -> None:
        self.task = plan.task
        self.num_examples = plan.num_examples
        self.batch_size = workload.batch_size if plan.batch_size is None else plan.batch_size
        check_plan(plan, self.batch_size)
        self._begin = {
            "order": "begin",
            "task": plan.task,
            "held": asdict(held),
            "plan": asdict(plan),
            "origin": asdict(origin),
            "device": str(device),
            "synthetic": synthetic,
        }
        self._start_arrays: Mapping[str, np.ndarray] = arrays
        self._movable = bool(getattr(workload, "movable", True))
        self._shrinking = MicroBatches(self.batch_size, torch.device("cpu"))
        self._shared = device.type == "cpu"
        self._memory: list[int] = []
        self._workers: list[WorkerProcess] = []
        self._last: WorkerProcess | None = None
        self._stage: Mapping[str, Any] | None = None
        self._layout: Mapping[str, Any] | None = None
        self._knows_layout: set[int] = set()
        self._progress = Progress()
        self._stuck = ""
        self.arrays: dict[str, np.ndarray] = {}

    @property
    def losses(self) -> LossStatistics:
        return statistics_of(self._progress.losses)

    @property
    def notes(self) -> tuple[str, ...]:
        stuck = (f"it stays with one worker: {self._stuck}",) if self._stuck else ()
        return (*(self._progress.notes or self._shrinking.notes), *stuck)

    @property
    def micro_batch(self) -> int | None:
        return self._progress.micro_batch

    def shrink(self, fraction: float, need: str) -> bool:
        fits = self._shrinking.shrink(fraction, need)
        if self._shrinking.size < self.batch_size:
            self._progress = Progress(micro_batch=self._shrinking.size, notes=self._shrinking.notes)
        return fits

    def step(self) -> None:
        self.advance(1, lambda: False)

    def advance(self, num_steps: int, stopping: Callable[[], bool]) -> None:
        """Take all `num_steps` steps: a worker is not interrupted between two of one order."""
        here = place.get()
        self._ask(here, {"order": "steps", "num_steps": num_steps, "width": here.width})
        if not (self._movable and self._shared) or self._stuck:
            self.lane = here.lane

    def finish(self) -> None:
        self.arrays = dict(self._ask(place.get(), {"order": "finish"}))
        self._release()

    def abandon(self) -> None:
        self._release()

    # ------------------------------------------------------------------------------------------------------ internals

    def _ask(self, here: Place, order: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """Give an order to the worker, which is told first what it has missed. Takes over how far it has come."""
        if here.worker not in self._workers:
            if self._shared and not self._memory:
                self._memory = [new_memory(f"paceline-{self.task}"), new_memory(f"paceline-{self.task}-optimizer")]
            here.worker.ask(self._begin, self._start_arrays, self._memory)
            self._workers.append(here.worker)
        stage = None if here.worker is self._last else self._stage
        if stage is not None and id(here.worker) not in self._knows_layout:
            stage = {**stage, "optimizer": self._layout}
            self._knows_layout.add(id(here.worker))
        if self._stage is None and self._progress.micro_batch is not None:
            stage = {"progress": asdict(self._progress), "optimizer": None, "stuck": ""}
        answer = here.worker.ask({**order, "task": self.task, "stage": stage})
        self._last, self._stage = here.worker, answer.header["stage"]
        assert self._stage is not None
        if self._stage["optimizer"] is not None:
            self._layout, self._knows_layout = self._stage["optimizer"], {id(here.worker)}
            self._stage = {**self._stage, "optimizer": None}
        body = self._stage["progress"]
        self._progress = Progress(**{**body, "losses": tuple(body["losses"]), "notes": tuple(body["notes"])})
        self._stuck = str(self._stage["stuck"])
        self.steps_done, self.examples_done = self._progress.steps_done, self._progress.examples_done
        return answer.arrays

    def _release(self) -> None:
        """Workers forget their copies when the backend tells them; the memory goes with the last of them."""
        self._start_arrays = {}
        while self._memory:
            os.close(self._memory.pop())
