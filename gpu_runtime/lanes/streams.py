"""CUDA lanes: one stream per task, longer tasks at higher priority; the hardware's block scheduler arbitrates.

Streams bound nothing. Each lane is fed by its own thread and kept at most `RUN_AHEAD` steps ahead of the device, so
that deadlines and cancellation act soon. Autograd runs every backward pass of a device in one thread of its own, on the
stream of the matching forward: backward launches of different lanes take turns there.

A stream's priority is fixed when it is made. A lane whose task needs another goes to another stream between two steps:
it waits for the old one first, so that nothing of the two can overlap, and its work is told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import Span
from gpu_runtime.device import CUDA, Device
from gpu_runtime.lanes.base import Lane, LaneOptions, PartitionBackend, Remaining
from gpu_runtime.work import one_line

RUN_AHEAD = 2

# Levels that torch keeps stream pools for; the device may have more (torch clamps, it does not refuse).
HIGHEST_PRIORITY = -3

# Times of tasks this far apart are told apart: to go to another stream costs a new CUDA graph.
CLEARLY_LONGER = 1.25
# A task that ends sooner stays where it is.
WORTH_MOVING_S = 1.0


class StreamLane(Lane):
    """Steps launched on one stream at a time. `cuda` is `torch.cuda`, or a fake of it in tests.

    Attributes:
        faults: why the lane could not go to another stream.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        tasks: frozenset[str] | None,
        priority: int,
        options: LaneOptions,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(name, tasks=tasks, width=1, options=options)
        self._device, self._priority, self._cuda = device, priority, cuda
        self._in_flight: deque[Any] = deque()
        self._marks: list[tuple[str, Any, Any]] = []
        self._stream: Any = None
        self._anchor: Any = None
        self._anchor_s = 0.0
        self._next_priority = priority
        self.faults: list[str] = []

    @property
    def priority(self) -> int:
        """Of the stream, or of the one that it will go to."""
        return self._next_priority

    def go_to(self, priority: int) -> None:
        """Have the next step on a stream of this priority. Called by any thread."""
        self._next_priority = priority

    def open(self, origin_s: float) -> None:
        self._cuda.set_device(self._device)
        self._stream = self._new_stream()
        # Whatever the caller left on its stream (weights, a previous round) is done before this lane reads it.
        self._stream.wait_stream(self._cuda.default_stream(self._device))
        if self._options.trace:
            self._anchor = self._cuda.Event(enable_timing=True)
            self._anchor.record(self._stream)
            self._anchor.synchronize()
            self._anchor_s = time.perf_counter() - origin_s

    def run(self, task: str, work: Callable[[], None], width: int) -> None:
        if self._must_move:
            self._move()
        while len(self._in_flight) >= RUN_AHEAD:
            self._in_flight.popleft().synchronize()
        with self._cuda.stream(self._stream):
            begin = self._mark() if self._options.trace else None
            work()
            end = self._mark()
        self._in_flight.append(end)
        if begin is not None:
            self._marks.append((task, begin, end))

    def close(self) -> None:
        if self._stream is None:
            return
        self._stream.synchronize()
        self._in_flight.clear()
        for task, begin, end in self._marks:
            start_s, end_s = (self._anchor_s + self._anchor.elapsed_time(mark) / 1e3 for mark in (begin, end))
            self._spans.append(Span(task=task, lane=self.name, start_s=start_s, end_s=end_s))
        self._marks.clear()

    @property
    def _must_move(self) -> bool:
        return self._next_priority != self._priority

    def _move(self) -> None:
        """Go to another stream. The host waits, for a few steps at most: then memory of the old stream is idle too."""
        self._stream.synchronize()
        self._in_flight.clear()
        self._priority = self._next_priority
        try:
            self._stream = self._new_stream()
        except RuntimeError as error:  # nothing was lost but the chance
            self.faults.append(f"{self.name} stays where it is: {one_line(error)}")
        else:
            self.moves += 1

    def _new_stream(self) -> Any:
        return self._cuda.Stream(self._device, priority=self._priority)

    def _mark(self) -> Any:
        # Blocking: many lanes wait at once, and a spinning wait would take a core from the threads that launch.
        event = self._cuda.Event(enable_timing=self._options.trace, blocking=True)
        event.record(self._stream)
        return event


class CudaBackend(PartitionBackend):
    """What all backends with lanes on CUDA streams have in common."""

    @classmethod
    def unavailable(cls, device: Device) -> str:
        return "" if device.kind == CUDA else "torch.cuda.is_available() is false"

    @property
    def threads(self) -> int:
        # Lanes are fed by threads that mostly launch and wait; the device, not the cores, is what they share.
        return 1_000_000


class StreamsBackend(CudaBackend):
    """One stream per task. `cuda` is `torch.cuda`, or a fake of it in tests."""

    name = "streams"
    bounds = "nothing: streams share the device freely"
    rebalance_s = 1.0

    def __init__(self, device: Device, *, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._lanes: dict[str, StreamLane] = {}

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        priorities = priorities_by_length({load.task: load.solo_s for load in loads})
        self._lanes = {
            load.task: StreamLane(
                f"stream-{load.task}",
                self.device.torch_device,
                tasks=frozenset((load.task,)),
                priority=priorities[load.task],
                options=options,
                cuda=self._cuda,
            )
            for load in loads
        }
        return tuple(self._lanes.values())

    def rebalance(self, left: Sequence[Remaining]) -> None:
        """Give the tasks that have most to do the most urgent streams, where that is no longer so."""
        left_s = {each.load.task: each.left_s for each in left}
        changed = reordered({task: self._lanes[task].priority for task in left_s}, left_s)
        for each in left:
            if each.load.task in changed and each.can_move and each.left_s >= WORTH_MOVING_S:
                self._lanes[each.load.task].go_to(changed[each.load.task])

    def notes(self, options: LaneOptions) -> tuple[str, ...]:
        notes = [
            f"{lane.name} went to a stream of another priority {lane.moves} times"
            for lane in self._lanes.values()
            if lane.moves
        ]
        notes += [fault for lane in self._lanes.values() for fault in lane.faults]
        if options.mode == "exclusive":
            notes.append("streams cannot keep tasks in disjoint parts of the device: exclusive ran as competitive")
        return tuple(notes)


def reordered(priorities: Mapping[str, int], left_s: Mapping[str, float]) -> dict[str, int]:
    """New priorities of tasks that should have others; none while the order is right: nothing else counts.

    It is wrong where a task that has clearly more to do than another is not more urgent. There are fewer levels than
    tasks may be: what is wrong stays if new priorities would set no more of it right.
    """

    def num_wrong(given: Mapping[str, int]) -> int:
        return sum(left_s[a] > CLEARLY_LONGER * left_s[b] and given[a] >= given[b] for a in left_s for b in left_s)

    fresh = priorities_by_length(left_s)
    if num_wrong(fresh) >= num_wrong(priorities):
        return {}
    return {task: priority for task, priority in fresh.items() if priority != priorities[task]}


def priorities_by_length(solo_s: Mapping[str, float], highest: int = HIGHEST_PRIORITY) -> dict[str, int]:
    """CUDA stream priority of each task (lower is more urgent): the longest task gets `highest`, the shortest 0."""
    ranked = sorted(solo_s, key=lambda task: (solo_s[task], task))
    last = max(1, len(ranked) - 1)
    return {task: round(highest * rank / last) if len(ranked) > 1 else 0 for rank, task in enumerate(ranked)}
