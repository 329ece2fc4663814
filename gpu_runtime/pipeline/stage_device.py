"""One device for many split sessions: their work in the lanes of a backend, the session furthest behind first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.device import CUDA, Device
from gpu_runtime.lanes import AUTO, choose
from gpu_runtime.lanes.base import Lane, LaneOptions, PartitionBackend
from gpu_runtime.pipeline.session import SplitError

# Streams that sessions share on CUDA: each waits for the host now and then, and the others fill its gaps.
NUM_STREAMS = 4
WIDTH_TRIALS, RETRY_WIDTH_EVERY, RATE_SMOOTHING = 3, 100, 0.5

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Done(Generic[T]):
    """What some work returned, and the seconds it took in its lane."""

    result: T
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """Some work, what it is to become, and how far its session had come before it (0..1)."""

    work: Callable[[], Any]
    future: Future[Any]
    progress: float
    steady: bool


class _Width:
    """How many cores the steady work of a lone session takes: all or one, whichever was faster.

    All cores are not always faster: small stages, or a neighbour that preempts one of the threads, for which the others
    wait. Both are tried, and the slower one again now and then.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._tried: dict[int, int] = {}
        self._rates: dict[int, float] = {}
        self._num_done = 0

    def next(self) -> int:
        for width in (self._cores, 1):
            if self._tried.get(width, 0) < WIDTH_TRIALS:
                return width
        if self._num_done % RETRY_WIDTH_EVERY == 0:
            return self._cores if self.best == 1 else 1
        return self.best

    @property
    def best(self) -> int:
        """As far as is known."""
        return min(self._rates, key=lambda width: self._rates[width], default=self._cores)

    def note(self, width: int, seconds: float) -> None:
        self._num_done += 1
        self._tried[width] = self._tried.get(width, 0) + 1
        if self._tried[width] > 1:  # the first one pays for its threads
            known = self._rates.get(width, seconds)
            self._rates[width] = known + RATE_SMOOTHING * (seconds - known)


@dataclass(kw_only=True, eq=False)
class _Member:
    """One session: its work in order, the lane it must stay in (CUDA), seconds served."""

    jobs: deque[_Job] = field(default_factory=deque)
    home: int | None = None
    served_s: float = 0.0
    running: bool = False
    width: _Width


