"""MPS lanes: a worker process for each task under a private MPS daemon, its part of the SMs capped by its share.

The cap is fixed when a process starts its CUDA, so workers are kept while their share, in steps of STEP_PERCENT, stays
the same, and replaced when it changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from gpu_runtime.allocator import TaskLoad, equal_finish
from gpu_runtime.device import Device
from gpu_runtime.lanes.base import BackendError, Lane, LaneOptions
from gpu_runtime.lanes.processes import ProcessLane
from gpu_runtime.lanes.streams import CudaBackend
from gpu_runtime.mps_daemon import CONTROL, MpsError
from gpu_runtime.workers.pool import WorkerLostError, WorkerPool

STEP_PERCENT = 10


class MpsBackend(CudaBackend):
    """A worker for each task.

    competitive: each task's cap is its share, and caps may add up to more than the device. exclusive: they do not. A
    cap reserves nothing: SMs that a task leaves unused serve nobody whose own cap forbids it.

    Args:
        device: a CUDA device.
        pool: of workers, and of the daemon; without it lanes have none, and run only work of this process.
    """

    name = "mps"
    bounds = "compute: active threads of processes; not memory bandwidth, L2 cache and copy engines"
    quantum_s = 0.02
    remote = True

    def __init__(self, device: Device, pool: WorkerPool | None = None) -> None:
        super().__init__(device)
        self._pool = pool
        self._percent: Mapping[str, int] = {}

    @classmethod
    def unavailable(cls, device: Device) -> str:
        if reason := super().unavailable(device):
            return reason
        return "" if shutil.which(CONTROL) else f"{CONTROL} is not installed"

    @property
    def minimum_share(self) -> float:
        return STEP_PERCENT / 100

    def start(self, num_tasks: int) -> None:
        """Have the daemon running; workers come with their shares.

        Raises:
            BackendError: it does not start, or it has died since; the next call starts another.
        """
        if self._pool is None:
            return
        daemon = self._pool.mps
        try:
            if not daemon.is_started:
                daemon.start()
            elif reason := daemon.died():
                self._pool.close()
                raise BackendError(reason)
        except MpsError as error:
            raise BackendError(str(error)) from error

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        """A lane for each task, its worker running.

        Raises:
            BackendError: a worker cannot be started.
        """
        shares = equal_finish(loads, minimum_share=self.minimum_share).shares
        self._percent = percentages(shares, disjoint=options.mode == "exclusive")
        made = tuple(
            ProcessLane(f"mps-{task}", tasks=frozenset((task,)), width=1, options=options) for task in self._percent
        )
        if self._pool is not None:
            try:
                caps = [self._pool.mps.client_environment(percent / 100) for percent in self._percent.values()]
                for lane, worker in zip(made, self._pool.workers(len(made), caps), strict=True):
                    lane.serve_with(worker)
            except WorkerLostError as error:
                raise BackendError(str(error)) from error
        return made

    def restore(self) -> None:
        if self._pool is not None:
            self._pool.forget_trainings()

    def notes(self, options: LaneOptions) -> tuple[str, ...]:
        caps = ", ".join(f"{task} {percent} %" for task, percent in self._percent.items())
        gone = self._pool.mps.died() if self._pool is not None else ""
        return (f"mps: caps on active threads: {caps}", *([gone] if gone else []))


def percentages(shares: Mapping[str, float], *, disjoint: bool) -> dict[str, int]:
    """Caps in whole steps: the next one above each share; if `disjoint`, scaled so that they add up to at most 100.

    Where disjoint parts of one step each are too many for the device, each gets an equal, smaller one.
    """
    if not disjoint:
        return {task: min(100, STEP_PERCENT * -int(-100 * share // STEP_PERCENT)) for task, share in shares.items()}
    if len(shares) * STEP_PERCENT > 100:
        return dict.fromkeys(shares, max(1, 100 // len(shares)))
    total = sum(shares.values())
    steps = {task: max(1, int(100 / STEP_PERCENT * share / total)) for task, share in shares.items()}
    while sum(steps.values()) * STEP_PERCENT > 100:
        steps[max(steps, key=lambda task: (steps[task], task))] -= 1
    return {task: STEP_PERCENT * count for task, count in steps.items()}
