"""CUDA lanes on parts of the SMs: green contexts, each with one stream whose kernels run on no other SMs.

Lanes work as those of streams.py do; only where their stream comes from differs. A green context is never made current
to any thread: its stream was made in it, and that is what decides where kernels run. Which SMs a lane gets is
sm_partitions.py's to say; the driver is reached through cuda_driver.py.

A context's SMs are fixed when it is made. When a task has ended, a lane that should have more goes to a new context
between two steps, as lanes of streams.py go to another stream. The old context stays until all lanes have closed.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from gpu_runtime import cuda_driver
from gpu_runtime.allocator import TaskLoad, equal_finish
from gpu_runtime.cuda_driver import CudaDriver, CudaDriverError, SmResource
from gpu_runtime.device import Device
from gpu_runtime.lanes.base import BackendError, Lane, LaneOptions, Remaining
from gpu_runtime.lanes.streams import WORTH_MOVING_S, CudaBackend, StreamLane, priorities_by_length
from gpu_runtime.sm_partitions import Partition, SmUnits, dealt, disjoint, grown, overlapping


class GreenLane(StreamLane):
    """A lane on a green context of its own, made in `open`, and on others as it grows.

    Attributes:
        got_sms: SMs that each of its contexts really had, the last one now in use; empty before `open`.
        faults: what went wrong when contexts and streams were destroyed, and why the lane could not grow.
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
        self._next_parts: tuple[SmResource, ...] = ()
        self._made: list[tuple[Callable[[int], None], int]] = []
        self._lock = threading.Lock()
        self._serving = self._disposed = False
        self.got_sms: list[int] = []

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

    def grow(self, parts: Sequence[SmResource]) -> None:
        """Have the next step on these SMs. Called by any thread."""
        with self._lock:
            self._next_parts = tuple(parts)

    @property
    def _must_move(self) -> bool:
        return bool(self._next_parts)

    def _move(self) -> None:
        with self._lock:
            self._parts, self._next_parts = self._next_parts, ()
        super()._move()

    def _new_stream(self) -> Any:
        # The first call of torch's runtime binds the device's own context to this thread, which no driver call does.
        self._cuda.default_stream(self._device).query()
        context = self._driver.create_context(self._device.index, self._parts)
        self._made.append((self._driver.destroy_context, context))
        got_sms = self._driver.context_sms(context)
        handle = self._driver.create_stream(context, self._priority)
        self._made.append((self._driver.destroy_stream, handle))
        stream = self._cuda.ExternalStream(handle, device=self._device)
        self.got_sms.append(got_sms)
        return stream

    def _destroy(self) -> None:
        while self._made:
            destroy, resource = self._made.pop()
            try:
                destroy(resource)
            except CudaDriverError as error:
                self.faults.append(f"{self.name}: {error}")


class GreenBackend(CudaBackend):
    """Lanes on parts of the SMs.

    exclusive: disjoint parts in proportion to the shares, together all that the driver's rounding leaves. competitive:
    each task gets the SMs of its share; where shares add up to more than 1 the parts overlap, and the hardware's block
    scheduler arbitrates there. When tasks end the others grow, and never shrink: in exclusive mode by units of lanes
    that have closed, those with most to do first; in competitive mode to what their shares are now.

    Args:
        device: a CUDA device.
        driver: a fake of the driver in tests.
        cuda: `torch.cuda`, or a fake of it in tests.

    Raises:
        BackendError: the driver is needed and cannot be had.
    """

    name = "green"
    bounds = "compute: SMs; not memory bandwidth, L2 cache and copy engines"
    rebalance_s = 1.0

    def __init__(self, device: Device, *, driver: CudaDriver | None = None, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._given_driver, self._cuda = driver, cuda
        self._lanes: dict[str, tuple[GreenLane, Partition]] = {}
        self._exclusive = False
        self._units: dict[str, tuple[int, ...]] = {}
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
        self._exclusive = options.mode == "exclusive"
        if self._exclusive:
            partitions = disjoint(shares, {load.task: load.demand * load.solo_s for load in loads}, units)
            urgency = dict.fromkeys(shares, 0)
        else:
            partitions = overlapping(shares, units)
            urgency = priorities_by_length({load.task: load.solo_s for load in loads})
        self._lanes, self._units = {}, {}
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
            self._units[name] = tuple(range(units.num_units)) if partition.units is None else partition.units
        return tuple(lane for lane, _ in self._lanes.values())

    def rebalance(self, left: Sequence[Remaining]) -> None:
        """Let lanes have SMs that ended tasks have left."""
        units, whole, cut = self._cut
        going = {each.load.task for each in left}
        active = {name for name, (lane, _) in self._lanes.items() if lane.tasks and lane.tasks & going}
        by_lane = {
            name: [each for each in left if each.load.task in (self._lanes[name][0].tasks or ())] for name in active
        }
        may_grow = {
            name: sum(each.left_s for each in by_lane[name])
            for name in sorted(active)
            if all(each.can_move for each in by_lane[name]) and self._lanes[name][0].serving
        }
        may_grow = {name: left_s for name, left_s in may_grow.items() if left_s >= WORTH_MOVING_S}
        for name, wanted in self._wanted_units(left, by_lane, may_grow).items():
            if len(wanted) > len(self._units[name]):
                self._units[name] = wanted
                # Alone, a lane gets also what is in no unit.
                everything = len(wanted) == units.num_units and (not self._exclusive or len(active) == 1)
                self._lanes[name][0].grow([whole] if everything else [cut[unit] for unit in wanted])

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
            f"{'+'.join(partition.tasks)} asked {partition.asked_sms}, "
            f"got {', then '.join(map(str, lane.got_sms)) or partition.got_sms(units)}"
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

    def _wanted_units(
        self, left: Sequence[Remaining], by_lane: Mapping[str, Sequence[Remaining]], may_grow: Mapping[str, float]
    ) -> dict[str, tuple[int, ...]]:
        """Units that lanes should have, for those that may grow."""
        units, _, _ = self._cut
        # A lane that still serves may still compute, even if its task has ended.
        in_use = [name for name, (lane, _) in self._lanes.items() if name in by_lane or lane.serving]
        num_users = {unit: sum(unit in self._units[name] for name in in_use) for unit in range(units.num_units)}
        if self._exclusive:
            free = [unit for unit, count in num_users.items() if count == 0]
            if not may_grow:
                return {}
            num_units = {name: len(self._units[name]) for name in may_grow}
            cap = {
                name: int(sum(each.load.maximum_share for each in by_lane[name]) * units.num_units) for name in may_grow
            }
            extra = dealt(len(free), num_units, may_grow, cap)
            found = {}
            for name, count in extra.items():
                found[name], free = (*self._units[name], *free[:count]), free[count:]
            return found
        shares = equal_finish([each.load for each in left], minimum_share=self.minimum_share).shares
        counts = {partition.tasks[0]: partition.units for partition in overlapping(shares, units)}
        wanted: dict[str, tuple[int, ...]] = {}
        for name in may_grow:
            (task,) = self._lanes[name][1].tasks
            run = counts[task]
            wanted[name] = grown(self._units[name], units.num_units if run is None else len(run), num_users)
        return wanted

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
