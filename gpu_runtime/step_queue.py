"""Which lane runs which step next: work stealing that keeps every task on its equal-finish line. Plain Python.

Lanes take grants (some steps of one task on some threads) and give them back. A task never runs in two lanes at once,
and the threads of all grants together never exceed those of the backend. Work with a lane of its own is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_runtime.allocator import TaskLoad, equal_finish, whole_shares
from gpu_runtime.lanes.base import Lane, Remaining
from gpu_runtime.memory import Admission, MemoryNeedError
from gpu_runtime.work import Work

# Waiting lanes look again this often, so that a lost wake-up costs a moment and not a hang.
WAKE_S = 0.5
# The first step on a new width pays for its threads; a width is judged by the steps after it.
WARM_UP_GRANTS = 1
SMOOTHING = 0.3


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Run up to `num_steps` steps of `work` on `width` threads, then finish it if it is done or `last`."""

    work: Work
    num_steps: int
    width: int
    last: bool = False


@dataclass(kw_only=True)
class Entry:
    """One task in the queue. `rates` holds seconds per example seen at each width, `tried` how often it was used.

    A task that is not `admitted` waits for memory and takes no steps.
    """

    work: Work
    load: TaskLoad
    running_width: int = 0
    admitted: bool = False
    ended: bool = False
    rates: dict[int, float] = field(default_factory=dict)
    tried: dict[int, int] = field(default_factory=dict)

    @property
    def due_fraction(self) -> float:
        """When its next step should be over on a line from the start (0) to the common finish (1)."""
        return min(1.0, (self.work.examples_done + self.work.batch_size) / self.work.num_examples)

    @property
    def left_s(self) -> float:
        """Seconds still to go on one thread, as seen so far; before anything was seen, by the profile."""
        per_example = self.rates.get(1) or min(self.rates.values(), default=0.0)
        return (per_example or self.load.demand * self.load.solo_cost_s) * (
            self.work.num_examples - self.work.examples_done
        )

    def note(self, width: int, seconds: float, num_examples: int) -> None:
        count = self.tried[width] = self.tried.get(width, 0) + 1
        if num_examples <= 0:
            return
        rate, known = seconds / num_examples, self.rates.get(width)
        fresh = known is None or count <= WARM_UP_GRANTS + 1
        self.rates[width] = rate if fresh or known is None else known + SMOOTHING * (rate - known)


def next_in_line(candidates: Sequence[Entry], unfinished: Sequence[Entry], lanes: int) -> Entry:
    """The task furthest behind its equal-finish line.

    On the lines that let all tasks reach their end together each step has its time; the step that is due first goes
    first. A task that has as much to do as all lanes can share out evenly cannot wait at all (a task runs in one lane
    at a time), so such tasks go before all others, the longest of them first.
    """
    even_s = sum(entry.left_s for entry in unfinished) / lanes
    critical = [entry for entry in candidates if entry.left_s >= even_s]
    if critical:
        return max(critical, key=lambda entry: entry.left_s)
    return min(candidates, key=lambda entry: (entry.due_fraction, -entry.left_s))


