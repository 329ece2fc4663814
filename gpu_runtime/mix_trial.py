"""Which backend serves a mix of tasks best on this device, and how much: measured by training, not looked up.

Trials are real training steps on random examples; what they learn is thrown away. The result for a backend is the
capacity C: demand-seconds served per second while all tasks of the mix run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_runtime import profile_cache
from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contest import contest
from gpu_runtime.contracts import FAILED, HeldTask, TaskCost, TaskPlan
from gpu_runtime.device import Device
from gpu_runtime.executor import Executor
from gpu_runtime.lanes import BackendError, LaneOptions, PartitionBackend
from gpu_runtime.lanes.processes import ProcessBackend
from gpu_runtime.profile_cache import MixKey, MixResult
from gpu_runtime.randomness import seeded_draws
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.work import Work
from gpu_runtime.workers.remote_training import RemoteTraining
from gpu_runtime.workload import SyntheticExamples, Workload

# One run of a backend takes about this part of its time, on a machine that serves as much as the profile says.
RUN_FRACTION = 1 / 8
# The first steps of a training build the model, those of a process also load its modules.
WARM_UP_STEPS = 2
MIN_STEPS = 4
# Longer steps: the interpreter's part in them is too small for processes to be worth their start.
LONGEST_PROCESS_STEP_S = 0.05
ORIGIN = Origin(client="trial", server_round=0, seed=0)


@dataclass(frozen=True, kw_only=True)
class MixTask:
    """A task of a mix: how workers may build it, the workload as built here, and its measured cost."""

    held: HeldTask
    workload: Workload
    cost: TaskCost

    @property
    def step_s(self) -> float:
        return self.cost.solo_cost_s * self.workload.batch_size


MakeBackend = Callable[[str], PartitionBackend]


class MixTrials:
    """Results by mix: from memory, from disk, or measured.

    Args:
        make: a backend by name; may raise BackendError.
        trial_s: seconds for each backend; they are one budget, and go to those between which it is close.
        use_disk: look up and keep results in the user's cache directory.
    """

    def __init__(self, make: MakeBackend, *, trial_s: float = 3.0, use_disk: bool = True) -> None:
        self._make, self._trial_s, self._use_disk = make, trial_s, use_disk
        self._known: dict[frozenset[str], MixResult] = {}

    def known(self, tasks: Sequence[str]) -> MixResult | None:
        """The result for exactly these tasks, else for the smallest known mix that holds them all."""
        wanted = frozenset(tasks)
        holding = [mix for mix in self._known if mix >= wanted]
        return self._known[min(holding, key=len)] if holding and len(wanted) > 1 else None

    def result(self, tasks: Sequence[MixTask], candidates: Sequence[str], device: Device) -> MixResult | None:
        """The result for `tasks`; None for a single task, or when no candidate could be tried.

        Args:
            tasks: of the mix.
            candidates: backends to choose from, in the order of preference.
            device: which nothing else should be using now.
        """
        if len(tasks) < 2:
            return None
        if max(task.step_s for task in tasks) > LONGEST_PROCESS_STEP_S:
            candidates = [name for name in candidates if name != ProcessBackend.name]
        names = frozenset(task.workload.name for task in tasks)
        key = MixKey(
            device=device.name,
            num_cores=device.num_cores,
            driver=device.driver,
            torch_version=torch.__version__,
            candidates=tuple(candidates),
            costs=tuple(sorted(f"{task.workload.name} {task.cost}" for task in tasks)),
        )
        found = profile_cache.load_mix(key) if self._use_disk else None
        if found is None:
            found = self._measured(tasks, candidates, device)
            if found and self._use_disk:
                profile_cache.store_mix(key, found)
        if not found:
            return None
        self._known[names] = found
        return found

    def clear(self) -> None:
        self._known.clear()

    # ------------------------------------------------------------------------------------------------------ internals

    def _measured(self, tasks: Sequence[MixTask], candidates: Sequence[str], device: Device) -> MixResult | None:
        warm_up = dict.fromkeys(range(len(tasks)), WARM_UP_STEPS)
        able = [name for name in candidates if self._run(name, tasks, warm_up, device) is not None]

        def capacity(name: str, part: float) -> float | None:
            steps = _equal_steps(tasks, self._trial_s * RUN_FRACTION * part)
            seconds = self._run(name, tasks, steps, device)
            if seconds is None:
                return None
            return sum(task.cost.demand * task.step_s * steps[index] for index, task in enumerate(tasks)) / seconds

        outcome = contest(able, capacity, budget_s=self._trial_s * len(able))
        return None if outcome is None else MixResult(capacities=outcome.speeds, best=outcome.best)

    def _run(self, name: str, tasks: Sequence[MixTask], steps: Mapping[int, int], device: Device) -> float | None:
        """Seconds for so many steps of each task; None where this backend cannot do it."""
        try:
            backend = self._make(name)
            backend.start(len(tasks))
            works = [_trial(task, steps[index], device, remote=backend.remote) for index, task in enumerate(tasks)]
            loads = [
                TaskLoad(
                    task=work.task,
                    num_examples=work.num_examples,
                    solo_cost_s=task.cost.solo_cost_s,
                    demand=task.cost.demand,
                    speed_curve=task.cost.speed_curve,
                    peak_memory_bytes=task.cost.peak_memory_bytes,
                )
                for task, work in zip(tasks, works, strict=True)
            ]
            execution = Executor(backend, LaneOptions()).run(works, loads, origin_s=time.perf_counter())
        except BackendError:
            return None
        if any(result.outcome == FAILED for result in execution.results.values()):
            return None
        return execution.seconds


def _equal_steps(tasks: Sequence[MixTask], seconds: float) -> dict[int, int]:
    """Steps of each task so that all take about as long, and all together `seconds` of the device."""
    part_s = seconds / sum(task.cost.demand for task in tasks)
    return {index: max(MIN_STEPS, round(part_s / task.step_s)) for index, task in enumerate(tasks)}


def _trial(task: MixTask, num_steps: int, device: Device, *, remote: bool) -> Work:
    """A training on random examples with a learning rate of 0, so that nothing can diverge."""
    workload = task.workload
    plan = TaskPlan(task=workload.name, num_examples=num_steps * workload.batch_size, learning_rate=0.0)
    with seeded_draws(0, torch.device("cpu")):
        arrays = {name: value.numpy() for name, value in workload.build_model().state_dict().items()}
    if remote:
        return RemoteTraining(
            held=task.held,
            workload=workload,
            plan=plan,
            arrays=arrays,
            origin=ORIGIN,
            device=device.torch_device,
            synthetic=True,
        )
    return TaskTraining(
        workload=SyntheticExamples(workload),
        plan=plan,
        arrays=arrays,
        origin=ORIGIN,
        device=device.torch_device,
    )
