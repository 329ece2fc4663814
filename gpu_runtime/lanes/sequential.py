"""One task after another with the whole device: the baseline, and the way to run on demand without any sharing."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.device import CPU, Device
from gpu_runtime.lanes.base import Lane, LaneOptions, PartitionBackend
from gpu_runtime.lanes.cpu import CpuLane, restore_threads, threads_of_caller
from gpu_runtime.lanes.streams import StreamLane


class SequentialBackend(PartitionBackend):
    """A single lane with all threads (one, if deterministic), on CUDA a single stream."""

    name = "sequential"
    in_order = True
    bounds = "compute and memory: one task at a time"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._callers_threads = threads_of_caller()

    @classmethod
    def unavailable(cls, device: Device) -> str:
        return ""

    @property
    def threads(self) -> int:
        return self.device.num_cores if self.device.kind == CPU else 1

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        if self.device.kind == CPU:
            width = 1 if options.deterministic else self.threads
            return (CpuLane("sequential", tasks=None, width=width, options=options),)
        return (StreamLane("sequential", self.device.torch_device, tasks=None, priority=0, options=options),)

    def restore(self) -> None:
        if self.device.kind == CPU:
            restore_threads(self._callers_threads)
