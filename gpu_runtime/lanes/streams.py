"""CUDA lanes: one stream per task, longer tasks at higher priority; the hardware's block scheduler arbitrates.

Streams bound nothing. Each lane is fed by its own thread and kept at most `RUN_AHEAD` steps ahead of the device, so
that deadlines and cancellation act soon. Autograd runs every backward pass of a device in one thread of its own, on the
stream of the matching forward: backward launches of different lanes take turns there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import Span
from gpu_runtime.device import CUDA, Device
from gpu_runtime.lanes.base import Lane, LaneOptions, PartitionBackend

RUN_AHEAD = 2

# Levels that torch keeps stream pools for; the device may have more (torch clamps, it does not refuse).
HIGHEST_PRIORITY = -3


class StreamLane(Lane):
    """Steps launched on one stream. `cuda` is `torch.cuda`, or a fake of it in tests."""

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
    """One stream per task."""

    name = "streams"
    bounds = "nothing: streams share the device freely"

    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        priorities = priorities_by_length({load.task: load.solo_s for load in loads})
        return tuple(
            StreamLane(
                f"stream-{load.task}",
                self.device.torch_device,
                tasks=frozenset((load.task,)),
                priority=priorities[load.task],
                options=options,
            )
            for load in loads
        )

    def notes(self, options: LaneOptions) -> tuple[str, ...]:
        if options.mode == "exclusive":
            return ("streams cannot keep tasks in disjoint parts of the device: exclusive ran as competitive",)
        return ()


def priorities_by_length(solo_s: dict[str, float], highest: int = HIGHEST_PRIORITY) -> dict[str, int]:
    """CUDA stream priority of each task (lower is more urgent): the longest task gets `highest`, the shortest 0."""
    ranked = sorted(solo_s, key=lambda task: (solo_s[task], task))
    last = max(1, len(ranked) - 1)
    return {task: round(highest * rank / last) if len(ranked) > 1 else 0 for rank, task in enumerate(ranked)}
