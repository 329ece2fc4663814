"""Process lanes: worker processes on the cores given, which take turns at the tasks' steps.

For tasks whose steps are many small operations: threads of one process would fight for the interpreter between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.device import Device
from gpu_runtime.lanes.base import BackendError, HostLane, Lane, LaneOptions
from gpu_runtime.lanes.cpu import CpuBackend
from gpu_runtime.workers import shared_memory
from gpu_runtime.workers.pool import WorkerLostError, WorkerPool, WorkerProcess
from gpu_runtime.workers.remote_training import Place, place


class ProcessLane(HostLane):
    """A thread that passes the steps of `RemoteTraining` on to one worker. Other work runs in the thread itself."""

    _worker: WorkerProcess | None = None

    def serve_with(self, worker: WorkerProcess) -> None:
        """Called before `open`."""
        self._worker = worker

    def run(self, task: str, work: Callable[[], None], width: int) -> None:
        worker = self._worker
        if worker is None:
            super().run(task, work, width)
            return
        token = place.set(Place(worker=worker, lane=self.name, width=width))
        try:
            super().run(task, work, width)
        finally:
            place.reset(token)
            self.lost = worker.lost


class ProcessBackend(CpuBackend):
    """As `cpu`, with a worker process behind every lane.

    Args:
        device: whose cores.
        pool: of workers, which stay warm; without it lanes have none, and run only work of this process.
    """

    name = "processes"
    bounds = "compute: intra-op threads of processes"
    # An order to a worker takes about a tenth of a millisecond.
    quantum_s = 0.02
    remote = True

    def __init__(self, device: Device, pool: WorkerPool | None = None) -> None:
        super().__init__(device)
        self._pool = pool

    @classmethod
    def unavailable(cls, device: Device) -> str:
        return CpuBackend.unavailable(device) or shared_memory.unavailable()

    def start(self, num_tasks: int) -> None:
        if self._pool is not None:
            try:
                self._pool.workers(max(1, min(self.threads, num_tasks)))
            except WorkerLostError as error:
                raise BackendError(str(error)) from error

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        """Lanes as of `cpu`, their workers running.

        Raises:
            BackendError: a worker cannot be started.
        """
        parts = super().lanes(loads, options)
        made = tuple(
            ProcessLane(lane.name.replace("core", "process"), tasks=lane.tasks, width=lane.width, options=options)
            for lane in parts
        )
        if self._pool is not None:
            try:
                for lane, worker in zip(made, self._pool.workers(len(made)), strict=True):
                    lane.serve_with(worker)
            except WorkerLostError as error:
                raise BackendError(str(error)) from error
        return made

    def restore(self) -> None:
        super().restore()
        if self._pool is not None:
            self._pool.forget_trainings()
