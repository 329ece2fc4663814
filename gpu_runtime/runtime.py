"""The face of gpu_runtime: profile tasks, run a plan, evaluate. Numpy in and out, torch inside."""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.apart import apart, narrow
from gpu_runtime.contracts import (
    MEASURED,
    TRAINED,
    Emulation,
    HeldTask,
    Plan,
    Profile,
    Report,
    SplitAccess,
    TaskCost,
    TaskPlan,
    TaskProfile,
    TaskReport,
    array_key,
)
from gpu_runtime.device import Device, discover
from gpu_runtime.device_memory import PeakMemory
from gpu_runtime.device_samples import DeviceSampler
from gpu_runtime.evaluation import FirstExamples, TaskEvaluation
from gpu_runtime.executor import Execution, Executor
from gpu_runtime.lanes import AUTO, BACKENDS, BackendError, LaneOptions, PartitionBackend, choose
from gpu_runtime.lanes.mps import MpsBackend
from gpu_runtime.lanes.processes import ProcessBackend
from gpu_runtime.lanes.sequential import SequentialBackend
from gpu_runtime.mix_trial import MixTask, MixTrials
from gpu_runtime.pipeline.device_end import ChannelFactory, DeviceEnd
from gpu_runtime.pipeline.split_training import SplitTraining
from gpu_runtime.profile_cache import MixResult
from gpu_runtime.profiler import Profiler, operators
from gpu_runtime.settings import SharingSettings
from gpu_runtime.trainings import Training, arrays_by_task, trainings_of
from gpu_runtime.virtual_resource import OperatorDemand
from gpu_runtime.work import Work, one_line
from gpu_runtime.workers.pool import WorkerPool
from gpu_runtime.workload import WorkloadFactory
from gpu_runtime.workload_cache import WorkloadCache

DEFAULT_SHARING = SharingSettings()
# What a step may take to come back when the runtime is closed.
CLOSE_S = 5.0