class StageDevice:
    """Runs the work of sessions, each session's in the order given and never two at once.

    On the CPU there is a lane for each core. A lone session gets all cores where that is faster (`_Width`), always in
    the first lane: a thread that has once computed on all cores keeps its OpenMP team (`gpu_runtime.apart`), so there
    is one such thread and no more.
    With several sessions every lane computes on one core and takes work of the session that is furthest behind, as part
    of its own round: so they finish together. Of those equally far, the least served goes first. On CUDA a
    session stays in one of a few streams, so that its tensors never pass between streams.

    Lanes start with the first work and end with `close`. A lane sets the number of threads with which later threads of
    the process start; what computes elsewhere in the process sets its own (as all lanes do).

    Args:
        device: what to share.
        backend: makes the lanes; by default that of competitive sharing.
        deterministic: every session computes on one core, also a lone one.
    """

    def __init__(self, device: Device, backend: PartitionBackend | None = None, *, deterministic: bool = False) -> None:
        self.device = device
        backend = backend or choose(AUTO, "competitive", device)
        self._sticky = device.kind == CUDA
        self._cores = 1 if self._sticky else device.num_cores
        self._wide = not deterministic and not self._sticky
        count = NUM_STREAMS if self._sticky else self._cores
        loads = [TaskLoad(task=f"stage-{index}", num_examples=1, solo_cost_s=1e-3) for index in range(count)]
        self._lanes = backend.lanes(loads, LaneOptions(deterministic=deterministic))
        self._members: dict[object, _Member] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._widths = [0] * len(self._lanes)
        self._closed = ""

    def join(self, key: object) -> None:
        """A session `key` begins. It starts with the least served of the others: it has no claim on the past."""
        with self._changed:
            if key in self._members:
                raise ValueError(f"session {key!r} is there already")
            member = _Member(
                served_s=min((each.served_s for each in self._members.values()), default=0.0),
                width=_Width(self._cores if self._wide else 1),
            )
            if self._sticky:
                taken = [each.home for each in self._members.values()]
                member.home = min(range(len(self._lanes)), key=taken.count)
            self._members[key] = member
            if not self._threads and not self._closed:
                self._start()

    def leave(self, key: object) -> None:
        """A session ends once what it has posted is done; harmless if it has ended."""
        self.post(key, lambda: None, last=True)

    def post(
        self, key: object, work: Callable[[], T], *, progress: float = 0.0, steady: bool = False, last: bool = False
    ) -> Future[Done[T]]:
        """Queue `work` of a session `key` that has come to `progress` (0..1); the future holds what became of it.

        Work that is `steady` is much like the session's other such work.

        A session that is not there, or a device that is closed, gives a future that holds a SplitError.
        """
        future: Future[Done[T]] = Future()
        with self._changed:
            member = self._members.get(key)
            if member is None or self._closed:
                future.set_exception(SplitError(self._closed or "the session has ended"))
                return future
            member.jobs.append(_Job(work=work, future=future, progress=progress, steady=steady))
            if last:
                future.add_done_callback(lambda _: self._forget(key))
            self._changed.notify_all()
        return future

    def run(self, key: object, work: Callable[[], T], *, progress: float = 0.0, steady: bool = False) -> Done[T]:
        """What `work` of session `key` returns or raises, once its turn has come and gone.

        Raises:
            SplitError: the session has ended, or the device is closed.
        """
        return self.post(key, work, progress=progress, steady=steady).result()

    def close(self) -> None:
        """Wait for what runs, drop what waits, end the lanes."""
        self._shut("the split service is closing")
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------------------------------------------ internals

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._serve, args=(index, lane), name=f"stage {lane.name}", daemon=True)
            for index, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, index: int, lane: Lane) -> None:
        """Body of a lane's thread."""
        try:
            lane.open(time.perf_counter())
        except Exception as error:  # without its lanes the device can serve nobody
            self._shut(f"lane {lane.name} of the split service cannot work: {error}")
            return
        try:
            while (taken := self._take(index)) is not None:
                member, job, width = taken
                self._do(index, lane, member, job, width)
                del taken, member, job  # a lane that waits must not keep a session's tensors
                if lane.lost:
                    self._shut(f"lane {lane.name} of the split service was lost: {lane.lost}")
                    return
        finally:
            lane.close()

    def _do(self, index: int, lane: Lane, member: _Member, job: _Job, width: int) -> None:
        results: list[Any] = []
        error: BaseException | None = None
        started_s = time.perf_counter()
        try:
            lane.run(lane.name, lambda: results.append(job.work()), width)
        except BaseException as failure:  # it must reach the caller, whatever it is
            error = failure
        seconds = time.perf_counter() - started_s
        with self._changed:
            member.running, self._widths[index] = False, 0
            member.served_s += seconds * width
            if job.steady:
                member.width.note(width, seconds)
            self._changed.notify_all()
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(Done(result=results[0], seconds=seconds))

    def _take(self, index: int) -> tuple[_Member, _Job, int] | None:
        with self._changed:
            while not self._closed:
                ready = [
                    each
                    for each in self._members.values()
                    if each.jobs and not each.running and each.home in (None, index)
                ]
                if ready:
                    member = min(ready, key=lambda each: (each.jobs[0].progress, each.served_s))
                    job = member.jobs[0]
                    lone = len(self._members) == 1
                    width = (member.width.next() if job.steady else member.width.best) if lone else 1
                    fits = self._sticky or sum(self._widths) + width <= self._cores
                    if fits and (index == 0 or width == 1):
                        member.jobs.popleft()
                        member.running, self._widths[index] = True, width
                        return member, job, width
                self._changed.wait()
            return None

    def _forget(self, key: object) -> None:
        with self._changed:
            member = self._members.pop(key, None)
            self._changed.notify_all()
        for job in member.jobs if member is not None else ():
            job.future.set_exception(SplitError("the session has ended"))

    def _shut(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            dropped = [job.future for member in self._members.values() for job in member.jobs]
            self._members.clear()
            self._changed.notify_all()
        for future in dropped:
            future.set_exception(SplitError(reason))
