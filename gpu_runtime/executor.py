"""Runs the work of several tasks at once in the lanes of a backend, until all have ended, failed or been cut short."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpu_runtime.allocator import TaskLoad, equal_finish
from gpu_runtime.contracts import CANCELLED, FAILED, TRAINED, Span
from gpu_runtime.device import Device
from gpu_runtime.device_memory import free_bytes
from gpu_runtime.lanes.base import DEFAULT_OPTIONS, Lane, LaneLostError, LaneOptions, PartitionBackend
from gpu_runtime.lanes.own import own_lane
from gpu_runtime.memory import Admission
from gpu_runtime.step_queue import Entry, Grant, StepQueue
from gpu_runtime.work import Work, one_line

# How often the caller looks for cancellation and for lanes that ended.
POLL_S = 0.05
# A step that has not returned this long after a deadline or a cancellation is given up, and its lane with it.
STUCK_S = 60.0
# Who presses Ctrl-C more often than this does not want to wait for the current steps.
MAX_INTERRUPTS = 3


@dataclass(frozen=True, kw_only=True)
class WorkResult:
    """What became of one task's work. `seconds` is when it ended, counted from the start of the execution."""

    task: str
    outcome: str
    seconds: float
    share: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What became of all work, by task, and what ran when."""

    results: Mapping[str, WorkResult]
    seconds: float
    notes: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()


class Executor:
    """Runs work on one backend.

    Args:
        backend: makes the lanes.
        options: sharing mode, determinism, tracing.
        read_free: bytes of memory free on a device, None where unknown. Tasks that do not fit wait for others to end.
    """

    def __init__(
        self,
        backend: PartitionBackend,
        options: LaneOptions = DEFAULT_OPTIONS,
        *,
        read_free: Callable[[Device], int | None] = free_bytes,
    ) -> None:
        self._backend, self._options, self._read_free = backend, options, read_free

    def run(
        self,
        works: Sequence[Work],
        loads: Sequence[TaskLoad],
        *,
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
        origin_s: float | None = None,
    ) -> Execution:
        """Run all `works`, one for each task, and return when every one has ended.

        A task that raises fails alone. At the deadline each task stops after its current step and keeps what it did.
        Work that mostly waits (`Work.own_lane`) has a lane of its own beside those of the backend, and no share.

        Args:
            works: the work of each task.
            loads: cost of each task, in the same order; decides shares and who goes first.
            deadline_s: seconds after `origin_s`.
            cancel: set it to stop all work after its current step and drop it.
            origin_s: `time.perf_counter()` from which times count; now if None.
        """
        start_s = time.perf_counter() if origin_s is None else origin_s
        if not works:
            return Execution(results={}, seconds=time.perf_counter() - start_s)
        admission = Admission(
            {load.task: load.peak_memory_bytes for load in loads},
            lambda: self._read_free(self._backend.device),
            at_once=1 if self._backend.in_order else None,
        )
        run = _Run(self._backend, self._options, works, loads, start_s, deadline_s, admission)
        return run.until_done(cancel or threading.Event())


class _Run:
    """One call of `Executor.run`: its queue, its lanes, one thread for each."""

    def __init__(
        self,
        backend: PartitionBackend,
        options: LaneOptions,
        works: Sequence[Work],
        loads: Sequence[TaskLoad],
        start_s: float,
        deadline_s: float | None,
        admission: Admission,
    ) -> None:
        self._backend, self._options, self._works = backend, options, works
        self._start_s, self._deadline_s, self._admission = start_s, deadline_s, admission
        self._results: dict[str, WorkResult] = {}
        self._notes: list[str] = []
        shared = [load for work, load in zip(works, loads, strict=True) if not work.own_lane]
        self._shares: Mapping[str, float] = _shares(backend, shared)
        shared_lanes = backend.lanes(shared, options) if shared else ()
        self._lanes = (*shared_lanes, *_own_lanes(backend, works, options))
        self._queue = StepQueue(
            [Entry(work=work, load=load) for work, load in zip(works, loads, strict=True)],
            threads=backend.threads,
            num_lanes=len(shared_lanes),
            clock=time.perf_counter,
            on_end=self._note_end,
            in_order=backend.in_order,
            deterministic=options.deterministic,
            deadline_s=None if deadline_s is None else start_s + deadline_s,
            admission=admission,
            quantum_s=backend.quantum_s,
        )
        self._rebalancing = threading.Lock()
        self._rebalance_s = backend.rebalance_s
        self._rebalanced_s, self._num_ended = start_s, 0
        self._moves_seen: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"lane {lane.name}", daemon=True)
            for lane in self._lanes
        ]

    def until_done(self, cancel: threading.Event) -> Execution:
        try:
            for thread in self._threads:
                thread.start()
            self._wait(cancel)
        except BaseException:
            # Ctrl-C among others: the current steps end, the lanes are left, then the exception goes on.
            self._stop()
            raise
        finally:
            # First: unfinished work holds tensors of lanes whose streams may not outlive `restore`.
            self._drop_unfinished()
            self._backend.restore()
        return Execution(
            results=dict(self._results),
            seconds=time.perf_counter() - self._start_s,
            notes=(*self._backend.notes(self._options), *self._notes, *self._admission.notes),
            spans=tuple(sorted((span for lane in self._lanes for span in lane.spans), key=lambda span: span.start_s)),
        )

    def _stop(self) -> None:
        """Cancel and wait. Ctrl-C often comes twice (`timeout` signals a process and its group): go on waiting."""
        cancelled = threading.Event()
        cancelled.set()
        for _ in range(MAX_INTERRUPTS):
            with contextlib.suppress(KeyboardInterrupt):
                self._wait(cancelled)
                return

    def _wait(self, cancel: threading.Event) -> None:
        """Wait for the lanes to end; once they have been told to, for no longer than STUCK_S."""
        give_up_s = None if self._deadline_s is None else self._start_s + self._deadline_s + STUCK_S
        while (running := [thread for thread in self._threads if thread.is_alive()]) and (
            give_up_s is None or time.perf_counter() < give_up_s
        ):
            if cancel.is_set() and not self._queue.cancelled:
                self._queue.cancel()
                for work in self._works:
                    if work.task not in self._results:
                        work.interrupt()
                give_up_s = time.perf_counter() + STUCK_S
            running[0].join(POLL_S)

    def _serve(self, lane: Lane) -> None:
        """Body of a lane's thread."""
        try:
            lane.open(self._start_s)
        except Exception as error:  # whatever it is, the tasks of this lane fail with it
            self._queue.lane_lost(lane, error)
            return
        try:
            while (grant := self._queue.take(lane)) is not None:
                self._serve_grant(lane, grant)
                if lane.lost:
                    self._queue.lane_lost(lane, LaneLostError(f"lane {lane.name} was lost: {lane.lost}"))
                    return
        finally:
            lane.close()
            # What a lane had is free only now.
            self._rebalance(at_once=True)

    def _serve_grant(self, lane: Lane, grant: Grant) -> None:
        started_s, done_before = time.perf_counter(), grant.work.examples_done
        error: BaseException | None = None
        try:
            lane.run(grant.work.task, lambda: self._advance(grant, lane), grant.width)
        except BaseException as failure:  # it must reach the task's report, whatever it is
            error = failure
            grant.work.abandon()
        self._queue.give_back(
            grant,
            seconds=time.perf_counter() - started_s,
            num_examples=grant.work.examples_done - done_before,
            error=error,
        )
        self._rebalance()

    def _rebalance(self, *, at_once: bool = False) -> None:
        """Let the backend see what is left: at once, if a task has ended, or if it has not looked for a while."""
        period_s = self._rebalance_s
        if period_s is None or not self._rebalancing.acquire(blocking=at_once):
            return
        try:
            now_s, num_ended = time.perf_counter(), len(self._results)
            if at_once or num_ended > self._num_ended or now_s >= self._rebalanced_s + period_s:
                self._rebalanced_s, self._num_ended = now_s, num_ended
                self._backend.rebalance(self._queue.remaining())
        except Exception as error:  # the steps of this lane must go on, whatever it is
            self._rebalance_s = None
            self._notes.append(f"lanes stay where they are: {one_line(error)}")
        finally:
            self._rebalancing.release()

    def _advance(self, grant: Grant, lane: Lane) -> None:
        work = grant.work
        if lane.moves != self._moves_seen.get(work.task, 0):
            self._moves_seen[work.task] = lane.moves
            work.moved()
        if grant.num_steps > 0:
            work.advance(grant.num_steps, lambda: self._queue.stopping)
        if work.finished or (grant.last and work.steps_done > 0):
            work.finish()

    def _note_end(self, work: Work, error: BaseException | None) -> None:
        outcome, text = TRAINED, ""
        if error is not None and work.own_lane and self._queue.cancelled:
            outcome, text = CANCELLED, "cancelled"  # in the middle of a step that waited
        elif error is not None:
            outcome, text = FAILED, one_line(error)
        elif not work.finished:
            reason = f"deadline of {self._deadline_s:g} s"
            if work.steps_done == 0:
                outcome, text = CANCELLED, f"{reason} passed before the first step"
            else:
                self._notes.append(f"{work.task}: {reason} cut it to {work.examples_done} of {work.num_examples}")
        self._set_result(work, outcome, text)

    def _drop_unfinished(self) -> None:
        for work in self._works:
            if work.task in self._results:
                continue
            if work.task in self._queue.running_tasks():
                self._set_result(work, FAILED, f"a step has not returned within {STUCK_S:g} s of the order to stop")
            else:
                work.abandon()
                self._set_result(work, CANCELLED, "cancelled")

    def _set_result(self, work: Work, outcome: str, error: str) -> None:
        self._notes.extend(f"{work.task}: {note}" for note in work.notes)
        self._results[work.task] = WorkResult(
            task=work.task,
            outcome=outcome,
            seconds=time.perf_counter() - self._start_s,
            share=self._shares.get(work.task),
            error=error,
        )


def _shares(backend: PartitionBackend, loads: Sequence[TaskLoad]) -> Mapping[str, float]:
    """The share of each task that runs in the backend's lanes."""
    if backend.in_order or not loads:
        return {load.task: 1.0 for load in loads}
    return equal_finish(loads, minimum_share=backend.minimum_share).shares


def _own_lanes(backend: PartitionBackend, works: Sequence[Work], options: LaneOptions) -> tuple[Lane, ...]:
    """A lane for each work that mostly waits: one core wide, since cores are not counted for it, all of them alone."""
    width = backend.device.num_cores if len(works) == 1 and not options.deterministic else 1
    return tuple(own_lane(backend.device, work.task, width, options) for work in works if work.own_lane)