class EvaluationError(RuntimeError):
    """Some tasks could not be evaluated; the text names them.

    Attributes:
        faults: why, by task name, or by reference where the task could not even be built.
        results: of those that could.
    """

    def __init__(self, faults: Mapping[str, str], results: Mapping[str, dict[str, float]]) -> None:
        super().__init__("evaluation failed for " + "; ".join(f"{name}: {fault}" for name, fault in faults.items()))
        self.faults = dict(faults)
        self.results = dict(results)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Trained arrays by `<task>/<parameter>`, of the tasks that trained, and the report on all."""

    arrays: dict[str, np.ndarray]
    report: Report


class Runtime(ABC):
    """One device at work for one or more clients."""

    @abstractmethod
    def profile(
        self,
        client: str,
        held: Sequence[HeldTask],
        *,
        measure: bool = True,
        access: SplitAccess | None = None,
        emulation: Emulation | None = None,
    ) -> Profile:
        """What `client` holds and, if `measure`, what training costs here. Faulty tasks are named in `errors`.

        Args:
            client: its name.
            held: its tasks.
            measure: costs too, and the link.
            access: the split service to measure the link to; None where nothing is to be split.
            emulation: a slower link to act out.
        """

    @abstractmethod
    def train(
        self,
        plan: Plan,
        arrays: Mapping[str, np.ndarray],
        held: Sequence[HeldTask],
        emulation: Emulation | None = None,
    ) -> TrainResult:
        """Run a plan. A task that fails is reported as such and gives no arrays; the others go on.

        A task that trained split (its report says so) gives the arrays of its device stage only.

        Args:
            plan: what to train, and how.
            arrays: start weights by `<task>/<parameter>`.
            held: the tasks of this client.
            emulation: a slower device and link to act out, for split tasks.
        """

    @abstractmethod
    def evaluate(
        self,
        arrays: Mapping[str, np.ndarray],
        held: Sequence[HeldTask],
        *,
        split: str = "test",
        max_examples: int | None = None,
    ) -> dict[str, dict[str, float]]:
        """Loss, metrics and `num-examples` of each held task that `arrays` has weights for.

        Args:
            arrays: weights by `<task>/<parameter>`.
            held: the tasks.
            split: "test" for the held-out examples, "train" for the client's own.
            max_examples: use no more than the first so many of each task.

        Raises:
            EvaluationError: a task failed; it holds the results of the others.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel what runs and let everything go. Further calls start afresh."""


class EmbeddedRuntime(Runtime):
    """A runtime in this process. One call works at a time: two would use the device twice over.

    Args:
        factory: makes a workload from a task reference and its data; or where to find such a function,
            "package.module:function".
        sharing: how the device is shared. A plan's own sharing mode goes before `sharing.mode`.
        budget_s: seconds that profiling may take for each task, and trying a backend for all of them together.
        channel_factory: makes the channel to the split service of a plan, over an emulated link if there is one; by
            default one over gRPC.

    Raises:
        FactoryError: the factory cannot be found.
    """

    def __init__(
        self,
        factory: WorkloadFactory | str = "tasks.registry:build",
        sharing: SharingSettings = DEFAULT_SHARING,
        *,
        budget_s: float = 3.0,
        channel_factory: ChannelFactory | None = None,
    ) -> None:
        self._sharing = sharing
        self._device_end = DeviceEnd(channel_factory)
        self._profiler = Profiler(budget_s=budget_s)
        self._working = threading.Lock()
        self._cancel = threading.Event()
        self._workloads = WorkloadCache(factory)
        self._workers = WorkerPool(factory)
        self._mixes = MixTrials(lambda name: choose(name, "competitive", self.device, self._workers), trial_s=budget_s)
        self._costs: dict[tuple[str, int], TaskCost] = {}
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """Discovered at the first use and kept."""
        if self._device is None:
            self._device = discover(self._sharing.cores)
        return self._device

    def profile(
        self,
        client: str,
        held: Sequence[HeldTask],
        *,
        measure: bool = True,
        access: SplitAccess | None = None,
        emulation: Emulation | None = None,
    ) -> Profile:
        profiles: list[TaskProfile] = []
        errors: list[str] = []
        mix: list[MixTask] = []
        with self._working, narrow():
            try:
                choose(self._sharing.backend, self._sharing.mode, self.device)
            except BackendError as error:
                # It could train nothing: the server should hear of it before it counts on this client.
                errors.append(str(error))
                held = ()
            for each in held:
                try:
                    workload = self._workloads.get(each)
                    cost = apart(functools.partial(self._profiler.cost, workload, self.device)) if measure else None
                    if cost is not None:
                        self._costs[workload.name, workload.batch_size] = cost
                        mix.append(MixTask(held=each, workload=workload, cost=cost))
                    profiles.append(
                        TaskProfile(
                            task=workload.name,
                            num_examples=len(workload.train_examples()),
                            batch_size=workload.batch_size,
                            cost=cost,
                            unsplittable=self._device_end.why_unsplittable(workload),
                        )
                    )
                except Exception as error:  # a user's task may raise anything; the others go on
                    errors.append(f"{each.ref}: {one_line(error)}")
            result = self._mixes.result(mix, self._candidates(), self.device)
            profile = Profile(
                client=client,
                device=self.device.name,
                num_cores=self.device.num_cores,
                clock=MEASURED,
                tasks=tuple(profiles),
                capacity=result.capacity if result is not None else 1.0,
                memory_bytes=self.device.memory_bytes,
                errors=tuple(errors),
            )
            if measure and access is not None:
                profile = self._device_end.with_link(profile, access, emulation, self.device.torch_device)
            return profile

    def train(
        self,
        plan: Plan,
        arrays: Mapping[str, np.ndarray],
        held: Sequence[HeldTask],
        emulation: Emulation | None = None,
    ) -> TrainResult:
        with self._working, narrow():
            self._cancel.clear()
            _import_optimizers()
            backend, notes = self._backend(plan)
            started_at_s, origin_s = time.time(), time.perf_counter()
            trainings, refused = trainings_of(
                plan,
                arrays,
                held,
                self._workloads,
                self.device,
                remote=backend.remote,
                emulation=emulation,
                channel=lambda access: self._device_end.channel(plan.client, access, emulation),
            )
            options = LaneOptions(mode=plan.sharing_mode, deterministic=plan.deterministic, trace=plan.trace)
            plans = {each.task: each for each in plan.tasks}
            peak = PeakMemory(self.device)
            sampler = DeviceSampler(self.device, origin_s)
            if plan.trace:
                sampler.start()
            try:
                execution = Executor(backend, options).run(
                    trainings,
                    [self._load(training, plans[training.task]) for training in trainings],
                    deadline_s=plan.deadline_s,
                    cancel=self._cancel,
                    origin_s=origin_s,
                )
            finally:
                samples = sampler.stop()
            peak_bytes = peak.read() if len(trainings) == 1 else 0
        reports = {training.task: _task_report(training, execution, peak_bytes) for training in trainings}
        trained = [training for training in trainings if reports[training.task].outcome == TRAINED]
        return TrainResult(
            arrays={
                array_key(training.task, name): array for training in trained for name, array in training.arrays.items()
            },
            report=Report(
                client=plan.client,
                server_round=plan.server_round,
                seconds=execution.seconds,
                clock=MEASURED,
                tasks=(*(reports[each] for each in plans if each in reports), *refused),
                backend=backend.name,
                attempt=plan.attempt,
                started_at_s=started_at_s,
                notes=(*notes, *execution.notes),
                spans=execution.spans,
                samples=samples,
            ),
        )

    def evaluate(
        self,
        arrays: Mapping[str, np.ndarray],
        held: Sequence[HeldTask],
        *,
        split: str = "test",
        max_examples: int | None = None,
    ) -> dict[str, dict[str, float]]:
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', not {split!r}")
        by_task = arrays_by_task(arrays)
        faults: dict[str, str] = {}
        works: list[TaskEvaluation] = []
        results: dict[str, dict[str, float]] = {}
        with self._working, narrow():
            self._cancel.clear()
            for each in held:
                name = each.ref
                try:
                    workload = self._workloads.get(each)
                    name = workload.name
                    if name not in by_task:
                        continue
                    examples = workload.test_examples() if split == "test" else workload.train_examples()
                    works.append(
                        TaskEvaluation(
                            workload=workload,
                            arrays=by_task[name],
                            examples=examples if max_examples is None else FirstExamples(examples, max_examples),
                            device=self.device.torch_device,
                        )
                    )
                except Exception as error:  # a user's task may raise anything; the others go on
                    faults[name] = one_line(error)
            busy = [work for work in works if work.num_examples > 0]
            backend = choose(self._evaluation_backend, self._sharing.mode, self.device)
            execution = Executor(backend, LaneOptions(mode=self._sharing.mode)).run(
                busy, [self._load(work) for work in busy], cancel=self._cancel
            )
        for work in works:
            result = execution.results.get(work.task)
            if result is not None and result.outcome != TRAINED:
                faults[work.task] = result.error
                continue
            results[work.task] = work.results
        if faults:
            raise EvaluationError(faults, results)
        return results

    def mix(self, tasks: Sequence[str]) -> MixResult | None:
        """What trials of these tasks together have found; None where there were none."""
        return self._mixes.known(tasks)

    def operators(self, held: HeldTask) -> list[OperatorDemand]:
        """What each operator of a training step keeps busy here, the longest first.

        Raises:
            RuntimeError: the profiler cannot see them.
        """
        with self._working, narrow():
            workload = self._workloads.get(held)
            return apart(lambda: operators(workload, self.device))

    def close(self) -> None:
        self._cancel.set()
        if self._working.acquire(timeout=CLOSE_S):
            self._working.release()
        else:
            # Threads cannot be ended in the middle of a step, workers can.
            self._workers.end_busy()
        with self._working:
            self._workloads.clear()
            self._costs.clear()
            self._device_end.clear()
            self._mixes.clear()
            self._workers.close()

    # ------------------------------------------------------------------------------------------------------ internals

    def _candidates(self) -> list[str]:
        """Backends to try for a mix, the preferred first; the only one where the settings name one.

        A later one has to be clearly faster to be chosen. One task at a time comes last: what a short trial
        cannot tell apart is better run side by side, where the tasks finish together.
        """
        if self._sharing.mode != "competitive":
            return []
        if self._sharing.backend != AUTO:
            return [self._sharing.backend]
        found = [name for name, backend in BACKENDS.items() if not backend.unavailable(self.device)]
        return sorted(found, key=lambda name: name == SequentialBackend.name)

    def _backend(self, plan: Plan) -> tuple[PartitionBackend, tuple[str, ...]]:
        """The backend for a plan, its workers running, and what there is to say about it."""
        name = self._sharing.backend
        if name == AUTO and plan.sharing_mode == "competitive":
            result = self._mixes.known([task.task for task in plan.tasks])
            name = result.best if result is not None else AUTO
        backend = choose(name, plan.sharing_mode, self.device, self._workers)
        num_shared = sum(task.split_point is None for task in plan.tasks)
        if num_shared == 0:
            return backend, ()
        try:
            backend.start(num_shared)
        except BackendError as error:
            if self._sharing.backend not in (AUTO, MpsBackend.name):
                raise
            instead = choose(AUTO, plan.sharing_mode, self.device)
            return instead, (f"{instead.name} instead of {name} for this round: {error}",)
        return backend, ()

    @property
    def _evaluation_backend(self) -> str:
        """Batches are large in evaluation: threads do not fight for the interpreter, and workers have no weights."""
        return AUTO if self._sharing.backend in (ProcessBackend.name, MpsBackend.name) else self._sharing.backend

    def _load(self, work: Work, plan: TaskPlan | None = None) -> TaskLoad:
        """What is known of the cost of some work; unprofiled tasks count as equal per example, until they run."""
        cost = self._costs.get((work.task, work.batch_size))
        cap = plan.share if plan is not None and plan.share is not None else 1.0
        return TaskLoad(
            task=work.task,
            num_examples=work.num_examples,
            solo_cost_s=cost.solo_cost_s if cost else 1e-3,
            demand=cost.demand if cost else 1.0,
            speed_curve=cost.speed_curve if cost else (),
            maximum_share=cap,
            # Measured in training of whole models: an evaluation takes less, and so does a device stage.
            peak_memory_bytes=cost.peak_memory_bytes if cost and plan is not None and plan.split_point is None else 0,
        )


@functools.cache
def _import_optimizers() -> None:
    """torch imports its compiler, for seconds, with the first optimiser of a process: not part of any round's time."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _task_report(training: Training, execution: Execution, peak_memory_bytes: int) -> TaskReport:
    result = execution.results[training.task]
    trained = result.outcome == TRAINED
    losses = training.losses
    return TaskReport(
        task=training.task,
        num_examples=training.examples_done if trained else 0,
        num_steps=training.steps_done,
        seconds=result.seconds,
        outcome=result.outcome,
        error=result.error,
        share=result.share,
        first_loss=losses.first,
        mean_loss=losses.mean,
        last_loss=losses.last,
        micro_batch=training.micro_batch,
        peak_memory_bytes=peak_memory_bytes,
        split=training.report if isinstance(training, SplitTraining) else None,
    )
