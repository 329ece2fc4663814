"""CPU lanes: worker threads whose intra-op threads never add up to more than the cores given.

`torch.set_num_threads` acts on the calling thread's OpenMP team, so each lane has its own width; it also sets the width
that later threads start with, which is why `restore` puts the caller's value back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpu_runtime.allocator import TaskLoad, equal_finish, packed, whole_shares
from gpu_runtime.device import CPU, Device
from gpu_runtime.lanes.base import HostLane, Lane, LaneOptions, PartitionBackend


def threads_of_caller() -> int:
    """Intra-op threads of the calling thread, to be put back by `restore_threads`."""
    return torch.get_num_threads()


def restore_threads(threads: int) -> None:
    """Put back the width of the calling thread and of threads yet to start."""
    torch.set_num_threads(threads)


class CpuLane(HostLane):
    """A worker thread that runs each step on the width it is given."""

    _current_width = 0

    def open(self, origin_s: float) -> None:
        super().open(origin_s)
        # torch gives a thread the process-wide width at its first use of it. Let that happen now: later it would undo
        # the width set in `run` with whatever another lane has set since.
        torch.get_num_threads()

    def run(self, task: str, work: Callable[[], None], width: int) -> None:
        if width != self._current_width:
            torch.set_num_threads(width)
            self._current_width = width
        super().run(task, work, width)


class CpuBackend(PartitionBackend):
    """Worker threads on the cores given.

    competitive: one lane per core (no more than tasks), open to all tasks: the executor hands each lane the next step.
    exclusive: the cores are dealt out once, by share. With no more tasks than cores every task has a lane of its own
    with a fixed width; with more, tasks are packed by work into one lane per core. Nothing moves when a task ends:
    every group keeps at least one worker, and what its cores leave unused stays unused.
    """

    name = "cpu"
    bounds = "compute: intra-op threads"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._callers_threads = threads_of_caller()

    @classmethod
    def unavailable(cls, device: Device) -> str:
        return "" if device.kind == CPU else "the device is not a CPU"

    @property
    def threads(self) -> int:
        return self.device.num_cores

    @property
    def minimum_share(self) -> float:
        return 1.0 / self.threads

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        if options.mode == "exclusive" and len(loads) > 1:
            return tuple(
                CpuLane(f"cores-{index}", tasks=frozenset(tasks), width=width, options=options)
                for index, (tasks, width) in enumerate(self._parts(loads, options))
            )
        count = max(1, min(self.threads, len(loads)))
        return tuple(CpuLane(f"core-{index}", tasks=None, width=None, options=options) for index in range(count))

    def restore(self) -> None:
        restore_threads(self._callers_threads)

    def _parts(self, loads: Sequence[TaskLoad], options: LaneOptions) -> list[tuple[list[str], int]]:
        """Disjoint parts of the cores: the tasks of each and its number of threads."""
        if len(loads) > self.threads:
            demand_s = {load.task: load.demand * load.solo_s for load in loads}
            return [(tasks, 1) for tasks in packed(demand_s, self.threads)]
        shares = equal_finish(loads, minimum_share=self.minimum_share).shares
        widths = whole_shares(shares, self.threads)
        return [([task], 1 if options.deterministic else width) for task, width in widths.items()]
