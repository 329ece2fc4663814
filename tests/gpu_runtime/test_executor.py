"""Several tasks at once: failures stay with their task, time limits hold, nothing is left behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from runtime_fakes import FakeWork

from gpu_runtime import executor as executor_module
from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import CANCELLED, FAILED, TRAINED
from gpu_runtime.device import Device
from gpu_runtime.executor import Execution, Executor
from gpu_runtime.lanes import CpuBackend, Lane, LaneOptions, PartitionBackend, SequentialBackend
from gpu_runtime.lanes.own import own_lane
from gpu_runtime.lanes.processes import ProcessBackend
from gpu_runtime.work import one_line


def cpu(cores: int) -> Device:
    return Device(name="test", kind="cpu", num_cores=cores)


def loads_of(works: Sequence[FakeWork]) -> list[TaskLoad]:
    return [TaskLoad(task=work.task, num_examples=work.num_examples, solo_cost_s=1e-3) for work in works]


def run(
    *works: FakeWork,
    cores: int = 2,
    backend: type[PartitionBackend] = CpuBackend,
    options: LaneOptions = LaneOptions(trace=True),  # noqa: B008
    deadline_s: float | None = None,
    cancel: threading.Event | None = None,
) -> Execution:
    executor = Executor(backend(cpu(cores)), options)
    return executor.run(works, loads_of(works), deadline_s=deadline_s, cancel=cancel)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    threads, width = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert set(threading.enumerate()) <= threads
    assert torch.get_num_threads() == width
    seen: list[int] = []
    newcomer = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert seen == [width]


def failing_at(step: int, error: BaseException) -> Callable[[int], None]:
    def during(number: int) -> None:
        if number == step:
            raise error

    return during


@pytest.mark.parametrize("backend", [CpuBackend, SequentialBackend])
@pytest.mark.parametrize("mode", ["competitive", "exclusive"])
@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_work_is_done_once(backend: type[PartitionBackend], mode: str, cores: int, count: int) -> None:
    works = [FakeWork(f"t{index}", num_examples=10 * index + 5, batch_size=4) for index in range(count)]
    execution = run(*works, cores=cores, backend=backend, options=LaneOptions(mode=mode))
    assert {task: result.outcome for task, result in execution.results.items()} == {w.task: TRAINED for w in works}
    assert [work.examples_done for work in works] == [work.num_examples for work in works]
    assert [work.ended for work in works] == ["finished"] * count
    assert [work.overlaps for work in works] == [[]] * count
    assert execution.spans == ()


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("boom\nmore"), MemoryError(), SystemExit(3)])
def test_a_task_that_raises_fails_alone(step: int, error: BaseException) -> None:
    bad, good = FakeWork("bad", during=failing_at(step, error)), FakeWork("good")
    results = run(bad, good).results
    assert results["bad"].outcome == FAILED
    assert results["bad"].error == one_line(error)
    assert bad.ended == "abandoned"
    assert results["good"].outcome == TRAINED


def test_errors_are_told_in_one_line() -> None:
    assert one_line(RuntimeError("boom\nmore")) == "RuntimeError: boom"
    assert one_line(MemoryError()) == "MemoryError"
    assert len(one_line(ValueError("x" * 1000))) == 300


def test_failing_while_finishing_is_a_failure() -> None:
    class Late(FakeWork):
        def finish(self) -> None:
            raise ValueError("weights are not finite")

    results = run(Late("late"), FakeWork("good")).results
    assert results["late"].error == "ValueError: weights are not finite"
    assert results["good"].outcome == TRAINED


def test_two_tasks_overlap_in_time() -> None:
    meeting = threading.Barrier(2)
    works = [FakeWork(name, during=lambda number: number == 5 and meeting.wait(20)) for name in ("a", "b")]
    spans = run(*works, cores=2).spans
    assert {span.lane for span in spans} == {"core-0", "core-1"}
    assert any(
        one.task != other.task and one.start_s < other.end_s and other.start_s < one.end_s
        for one in spans
        for other in spans
    )


def test_spans_of_a_lane_do_not_overlap_and_count_from_the_start() -> None:
    execution = run(*(FakeWork(f"t{index}", num_examples=30) for index in range(4)))
    for name in {span.lane for span in execution.spans}:
        mine = [span for span in execution.spans if span.lane == name]
        assert all(before.end_s <= after.start_s for before, after in pairwise(mine))
    assert all(0 <= span.start_s <= span.end_s <= execution.seconds for span in execution.spans)


def test_work_past_the_deadline_stops_after_its_step_and_keeps_what_it_did() -> None:
    slow = FakeWork("slow", num_examples=100_000, during=lambda number: time.sleep(0.005))
    execution = run(slow, FakeWork("quick"), deadline_s=0.1)
    assert execution.results["slow"].outcome == TRAINED
    assert 0 < slow.examples_done < 100_000
    assert slow.ended == "finished"
    assert execution.notes == (f"slow: deadline of 0.1 s cut it to {slow.examples_done} of 100000",)
    assert execution.results["quick"].outcome == TRAINED


def test_work_that_never_began_before_the_deadline_is_cancelled() -> None:
    first = FakeWork("first", num_examples=100_000, during=lambda number: time.sleep(0.005))
    execution = run(first, FakeWork("second"), backend=SequentialBackend, deadline_s=0.05)
    assert execution.results["first"].outcome == TRAINED
    assert execution.results["second"].outcome == CANCELLED
    assert execution.results["second"].error == "deadline of 0.05 s passed before the first step"


def test_cancelling_drops_what_is_not_done() -> None:
    cancel = threading.Event()
    quick = FakeWork("quick", num_examples=1)
    endless = FakeWork("endless", num_examples=10**9, during=lambda number: quick.ended and cancel.set())
    results = run(quick, endless, cancel=cancel).results
    assert results["quick"].outcome == TRAINED
    assert results["endless"].outcome == CANCELLED
    assert endless.ended == "abandoned"


def test_ctrl_c_stops_the_lanes_and_goes_on() -> None:
    def interrupt(number: int) -> None:
        if number in (3, 30):
            signal.raise_signal(signal.SIGINT)

    works = [FakeWork("a", num_examples=10**9, during=interrupt), FakeWork("b", num_examples=10**9)]
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(*works)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [work.ended for work in works] == ["abandoned", "abandoned"]


def test_a_step_that_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "STUCK_S", 0.5)
    release = threading.Event()
    stuck = FakeWork("stuck", during=lambda number: release.wait(30) and None)
    try:
        results = run(stuck, FakeWork("good"), deadline_s=0.5).results
    finally:
        release.set()
    assert results["stuck"].outcome == FAILED
    assert "has not returned" in results["stuck"].error
    assert results["good"].outcome == TRAINED
    for thread in threading.enumerate():
        if thread.name.startswith("lane"):
            thread.join(10)


def test_a_backend_whose_lanes_do_not_open_fails_every_task() -> None:
    class Broken(CpuBackend):
        def lanes(self, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[Lane, ...]:
            lanes = super().lanes(loads, options)
            for lane in lanes:
                lane.open = lambda origin_s: 1 / 0  # type: ignore[assignment, return-value, method-assign]
            return lanes

    results = run(FakeWork("a"), FakeWork("b"), backend=Broken).results
    assert {result.outcome for result in results.values()} == {FAILED}
    assert results["a"].error == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("mode", ["competitive", "exclusive"])
@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_intra_op_threads_never_exceed_the_cores(mode: str, cores: int) -> None:
    lock = threading.Lock()
    in_use: dict[str, int] = {}
    most = 0

    def during(task: str) -> Callable[[int], None]:
        def step(number: int) -> None:
            nonlocal most
            with lock:
                in_use[task] = torch.get_num_threads()
                most = max(most, sum(in_use.values()))
            time.sleep(0.001)
            with lock:
                del in_use[task]

        return step

    works = [FakeWork(f"t{index}", num_examples=8 * (index + 1), during=during(f"t{index}")) for index in range(3)]
    run(*works, cores=cores, options=LaneOptions(mode=mode))
    assert most <= cores
    if mode == "competitive":
        # The longest task is left alone in the end, with all the cores.
        assert most == cores


def test_deterministic_lanes_have_one_thread() -> None:
    widths: set[int] = set()
    works = [FakeWork(name, during=lambda number: widths.add(torch.get_num_threads())) for name in ("a", "b")]
    for backend in (CpuBackend, SequentialBackend):
        for mode in ("competitive", "exclusive"):
            run(*works, cores=4, backend=backend, options=LaneOptions(mode=mode, deterministic=True))
    assert widths == {1}


class OwnLane(FakeWork):
    own_lane = True


def waiting_for(event: threading.Event) -> Callable[[int], None]:
    return lambda number: event.wait(20) and None


@pytest.mark.parametrize("backend", [CpuBackend, SequentialBackend, ProcessBackend])
@pytest.mark.parametrize("mode", ["competitive", "exclusive"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_work_that_waits_has_a_lane_of_its_own(backend: type[PartitionBackend], mode: str, count: int) -> None:
    """It waits until all others are done, which therefore nothing keeps from running."""
    others_done = threading.Event()
    others = [FakeWork(f"t{index}") for index in range(count)]
    left = {work.task for work in others}

    def note(task: str) -> Callable[[int], None]:
        def during(number: int) -> None:
            if number == 10:
                left.discard(task)
            if not left:
                others_done.set()

        return during

    for work in others:
        work.during = note(work.task)
    if not others:
        others_done.set()
    waiting = [OwnLane(name, num_examples=3, during=waiting_for(others_done)) for name in ("w1", "w2")]
    works = [waiting[0], *others, waiting[1]]
    execution = run(*works, cores=1, backend=backend, options=LaneOptions(mode=mode, trace=True))
    assert [execution.results[work.task].outcome for work in works] == [TRAINED] * len(works)
    assert [work.ended for work in works] == ["finished"] * len(works)
    assert [work.overlaps for work in works] == [[]] * len(works)
    lanes = {task: {span.lane for span in execution.spans if span.task == task} for task in ("w1", "w2")}
    assert lanes == {"w1": {"own-w1"}, "w2": {"own-w2"}}
    assert execution.results["w1"].share is None
    assert not any(span.lane.startswith("own") for span in execution.spans if span.task.startswith("t"))


def test_work_that_waits_takes_no_threads_from_the_others() -> None:
    widths: dict[str, set[int]] = {"waits": set(), "t": set()}

    def note(task: str) -> Callable[[int], None]:
        return lambda number: widths[task].add(torch.get_num_threads())

    run(OwnLane("waits", during=note("waits")), FakeWork("t", during=note("t")), cores=3)
    assert widths["waits"] == {1}
    assert 3 in widths["t"]
    widths["waits"].clear()
    run(OwnLane("waits", during=note("waits")), cores=3)
    assert widths["waits"] == {3}
    widths["waits"].clear()
    run(OwnLane("waits", during=note("waits")), cores=3, options=LaneOptions(deterministic=True))
    assert widths["waits"] == {1}


def test_work_with_a_lane_of_its_own_fails_alone_and_stops_at_the_deadline() -> None:
    bad = OwnLane("bad", during=failing_at(2, RuntimeError("cut")))
    slow = OwnLane("slow", num_examples=100_000, during=lambda number: time.sleep(0.005))
    execution = run(bad, slow, FakeWork("good"), deadline_s=0.1)
    assert execution.results["bad"].error == "RuntimeError: cut"
    assert execution.results["good"].outcome == TRAINED
    assert slow.ended == "finished"
    assert execution.notes == (f"slow: deadline of 0.1 s cut it to {slow.examples_done} of 100000",)


@pytest.mark.parametrize("beside", [False, True])
def test_cancelling_interrupts_a_step_that_waits(beside: bool) -> None:
    cancel, interrupted = threading.Event(), threading.Event()

    class Waiting(OwnLane):
        def interrupt(self) -> None:
            interrupted.set()

    def during(number: int) -> None:
        cancel.set()
        assert interrupted.wait(20)
        raise RuntimeError("the channel is closed")

    waiting = Waiting("waiting", during=during)
    others = [FakeWork("good", num_examples=1)] if beside else []
    results = run(waiting, *others, cancel=cancel).results
    assert (results["waiting"].outcome, results["waiting"].error) == (CANCELLED, "cancelled")
    assert waiting.ended == "abandoned"


def test_an_own_lane_that_does_not_open_fails_its_task_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Lane:
        lane = own_lane(*arguments)  # type: ignore[arg-type]
        lane.open = lambda origin_s: 1 / 0  # type: ignore[assignment, return-value, method-assign]
        return lane

    monkeypatch.setattr(executor_module, "own_lane", broken)
    results = run(OwnLane("waits"), FakeWork("a"), FakeWork("b")).results
    assert results["waits"].error == "ZeroDivisionError: division by zero"
    assert [results[task].outcome for task in ("a", "b")] == [TRAINED, TRAINED]


def test_nothing_to_do() -> None:
    assert run().results == {}
