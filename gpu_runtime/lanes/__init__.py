"""Lanes: where the tasks of one device run. `choose` finds the backend for a mode and a device."""

from __future__ import annotations

from gpu_runtime.device import CUDA, Device
from gpu_runtime.lanes.base import BackendError, Lane, LaneOptions, PartitionBackend
from gpu_runtime.lanes.cpu import CpuBackend
from gpu_runtime.lanes.green import GreenBackend
from gpu_runtime.lanes.mps import MpsBackend
from gpu_runtime.lanes.processes import ProcessBackend
from gpu_runtime.lanes.sequential import SequentialBackend
from gpu_runtime.lanes.streams import StreamsBackend
from gpu_runtime.workers.pool import WorkerPool

BACKENDS: dict[str, type[PartitionBackend]] = {
    backend.name: backend
    for backend in (SequentialBackend, CpuBackend, ProcessBackend, StreamsBackend, GreenBackend, MpsBackend)
}

AUTO = "auto"

__all__ = ["AUTO", "BACKENDS", "BackendError", "Lane", "LaneOptions", "PartitionBackend", "choose"]


def choose(backend: str, mode: str, device: Device, pool: WorkerPool | None = None) -> PartitionBackend:
    """The backend for a sharing mode on a device; `auto` means streams on CUDA and cpu elsewhere.

    Args:
        backend: as in `sharing.backend`.
        mode: of sharing.
        device: where.
        pool: workers for `processes` and `mps`; without one they cannot train.

    Raises:
        BackendError: an unknown backend, or one that cannot work on this device.
    """
    if mode == "sequential":
        return SequentialBackend(device)
    if backend == AUTO:
        backend = StreamsBackend.name if device.kind == CUDA else CpuBackend.name
    if backend not in BACKENDS:
        raise BackendError(f"unknown sharing backend {backend!r}; there are auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].unavailable(device)
    if reason:
        raise BackendError(f"sharing backend {backend!r} cannot be used: {reason}")
    for kind in (ProcessBackend, MpsBackend):
        if backend == kind.name:
            if pool is not None and pool.unavailable:
                raise BackendError(f"sharing backend {backend!r} cannot be used: {pool.unavailable}")
            return kind(device, pool)
    return BACKENDS[backend](device)
