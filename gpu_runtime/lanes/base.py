"""Lanes and the backends that make them: where the steps of a task run inside a device.

Each implementation passes tests/gpu_runtime/test_lanes.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import Span
from gpu_runtime.device import Device


class LaneLostError(RuntimeError):
    """A lane that can serve no longer; the text says why."""


class BackendError(RuntimeError):
    """A backend that is unknown or cannot work on this device; the text says why."""


@dataclass(frozen=True, kw_only=True)
class LaneOptions:
    """How lanes are to be made: sharing mode, one thread per lane if `deterministic`, spans kept if `trace`."""

    mode: str = "competitive"
    deterministic: bool = False
    trace: bool = False


DEFAULT_OPTIONS = LaneOptions()


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """What a task that has not ended still has to do.

    `load` has the examples that are left; `left_s` is the seconds they take, as seen so far. Only if `can_move` may its
    steps go on elsewhere on the device.
    """

    load: TaskLoad
    left_s: float
    can_move: bool = True


class Lane(ABC):
    """One place where steps run, served by one thread.

    Attributes:
        name: shown in traces.
        tasks: the only tasks that may run here; None for any.
        width: threads that every step here takes; None leaves the width of each step to the executor.
        lost: why the lane can serve no longer; empty while it can. Looked at after each `run`.
        moves: how often the lane has gone elsewhere on the device, between two steps. Work is told (`Work.moved`).
    """

    lost: str = ""
    moves: int = 0

    def __init__(self, name: str, *, tasks: frozenset[str] | None, width: int | None, options: LaneOptions) -> None:
        self.name, self.tasks, self.width = name, tasks, width
        self._options = options
        self._spans: list[Span] = []

    @abstractmethod
    def open(self, origin_s: float) -> None:
        """Called once in the serving thread, before anything runs. Spans count from `origin_s` (perf_counter)."""

    @abstractmethod
    def run(self, task: str, work: Callable[[], None], width: int) -> None:
        """Run `work` on `width` threads. May return while a device still computes, but never far ahead of it."""

    @abstractmethod
    def close(self) -> None:
        """Called once in the serving thread, after `open`, whatever happened: wait for the device, let things go."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """What ran when; complete after `close`, empty unless traced."""
        return tuple(self._spans)


class HostLane(Lane):
    """A lane whose steps are over when they return: spans come from the host's clock."""

    _origin_s = 0.0

    def open(self, origin_s: float) -> None:
        self._origin_s = origin_s

    def run(self, task: str, work: Callable[[], None], width: int) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            if self._options.trace:
                begin, end = started - self._origin_s, time.perf_counter() - self._origin_s
                self._spans.append(Span(task=task, lane=self.name, start_s=begin, end_s=end))

    def close(self) -> None:
        pass


class PartitionBackend(ABC):
    """A way to run several tasks on one device.

    Attributes:
        name: as in `sharing.backend`.
        in_order: tasks run one after another in the order of the plan, not interleaved.
        bounds: what a share bounds here, for people: "compute", "nothing", ...
        remote: its lanes train in other processes, and run only `RemoteTraining` there.
        quantum_s: shorter steps are granted several at a time, about so many seconds of them.
        rebalance_s: `rebalance` is called about so often; None for never.
    """

    name: str
    in_order: bool = False
    bounds: str = "nothing"
    quantum_s: float = 0.005
    remote: bool = False
    rebalance_s: float | None = None

    def __init__(self, device: Device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def unavailable(cls, device: Device) -> str:
        """Why this backend cannot work on `device`; empty when it can."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads that all steps together may use at any time."""

    @property
    def minimum_share(self) -> float:
        """The least share that a task can be given."""
        return 0.0

    @abstractmethod
    def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
        """New lanes for these tasks, at least one."""

    def start(self, num_tasks: int) -> None:  # noqa: B027 - most backends have nothing to start
        """Called before anything is timed: have ready what so many tasks need.

        Raises:
            BackendError: it cannot be had.
        """

    def rebalance(self, left: Sequence[Remaining]) -> None:  # noqa: B027 - most backends bind nothing to a task
        """Called in some lane's thread when a task has ended, when a lane has closed, and every `rebalance_s`.

        Never by two threads at once. It must not wait: lanes go elsewhere by themselves, before their next step.

        Args:
            left: the tasks that go on.
        """

    def notes(self, options: LaneOptions) -> tuple[str, ...]:
        """What of `options` could not be had, and what was given instead, in words for the report.

        Called after `restore`.
        """
        return ()

    def restore(self) -> None:  # noqa: B027 - most backends leave nothing behind
        """Called in the caller's thread after all lanes have closed: undo what lanes did to the process."""
