"""Who may start: the planner's laws, and what the executor makes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import FakeWork

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import CANCELLED, FAILED, TRAINED
from gpu_runtime.device import Device
from gpu_runtime.executor import Execution, Executor
from gpu_runtime.lanes import CpuBackend, LaneOptions, PartitionBackend, SequentialBackend
from gpu_runtime.memory import HEADROOM_FRACTION, Admission, as_text

GIB = 2**30


def admission(free: int | None, at_once: int | None = None, **peaks: int) -> Admission:
    return Admission(peaks, lambda: free, at_once=at_once)


def names(admitted: tuple[object, ...]) -> list[str]:
    return [each.task for each in admitted]  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------- by hand


def test_tasks_that_fit_together_start_together() -> None:
    planner = admission(10 * GIB, a=4 * GIB, b=5 * GIB, c=1 * GIB)
    # 4 + 5 leave 1 GiB, which is kept back.
    assert names(planner.admit(["a", "b", "c"])) == ["a", "b"]
    assert planner.admit(["c"]) == ()
    planner.release("a")
    assert names(planner.admit(["c"])) == ["c"]
    assert planner.notes == ("c: waited for memory beside a, b: needs 1.0 GiB, 10.0 GiB were free",)


def test_one_that_does_not_fit_now_does_not_hold_up_those_that_do() -> None:
    planner = admission(10 * GIB, a=8 * GIB, b=9 * GIB, c=1 * GIB)
    assert names(planner.admit(["a", "b", "c"])) == ["a", "c"]


def test_alone_a_task_may_have_everything() -> None:
    planner = admission(10 * GIB, a=10 * GIB, b=1)
    assert names(planner.admit(["a", "b"])) == ["a"]
    planner.release("a")
    assert names(planner.admit(["b"])) == ["b"]


def test_unknown_peaks_and_unknown_free_memory_are_admitted() -> None:
    assert names(admission(None, a=GIB, b=GIB).admit(["a", "b"])) == ["a", "b"]
    assert names(admission(GIB, a=GIB, b=0, c=0).admit(["a", "b", "c"])) == ["a", "b", "c"]


def test_free_memory_is_not_read_when_it_cannot_matter() -> None:
    def unreadable() -> int:
        raise AssertionError

    assert names(Admission({"a": 0}, unreadable).admit(["a"])) == ["a"]


def test_a_task_too_large_even_alone_is_told_how_much_of_its_memory_it_can_have() -> None:
    planner = admission(3 * GIB, a=12 * GIB, b=4 * GIB)
    (first,) = planner.admit(["a", "b"])
    assert (first.task, first.fraction, first.need) == ("a", 0.25, "needs 12.0 GiB, 3.0 GiB are free")
    assert planner.admit(["b"]) == ()
    planner.release("a")
    (second,) = planner.admit(["b"])
    assert (second.task, second.fraction) == ("b", 0.75)


def test_what_others_take_meanwhile_counts() -> None:
    free = [10 * GIB]
    planner = Admission({"a": 2 * GIB, "b": 3 * GIB, "c": 4 * GIB}, lambda: free[0])
    assert names(planner.admit(["a", "b"])) == ["a", "b"]
    # Someone else took nearly all of it: 10 - 5 GiB would have been left by these two.
    free[0] = 2 * GIB
    assert planner.admit(["c"]) == ()
    # They let it go, and more: even if a and b have yet to take theirs, 20 - 5 GiB are left.
    free[0] = 20 * GIB
    assert names(planner.admit(["c"])) == ["c"]


def test_one_at_a_time_holds_one_tasks_memory() -> None:
    planner = admission(10 * GIB, at_once=1, a=8 * GIB, b=8 * GIB)
    assert names(planner.admit(["a"])) == ["a"]
    assert planner.admit(["b"]) == ()
    planner.release("a")
    assert names(planner.admit(["b"])) == ["b"]
    assert planner.notes == ()


def test_bytes_for_people() -> None:
    assert [as_text(each) for each in (0, 1023, 1536, 5 * 2**20, 1.5 * GIB)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "1.5 GiB",
    ]


# -------------------------------------------------------------------------------------------------------- properties


@given(
    peaks=st.lists(st.integers(0, 100), min_size=1, max_size=7),
    free=st.integers(0, 120),
    ending=st.randoms(use_true_random=False),
)
def test_every_task_starts_once_and_no_two_exceed_what_is_free(peaks: list[int], free: int, ending: object) -> None:
    needs = {f"t{index}": peak for index, peak in enumerate(peaks)}
    taken: dict[str, int] = {}  # what running tasks have really taken so far, up to their peaks
    planner = Admission(needs, lambda: free - sum(taken.values()))
    waiting, running, started = list(needs), [], []
    while waiting or running:
        for admitted in planner.admit(waiting):
            if needs[admitted.task] <= free:
                assert admitted.fraction == 1.0, "refused though it fits alone"
            else:
                assert not [task for task in running if needs[task]], "too large, and not alone"
                assert 0 <= admitted.fraction < 1
            running.append(admitted.task)
            started.append(admitted.task)
            waiting.remove(admitted.task)
        assert running, "nothing runs and nothing was admitted"
        known = [needs[task] for task in running if needs[task]]
        assert len(known) < 2 or sum(known) <= free
        # None waits that would fit, with the headroom, beside those that run.
        if sum(known) <= free:
            assert all(needs[task] + sum(known) > (1 - HEADROOM_FRACTION) * free - 1e-9 for task in waiting)
        for task in running:
            taken[task] = min(free, ending.randint(0, needs[task]))  # type: ignore[attr-defined]
        done = running.pop(ending.randrange(len(running)))  # type: ignore[attr-defined]
        taken.pop(done)
        planner.release(done)
    assert sorted(started) == sorted(needs)


# ----------------------------------------------------------------------------------------------------- in the executor


class Shrinking(FakeWork):
    """Can do with any part of its memory above `least`."""

    least = 0.2
    shrunk: tuple[float, str] | None = None

    def shrink(self, fraction: float, need: str) -> bool:
        self.shrunk = (fraction, need)
        return fraction >= self.least

    @property
    def notes(self) -> tuple[str, ...]:
        return ("did with less",) if self.shrunk else ()


def run(
    *works: FakeWork,
    peaks: dict[str, int],
    free: int,
    cores: int = 2,
    backend: type[PartitionBackend] = CpuBackend,
    deadline_s: float | None = None,
) -> Execution:
    device = Device(name="test", kind="cpu", num_cores=cores)
    loads = [
        TaskLoad(
            task=work.task,
            num_examples=work.num_examples,
            solo_cost_s=1e-3,
            peak_memory_bytes=peaks.get(work.task, 0),
        )
        for work in works
    ]
    executor = Executor(backend(device), LaneOptions(), read_free=lambda device: free)
    return executor.run(works, loads, deadline_s=deadline_s)


def recorded() -> tuple[list[str], Callable[[str], Callable[[int], None]]]:
    order: list[str] = []
    lock = threading.Lock()

    def of(task: str) -> Callable[[int], None]:
        def during(number: int) -> None:
            with lock:
                order.append(task)

        return during

    return order, of


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_a_task_that_does_not_fit_takes_no_step_until_another_has_ended(cores: int) -> None:
    order, of = recorded()
    works = [FakeWork("small", num_examples=20), FakeWork("large", num_examples=40)]
    for work in works:
        work.during = of(work.task)
    execution = run(*works, peaks={"small": 6, "large": 6}, free=10, cores=cores)
    # The longer one first.
    assert order == ["large"] * 40 + ["small"] * 20
    assert {result.outcome for result in execution.results.values()} == {TRAINED}
    assert execution.notes == ("small: waited for memory beside large: needs 6 bytes, 10 bytes were free",)


def test_a_task_that_waits_starts_when_one_fails() -> None:
    def fail(number: int) -> None:
        raise ValueError("boom")

    results = run(
        FakeWork("bad", num_examples=20, during=fail), FakeWork("good"), peaks={"bad": 9, "good": 9}, free=10
    ).results
    assert (results["bad"].outcome, results["good"].outcome) == (FAILED, TRAINED)


def test_a_task_that_cannot_fit_fails_and_the_others_go_on() -> None:
    huge, small, good = Shrinking("huge"), Shrinking("small"), FakeWork("good")
    execution = run(huge, small, good, peaks={"huge": 100, "small": 20, "good": 8}, free=10)
    assert execution.results["huge"].outcome == FAILED
    assert execution.results["huge"].error == (
        "MemoryNeedError: needs 100 bytes, 10 bytes are free, too few even for one example at a time"
    )
    assert huge.ended == "abandoned"
    assert huge.steps_done == 0
    assert small.shrunk == (0.5, "needs 20 bytes, 10 bytes are free")
    assert execution.results["small"].outcome == execution.results["good"].outcome == TRAINED
    assert "small: did with less" in execution.notes


def test_when_nothing_fits_everything_fails() -> None:
    results = run(FakeWork("a"), FakeWork("b"), peaks={"a": 20, "b": 30}, free=10).results
    assert {result.outcome for result in results.values()} == {FAILED}


def test_one_after_another_each_has_the_whole_memory() -> None:
    order, of = recorded()
    works = [FakeWork(name, during=of(name), num_examples=5) for name in ("a", "b", "c")]
    execution = run(*works, peaks={"a": 6, "b": 10, "c": 6}, free=10, backend=SequentialBackend)
    assert order == ["a"] * 5 + ["b"] * 5 + ["c"] * 5
    assert execution.notes == ()


def test_work_that_waits_past_the_deadline_is_cancelled() -> None:
    running = threading.Event()
    slow = FakeWork("slow", num_examples=10**6, during=lambda number: running.wait(0.005) and None)
    execution = run(slow, FakeWork("waits"), peaks={"slow": 9, "waits": 9}, free=10, deadline_s=0.2)
    assert execution.results["waits"].outcome == CANCELLED
    assert execution.results["waits"].error == "deadline of 0.2 s passed before the first step"
    assert execution.results["slow"].outcome == TRAINED


def test_a_lone_admitted_task_gets_all_the_threads() -> None:
    widths: set[int] = set()
    alone = FakeWork("alone", num_examples=40, during=lambda number: widths.add(torch.get_num_threads()))
    run(alone, FakeWork("waits"), peaks={"alone": 9, "waits": 9}, free=10, cores=4)
    assert 4 in widths
