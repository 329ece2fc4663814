"""CUDA lanes on parts of the SMs: green contexts, each with one stream whose kernels run on no other SMs.

Lanes work as those of streams.py do; only where their stream comes from differs. A green context is never made current
to any thread: its stream was made in it, and that is what decides where kernels run. Which SMs a lane gets is
sm_partitions.py's to say; the driver is reached through cuda_driver.py.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from gpu_runtime import cuda_driver
from gpu_runtime.allocator import TaskLoad, equal_finish
from gpu_runtime.cuda_driver import CudaDriver, CudaDriverError, SmResource
from gpu_runtime.device import Device
from gpu_runtime.lanes.base import BackendError, Lane, LaneOptions
from gpu_runtime.lanes.streams import CudaBackend, StreamLane, priorities_by_length
from gpu_runtime.sm_partitions import Partition, SmUnits, disjoint, overlapping


class GreenLane(StreamLane):
    """A lane on a green context of its own, made in `open`.

    Attributes:
        got_sms: SMs that the context really has; 0 before `open`.
        faults: what went wrong when the stream and the context were destroyed.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        parts: Sequence[SmResource],
        driver: CudaDriver,
        tasks: frozenset[str],
        priority: int,
        options: LaneOptions,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(name, device, tasks=tasks, priority=priority, options=options, cuda=cuda)
        self._parts, self._driver = tuple(parts), driver
        self._context: int | None = None
        self._handle: int | None = None
        self._lock = threading.Lock()
        self._serving = self._disposed = False
        self.got_sms = 0
        self.faults: list[str] = []

    @property
    def serving(self) -> bool:
        return self._serving

    def open(self, origin_s: float) -> None:
        self._serving = True
        try:
            super().open(origin_s)
        except BaseException:
            with self._lock:
                self._stream = None
                self._serving = False
                self._destroy()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            with self._lock:
                self._serving = False
                if self._disposed:
                    self._destroy()

    def dispose(self) -> None:
        """Destroy stream and context, in this order; if the lane still serves, as soon as it closes.

        Later than `close`, because torch may record events on the stream until the last tensor used there is freed.
        """
        with self._lock:
            self._disposed = True
            if not self._serving:
                self._destroy()

    def _new_stream(self) -> Any:
        # The first call of torch's runtime binds the device's own context to this thread, which no driver call does.
        self._cuda.default_stream(self._device).query()
        self._context = self._driver.create_context(self._device.index, self._parts)
        self.got_sms = self._driver.context_sms(self._context)
        self._handle = self._driver.create_stream(self._context, self._priority)
        return self._cuda.ExternalStream(self._handle, device=self._device)

    def _destroy(self) -> None:
        handle, context, self._handle, self._context = self._handle, self._context, None, None
        for destroy, resource in ((self._driver.destroy_stream, handle), (self._driver.destroy_context, context)):
            try:
                if resource is not None:
                    destroy(resource)
            except CudaDriverError as error:
                self.faults.append(f"{self.name}: {error}")


