"""Ways to run the tasks of a mix inside this process, all with the same steps (`TaskTraining`)."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gpu_runtime.allocator import packed
from gpu_runtime.apart import apart
from gpu_runtime.bench.mixes import Share, Work, synchronize
from gpu_runtime.device import CPU, Device
from gpu_runtime.training import TaskTraining

# Threads that have not ended this long after their deadline are given up.
GRACE_S = 30.0


class VariantError(RuntimeError):
    """A variant that could not do the work; the text says why."""


class TooSlowError(VariantError):
    """A run that did nothing at all until its deadline."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a variant.

    `seconds` is its makespan, `finish_s` when each task ended. A run that was cut at its deadline has done only
    `done_fraction` of the work; `alone_s` is what each task took where tasks ran one after another; `backend` is
    what made the lanes, where there are some.
    """

    seconds: float
    finish_s: Mapping[str, float]
    done_fraction: float = 1.0
    alone_s: Mapping[str, float] = field(default_factory=dict)
    backend: str = ""

    def __post_init__(self) -> None:
        if self.done_fraction <= 0.0:
            raise TooSlowError(f"its first step had not ended after {self.seconds:.1f} s")

    @property
    def whole_s(self) -> float:
        """Seconds for the whole work; of a cut run, what it would have taken at the pace so far."""
        return self.seconds / self.done_fraction


class Variant(ABC):
    """A way to run several tasks on one device.

    Attributes:
        name: key in the results.
        patience: a run is cut when it takes this many times as long as the baseline; what it would have taken is told
            from its pace.
    """

    name: str
    patience: float = 4.0

    def unsuitable(self, work: Work) -> str:
        """Why this variant does not apply to `work`; empty where it does."""
        return ""

    def prepare(self, work: Work) -> None:  # noqa: B027 - most variants need nothing
        """Called once before the first run of a mix, outside all measured time."""

    @abstractmethod
    def run(self, work: Work, deadline_s: float) -> Run:
        """Do all of `work`, or as much as can be done in `deadline_s` seconds.

        Raises:
            VariantError: it failed.
        """

    def close(self) -> None:  # noqa: B027 - most variants hold nothing
        """Let go of what is kept between runs."""


def drive(training: TaskTraining, end_s: float) -> float:
    """Step until the work is done or `time.perf_counter()` reaches `end_s`; the fraction done."""
    while not training.finished:
        if time.perf_counter() >= end_s:
            training.abandon()
            return training.examples_done / training.num_examples
        training.step()
    training.finish()
    return 1.0


def done_fraction(work: Work, fractions: Mapping[str, float]) -> float:
    """How much of the whole work was done, each task weighted by its time on one thread."""
    total = sum(share.one_s for share in work.values())
    return sum(fractions.get(task, 0.0) * share.one_s for task, share in work.items()) / total


@contextmanager
def threads_kept() -> Iterator[None]:
    """Afterwards the process has the number of intra-op threads that it had before."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Sequential(Variant):
    """One task after another in a plain loop without any runtime, on `width` threads."""

    def __init__(self, name: str, device: Device, width: int) -> None:
        self.name, self._device, self._width = name, device, width

    def run(self, work: Work, deadline_s: float) -> Run:
        return apart(lambda: self._run(work, deadline_s))

    def _run(self, work: Work, deadline_s: float) -> Run:
        alone_s: dict[str, float] = {}
        finish_s: dict[str, float] = {}
        fractions: dict[str, float] = {}
        with threads_kept():
            if self._device.kind == CPU:
                torch.set_num_threads(self._width)
            synchronize(self._device)
            started = time.perf_counter()
            for task, share in work.items():
                began = time.perf_counter()
                fractions[task] = drive(share.training(self._device), started + deadline_s)
                synchronize(self._device)
                alone_s[task] = time.perf_counter() - began
                finish_s[task] = time.perf_counter() - started
            seconds = time.perf_counter() - started
        return Run(seconds=seconds, finish_s=finish_s, done_fraction=done_fraction(work, fractions), alone_s=alone_s)


Group = Callable[[Work], Sequence[Sequence[str]]]


def one_each(work: Work) -> list[list[str]]:
    """Every task in a group of its own."""
    return [[task] for task in work]


def packed_on(cores: int) -> Group:
    """At most `cores` groups of nearly equal one-thread time (longest processing time first)."""
    return lambda work: packed({task: share.one_s for task, share in work.items()}, cores)


class Threads(Variant):
    """One Python thread for each group of tasks, on CUDA with a stream of its own.

    Args:
        name: of the variant.
        device: where.
        groups: how tasks are put together; the tasks of a group run one after another.
        width: intra-op threads of each.
        pinned: the i-th thread runs on the i-th allowed core only, where the system can do that.
        patience: as in `Variant`.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        *,
        groups: Group,
        width: int,
        pinned: bool = False,
        patience: float = Variant.patience,
    ) -> None:
        self.name, self.patience = name, patience
        self._device, self._groups, self._width, self._pinned = device, groups, width, pinned

    def run(self, work: Work, deadline_s: float) -> Run:
        finish_s: dict[str, float] = {}
        fractions: dict[str, float] = {}
        errors: list[BaseException] = []
        groups = self._groups(work)
        started = [0.0]

        def note_start() -> None:
            started[0] = time.perf_counter()

        barrier = threading.Barrier(len(groups), action=note_start)

        def serve(index: int, tasks: Sequence[str]) -> None:
            try:
                with self._place(index):
                    barrier.wait(GRACE_S)
                    for task in tasks:
                        fractions[task] = self._train(work[task], started[0] + deadline_s)
                        finish_s[task] = time.perf_counter() - started[0]
            except BaseException as error:  # it must reach the caller, whatever it is
                barrier.abort()
                errors.append(error)

        with threads_kept():
            synchronize(self._device)
            threads = [
                threading.Thread(target=serve, args=(index, tasks), daemon=True) for index, tasks in enumerate(groups)
            ]
            for thread in threads:
                thread.start()
            give_up_s = time.perf_counter() + deadline_s + GRACE_S
            for thread in threads:
                thread.join(max(0.0, give_up_s - time.perf_counter()))
        if errors:
            raise VariantError(f"{type(errors[0]).__name__}: {errors[0]}") from errors[0]
        if any(thread.is_alive() for thread in threads):
            raise VariantError(f"a step has not returned {GRACE_S:g} s after the deadline")
        return Run(seconds=max(finish_s.values()), finish_s=finish_s, done_fraction=done_fraction(work, fractions))

    def _train(self, share: Share, end_s: float) -> float:
        if self._device.kind == CPU:
            return drive(share.training(self._device), end_s)
        stream = torch.cuda.Stream(self._device.torch_device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            done = drive(share.training(self._device), end_s)
        stream.synchronize()
        return done

    @contextmanager
    def _place(self, index: int) -> Iterator[None]:
        """Width and core of the calling thread."""
        if self._device.kind == CPU:
            # torch gives a thread the process-wide width at its first use of it: before its own is set.
            torch.get_num_threads()
            torch.set_num_threads(self._width)
        if not self._pinned or not hasattr(os, "sched_setaffinity"):
            yield
            return
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[index % len(allowed)]})
        try:
            yield
        finally:
            os.sched_setaffinity(0, allowed)