class StepQueue:
    """Hands out grants until all work has ended.

    Args:
        entries: the tasks, in the order of the plan.
        threads: most threads that all grants together may use.
        num_lanes: lanes that will take from the queue, but for those that are some work's own.
        in_order: one task after another instead of interleaved.
        deterministic: every grant is one thread wide.
        deadline_s: `clock` time after which work is cut short after its current step.
        clock: seconds, e.g. `time.perf_counter`.
        on_end: called (under the queue's lock) with each work that ended, and its exception or None.
        admission: decides which tasks fit into memory together; without it all do.
        quantum_s: shorter steps are granted several at a time: a lane must not spend its time on locks and switches.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        threads: int,
        num_lanes: int,
        clock: Callable[[], float],
        on_end: Callable[[Work, BaseException | None], None],
        in_order: bool = False,
        deterministic: bool = False,
        deadline_s: float | None = None,
        admission: Admission | None = None,
        quantum_s: float = 0.005,
    ) -> None:
        self._entries = {entry.work.task: entry for entry in entries}
        self._threads, self._num_lanes = threads, num_lanes
        self._clock, self._on_end = clock, on_end
        self._in_order, self._deterministic, self._deadline_s = in_order, deterministic, deadline_s
        self._changed = threading.Condition()
        self._cancelled = False
        self._widths: Mapping[str, int] = {}
        self._widths_of: tuple[str, ...] = ()
        self._admission = admission
        self._quantum_s = quantum_s
        self._admit()

    def take(self, lane: Lane) -> Grant | None:
        """The next grant for `lane`; waits for one. None when nothing is left for this lane to do."""
        with self._changed:
            while True:
                beside = self._is_own(lane)
                unfinished = [
                    entry for entry in self._entries.values() if not entry.ended and entry.work.own_lane == beside
                ]
                mine = [entry for entry in unfinished if lane.tasks is None or entry.work.task in lane.tasks]
                if not mine or self._cancelled:
                    return None
                if (
                    lane.tasks is None
                    and self._num_lanes > len(unfinished)
                    and not any(entry.work.lane == lane.name for entry in unfinished)
                ):
                    # More lanes than tasks: one leaves for good, the others have a task each.
                    self._num_lanes -= 1
                    return None
                grant = self._grant(lane, mine, unfinished)
                if grant is not None:
                    self._entries[grant.work.task].running_width = grant.width
                    return grant
                self._changed.wait(WAKE_S)

    def give_back(self, grant: Grant, *, seconds: float, num_examples: int, error: BaseException | None) -> None:
        """Report what became of a grant. With an error, or when the work is over, the task has ended."""
        with self._changed:
            entry = self._entries[grant.work.task]
            entry.running_width = 0
            entry.note(grant.width, seconds, num_examples)
            if error is not None or grant.last or grant.work.finished:
                self._end(entry, error)
            self._changed.notify_all()

    def lane_lost(self, lane: Lane, error: BaseException) -> None:
        """A lane cannot serve: its own tasks fail, and all others too when it was the last lane."""
        with self._changed:
            beside = self._is_own(lane)
            self._num_lanes -= not beside
            for entry in self._entries.values():
                own = (lane.tasks is not None and entry.work.task in lane.tasks) or entry.work.lane == lane.name
                last = self._num_lanes == 0 and not (beside or entry.work.own_lane)
                if not entry.ended and entry.running_width == 0 and (own or last):
                    entry.work.abandon()
                    self._end(entry, error)
            self._changed.notify_all()

    def cancel(self) -> None:
        """No more grants. Running ones go on to the end of their current step."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def running_tasks(self) -> frozenset[str]:
        """Tasks that a lane is working on."""
        with self._changed:
            return frozenset(task for task, entry in self._entries.items() if entry.running_width and not entry.ended)

    def remaining(self) -> list[Remaining]:
        """What the tasks that have not ended still have to do."""
        with self._changed:
            return [
                Remaining(
                    load=replace(entry.load, num_examples=max(1, entry.work.num_examples - entry.work.examples_done)),
                    left_s=entry.left_s,
                    can_move=entry.work.can_move,
                )
                for entry in self._entries.values()
                if not entry.ended
            ]

    @property
    def stopping(self) -> bool:
        """Whether lanes should cut their grant short."""
        return self._cancelled or self._past_deadline()

    # ------------------------------------------------------------------------------------------------------ internals

    def _is_own(self, lane: Lane) -> bool:
        """Whether `lane` is some work's own."""
        return lane.tasks is not None and any(
            task in self._entries and self._entries[task].work.own_lane for task in lane.tasks
        )

    def _past_deadline(self) -> bool:
        return self._deadline_s is not None and self._clock() >= self._deadline_s

    def _end(self, entry: Entry, error: BaseException | None) -> None:
        entry.ended = True
        self._on_end(entry.work, error)
        if self._admission is not None:
            self._admission.release(entry.work.task)
        self._admit()

    def _admit(self) -> None:
        """Let those that fit into memory take steps, the longest first (if in order, the next)."""
        waiting = [entry for entry in self._entries.values() if not (entry.ended or entry.admitted)]
        if self._admission is None:
            for entry in waiting:
                entry.admitted = True
            return
        if self._in_order:
            # What has a lane of its own runs beside the others: it neither waits its turn nor takes one.
            for entry in waiting:
                entry.admitted = entry.work.own_lane
            waiting = [entry for entry in waiting if not entry.admitted][:1]
        else:
            waiting = sorted(waiting, key=lambda entry: -entry.left_s)
        for admitted in self._admission.admit([entry.work.task for entry in waiting]):
            entry = self._entries[admitted.task]
            entry.admitted = True
            if admitted.fraction < 1 and not entry.work.shrink(admitted.fraction, admitted.need):
                entry.work.abandon()
                self._end(entry, MemoryNeedError(f"{admitted.need}, too few even for one example at a time"))

    def _grant(self, lane: Lane, mine: Sequence[Entry], unfinished: Sequence[Entry]) -> Grant | None:
        idle = [entry for entry in mine if entry.running_width == 0 and entry.work.lane in (None, lane.name)]
        own = self._is_own(lane)
        free = lane.width or 1 if own else self._threads - sum(entry.running_width for entry in unfinished)
        if not idle or free <= 0:
            return None
        if self._past_deadline():
            return Grant(work=idle[0].work, num_steps=0, width=1, last=True)
        idle, mine, unfinished = ([each for each in some if each.admitted] for some in (idle, mine, unfinished))
        if not idle:
            return None
        if self._in_order and not own:
            entry = idle[0]
        elif lane.tasks is None:
            entry = next_in_line(idle, unfinished, self._num_lanes)
        else:
            entry = next_in_line(idle, mine, 1)
        width = lane.width or min(free, self._elastic_width(entry, unfinished))
        return Grant(work=entry.work, num_steps=self._num_steps(entry, width), width=width) if width <= free else None

    def _elastic_width(self, entry: Entry, unfinished: Sequence[Entry]) -> int:
        """Threads for the next step of a task: one each while there are enough tasks, else its part of the threads.

        More threads are not always faster (small models, a neighbour that preempts one of them): both widths are
        tried, and the one that was faster stays.
        """
        if self._deterministic or len(unfinished) >= self._threads:
            return 1
        names = tuple(other.work.task for other in unfinished)
        if names != self._widths_of:
            loads = [other.load for other in unfinished]
            shares = equal_finish(loads, minimum_share=1.0 / self._threads).shares
            self._widths, self._widths_of = whole_shares(shares, self._threads), names
        cap = max(1, round(entry.load.maximum_share * self._threads))
        wide = min(cap, self._widths[entry.work.task])
        if entry.tried.get(wide, 0) <= WARM_UP_GRANTS or 1 not in entry.rates:
            return wide
        return wide if entry.rates[wide] <= entry.rates[1] else 1

    def _num_steps(self, entry: Entry, width: int) -> int:
        if entry.tried.get(width, 0) <= WARM_UP_GRANTS:
            return 1
        step_s = entry.rates.get(width, 0.0) * entry.work.batch_size
        return max(1, int(self._quantum_s / step_s)) if step_s > 0 else 1