class GreenBackend(CudaBackend):
    """Lanes on parts of the SMs.

    exclusive: disjoint parts in proportion to the shares, together all that the driver's rounding leaves; nothing
    moves when a task ends. competitive: each task gets the SMs of its share; where shares add up to more than 1 the
    parts overlap, and the hardware's block scheduler arbitrates there.

    Args:
        device: a CUDA device.
        driver: a fake of the driver in tests.
        cuda: `torch.cuda`, or a fake of it in tests.

    Raises:
        BackendError: the driver is needed and cannot be had.
    """

    name = "green"
    bounds = "compute: SMs; not memory bandwidth, L2 cache and copy engines"

    def __init__(self, device: Device, *, driver: CudaDriver | None = None, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._given_driver, self._cuda = driver, cuda
        self._lanes: dict[str, tuple[GreenLane, Partition]] = {}
        self._below_minimum: dict[str, float] = {}

    @classmethod
    def unavailable(cls, device: Device) -> str:
        if reason := super().unavailable(device):
            return reason
        if _expandable_segments():
            return "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments, which outlive the streams that are destroyed here"
        try:
            cuda_driver.load().device_sms(device.index)
        except CudaDriverError as error:
            return str(error)
        return ""

    @property
    def minimum_share(self) -> float:
        units, _, _ = self._cut
        return units.unit_sms / units.num_sms

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        units, whole, cut = self._cut
        shares = equal_finish(loads, minimum_share=self.minimum_share).shares
        self._below_minimum = {
            task: share for task, share in equal_finish(loads).shares.items() if share < self.minimum_share
        }
        if options.mode == "exclusive":
            partitions = disjoint(shares, {load.task: load.demand * load.solo_s for load in loads}, units)
            urgency = dict.fromkeys(shares, 0)
        else:
            partitions = overlapping(shares, units)
            urgency = priorities_by_length({load.task: load.solo_s for load in loads})
        self._lanes = {}
        for partition in partitions:
            name = f"sms-{'+'.join(partition.tasks)}"
            lane = GreenLane(
                name,
                self.device.torch_device,
                parts=[whole] if partition.units is None else [cut[unit] for unit in partition.units],
                driver=self._driver,
                tasks=frozenset(partition.tasks),
                priority=urgency[partition.tasks[0]],
                options=options,
                cuda=self._cuda,
            )
            self._lanes[name] = lane, partition
        return tuple(lane for lane, _ in self._lanes.values())

    def restore(self) -> None:
        lanes = [lane for lane, _ in self._lanes.values()]
        # Tensors in reference cycles (an exception and its frames, modules that know their parent) are freed now: torch
        # records events on the streams where a freed tensor was used, and would later find one of these gone.
        gc.collect()
        if not any(lane.serving for lane in lanes):
            self._free_stream_memory()
        for lane in reversed(lanes):
            lane.dispose()

    def notes(self, options: LaneOptions) -> tuple[str, ...]:
        if not self._lanes:
            return ()
        units, _, _ = self._cut
        got = [
            f"{'+'.join(partition.tasks)} asked {partition.asked_sms}, got {lane.got_sms or partition.got_sms(units)}"
            for lane, partition in self._lanes.values()
        ]
        notes = [f"green: SMs of {units.num_sms} in units of {units.unit_sms}: {'; '.join(got)}"]
        if options.mode == "exclusive" and len(self._lanes) > 1 and units.rest_sms:
            notes.append(f"green: {units.rest_sms} SMs are in no part: the driver cuts {units.unit_sms} at a time")
        for task, share in self._below_minimum.items():
            least = f"{units.unit_sms} SMs ({self.minimum_share:.3f})"
            notes.append(f"green: {task}: a share of {share:.3f} is below the least part, {least}")
        notes.extend(f"green: {fault}" for lane, _ in self._lanes.values() for fault in lane.faults)
        return tuple(notes)

    # ------------------------------------------------------------------------------------------------------ internals

    @cached_property
    def _driver(self) -> CudaDriver:
        try:
            return self._given_driver or cuda_driver.load()
        except CudaDriverError as error:
            raise BackendError(f"green: {error}") from error

    @cached_property
    def _cut(self) -> tuple[SmUnits, SmResource, tuple[SmResource, ...]]:
        """The device in units as small as the driver makes them, the device whole, and its units."""
        try:
            whole = self._driver.device_sms(self.device.index)
            # A driver that does not tell its minimum rounds up to it.
            least = whole.minimum or max([1, *(group.num_sms for group in self._driver.split(whole, 1, 1))])
            cut = self._driver.split(whole, whole.num_sms // least, least)
        except CudaDriverError as error:
            raise BackendError(f"green: {error}") from error
        if not cut:
            raise BackendError(f"green: the driver cuts {whole.num_sms} SMs into no part of {least}")
        sizes = {unit.num_sms for unit in cut}
        if len(sizes) > 1:
            raise BackendError(f"green: the driver cut the SMs into unequal units of {sorted(sizes)}")
        return SmUnits(num_sms=whole.num_sms, num_units=len(cut), unit_sms=sizes.pop()), whole, cut

    def _free_stream_memory(self) -> None:
        """Free what torch keeps for each stream that it ever saw: the lanes' streams will not come back."""
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None and self._cuda.is_initialized():
            clear_workspaces()
        self._cuda.empty_cache()


def _expandable_segments() -> bool:
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)
