"""Lanes of their own for work that mostly waits for others: beside those of a backend, in this process."""

from __future__ import annotations

from gpu_runtime.device import CUDA, Device
from gpu_runtime.lanes.base import Lane, LaneOptions
from gpu_runtime.lanes.cpu import CpuLane
from gpu_runtime.lanes.streams import StreamLane


def own_lane(device: Device, task: str, width: int, options: LaneOptions) -> Lane:
    """A lane for `task` alone: a stream on CUDA, elsewhere a thread that computes on `width` cores."""
    name, tasks = f"own-{task}", frozenset((task,))
    if device.kind == CUDA:
        return StreamLane(name, device.torch_device, tasks=tasks, priority=0, options=options)
    return CpuLane(name, tasks=tasks, width=width, options=options)
