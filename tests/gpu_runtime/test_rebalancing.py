"""Lanes that go elsewhere when a task ends or drifts: who moves, in which order, and that nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from cuda_fakes import FakeCuda, FakeDriver
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import FakeWork, Pictures
from test_graphs import CPU, ORIGIN, FakeCapture, first_weights, same, train

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import FAILED, TRAINED, TaskPlan
from gpu_runtime.device import Device
from gpu_runtime.executor import Execution, Executor
from gpu_runtime.lanes import CpuBackend, LaneOptions, PartitionBackend
from gpu_runtime.lanes.base import Remaining
from gpu_runtime.lanes.green import GreenBackend, GreenLane
from gpu_runtime.lanes.streams import CLEARLY_LONGER, StreamLane, StreamsBackend, priorities_by_length, reordered
from gpu_runtime.sm_partitions import dealt, grown
from gpu_runtime.training import TaskTraining

DEVICE = Device(name="test", kind="cuda", num_cores=132)
EXCLUSIVE, COMPETITIVE = LaneOptions(mode="exclusive"), LaneOptions(mode="competitive")


def load(task: str, num_examples: float = 10, share: float = 1.0) -> TaskLoad:
    return TaskLoad(task=task, num_examples=num_examples, solo_cost_s=1.0, maximum_share=share)


def left(*tasks: tuple[str, float], can_move: bool = True, share: float = 1.0) -> list[Remaining]:
    return [Remaining(load=load(task, seconds, share), left_s=seconds, can_move=can_move) for task, seconds in tasks]


# ----------------------------------------------------------------------------------------------------------- the order


def test_priorities_that_are_in_order_stay() -> None:
    # What counts is who comes first, not by how much: "a" has ended, and "b" is before "c" still.
    assert reordered({"b": -2, "c": 0}, {"b": 10.0, "c": 5.0}) == {}
    assert reordered({"b": -2, "c": 0}, {"b": 5.0, "c": 5.0 * CLEARLY_LONGER}) == {}
    assert reordered({"b": -2, "c": 0}, {"b": 5.0, "c": 10.0}) == {"b": 0, "c": -3}
    # With five tasks two share a level; one of the others has ended, and its level is free.
    assert reordered({"a": -1, "b": -1, "c": 0}, {"a": 20.0, "b": 10.0, "c": 5.0}) == {"a": -3, "b": -2}


@given(
    seconds=st.lists(st.tuples(st.floats(0.1, 100.0), st.sampled_from([-3, -2, -1, 0])), min_size=1, max_size=8),
)
def test_a_new_order_is_right_where_there_are_levels_enough(seconds: list[tuple[float, int]]) -> None:
    left_s = {f"t{index}": value for index, (value, _) in enumerate(seconds)}
    given_now = {f"t{index}": priority for index, (_, priority) in enumerate(seconds)}
    after = given_now | reordered(given_now, left_s)
    wrong = [(a, b) for a in left_s for b in left_s if left_s[a] > CLEARLY_LONGER * left_s[b] and after[a] >= after[b]]
    assert not wrong or len(left_s) > 4
    assert reordered(after, left_s) == {}


# ------------------------------------------------------------------------------------------------------------ streams


def test_a_lane_goes_to_another_stream_between_steps_and_after_all_it_has_started() -> None:
    cuda = FakeCuda()
    lane = StreamLane("s", DEVICE.torch_device, tasks=None, priority=0, options=LaneOptions(trace=True), cuda=cuda)
    lane.open(time.perf_counter())
    lane.run("a", lambda: lane.go_to(-3), 1)
    assert lane.moves == 0
    del cuda.calls[:]
    lane.run("a", lambda: cuda.calls.append("step"), 1)
    assert cuda.calls == ["synchronize stream", "stream priority -3", "step"]
    assert (lane.moves, lane.priority) == (1, -3)
    lane.run("a", lambda: None, 1)
    assert lane.moves == 1
    lane.close()
    assert [span.task for span in lane.spans] == ["a", "a", "a"]


def test_a_lane_that_cannot_get_another_stream_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    lane = StreamLane("s", DEVICE.torch_device, tasks=None, priority=0, options=LaneOptions(), cuda=cuda)
    lane.open(0.0)
    lane.go_to(-3)

    def refuse(device: torch.device, priority: int) -> Any:
        raise RuntimeError("no more streams")

    monkeypatch.setattr(cuda, "Stream", refuse)
    seen: list[str] = []
    for _ in range(3):
        lane.run("a", lambda: seen.append(cuda.current), 1)
    lane.close()
    assert seen == ["lane"] * 3
    assert lane.moves == 0
    assert lane.faults == ["s stays where it is: RuntimeError: no more streams"]


def streams(*tasks: str) -> tuple[StreamsBackend, dict[str, StreamLane]]:
    made = StreamsBackend(DEVICE, cuda=FakeCuda())
    lanes = made.lanes([load(task, 10.0 * number) for number, task in enumerate(tasks, 1)], COMPETITIVE)
    return made, {task: lane for task, lane in zip(tasks, lanes, strict=True) if isinstance(lane, StreamLane)}


def test_the_task_that_has_become_the_longest_gets_the_most_urgent_stream() -> None:
    made, lanes = streams("a", "b", "c")
    assert {task: lane.priority for task, lane in lanes.items()} == priorities_by_length({"a": 1, "b": 2, "c": 3})
    made.rebalance(left(("a", 9.0), ("b", 5.0)))
    assert (lanes["a"].priority, lanes["b"].priority) == (-3, 0)
    assert made.notes(COMPETITIVE) == ()  # nobody has gone anywhere yet


@pytest.mark.parametrize("what", [left(("a", 0.9), ("b", 0.1)), left(("a", 9.0), ("b", 5.0), can_move=False)])
def test_who_is_nearly_done_or_may_not_move_stays(what: list[Remaining]) -> None:
    made, lanes = streams("a", "b")
    before = {task: lane.priority for task, lane in lanes.items()}
    made.rebalance(what)
    assert {task: lane.priority for task, lane in lanes.items()} == before


class Moving(FakeWork):
    """Work that may move and knows when it was told to have done so."""

    can_move = True

    def __init__(self, task: str, num_examples: int, during: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(task=task, num_examples=num_examples, during=during)
        self.moved_after: list[int] = []

    def moved(self) -> None:
        self.moved_after.append(self.steps_done)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is worth moving, and drift is looked for all the time."""
    for module in ("streams", "green"):
        monkeypatch.setattr(f"gpu_runtime.lanes.{module}.WORTH_MOVING_S", 0.0)
    monkeypatch.setattr(StreamsBackend, "rebalance_s", 0.01)
    monkeypatch.setattr(GreenBackend, "rebalance_s", 0.01)


@pytest.mark.usefixtures("at_once")
def test_a_task_that_drifts_is_served_on_an_urgent_stream_and_told() -> None:
    slow = Moving("slow", 60, lambda number: time.sleep(0.01))
    quick = Moving("quick", 120, lambda number: time.sleep(0.001))
    made = StreamsBackend(DEVICE, cuda=FakeCuda())
    # By their profile "quick" has twice as much to do.
    execution = Executor(made, COMPETITIVE).run([slow, quick], [load("slow", 60), load("quick", 120)])
    assert {result.outcome for result in execution.results.values()} == {TRAINED}
    assert (slow.steps_done, quick.steps_done) == (60, 120)
    assert len(slow.moved_after) == 1
    assert 0 < slow.moved_after[0] < 60
    assert execution.notes[0].startswith("stream-slow went to a stream of another priority 1 times")


# -------------------------------------------------------------------------------------------------------------- green


@given(
    parts=st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 9), st.floats(0.1, 99.0)), min_size=1),
    num_free=st.integers(0, 20),
    most=st.integers(1, 30),
)
def test_units_are_dealt_to_the_longest(parts: dict[str, tuple[int, float]], num_free: int, most: int) -> None:
    units = {name: count for name, (count, _) in parts.items()}
    left_s = {name: seconds for name, (_, seconds) in parts.items()}
    extra = dealt(num_free, units, left_s, dict.fromkeys(parts, most))
    room = sum(max(0, most - count) for count in units.values())
    assert sum(extra.values()) == min(num_free, room)
    assert all(count >= 0 for count in extra.values())

    def ends_s(extra: dict[str, int]) -> float:
        return max(left_s[name] * units[name] / (units[name] + extra[name]) for name in parts)

    if most == 30:
        for giver in parts:
            for taker in parts:
                if giver != taker and extra[giver]:
                    other = extra | {giver: extra[giver] - 1, taker: extra[taker] + 1}
                    assert ends_s(extra) <= ends_s(other) * (1 + 1e-9)


def test_units_that_fewest_use_are_taken_first() -> None:
    assert grown((2, 3), 5, {0: 2, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1}) == (2, 3, 1, 4, 5)
    assert grown((2, 3), 1, {0: 0, 2: 1, 3: 1}) == (2, 3)


class Watched(FakeDriver):
    """Notes which SMs each lane is on whenever one of them has a new stream."""

    def sms(self, lane: GreenLane) -> frozenset[int]:
        return frozenset(sm for part in lane._parts for sm in part.handle)


def green(driver: FakeDriver, loads: Sequence[TaskLoad], options: LaneOptions) -> tuple[GreenBackend, list[GreenLane]]:
    made = GreenBackend(DEVICE, driver=driver, cuda=FakeCuda(calls=driver.calls))
    lanes = [lane for lane in made.lanes(loads, options) if isinstance(lane, GreenLane)]
    for lane in lanes:
        lane.open(0.0)
    return made, lanes


def stepped(*lanes: GreenLane) -> None:
    for lane in lanes:
        lane.run("any", lambda: None, 1)


def test_exclusive_lanes_take_over_what_closed_lanes_leave_and_stay_disjoint() -> None:
    driver = Watched()
    made, (a, b, c) = green(driver, [load("a"), load("b"), load("c", 20)], EXCLUSIVE)
    made.rebalance(left(("b", 8.0), ("c", 16.0)))
    stepped(b, c)
    assert (b.moves, c.moves) == (0, 0)  # "a" has ended, but its lane is open: it may still compute
    a.close()
    made.rebalance(left(("b", 14.0), ("c", 16.0)))
    made.rebalance(left(("b", 14.0), ("c", 16.0)))  # what is promised is not dealt twice
    stepped(b)
    assert not driver.sms(b) & driver.sms(c)
    stepped(c)
    # 4 units were free: "c" went from 8 to 11 (16 s to 11.6 s), "b" from 4 to 5 (14 s to 11.2 s).
    assert not driver.sms(b) & driver.sms(c)
    assert [len(driver.sms(lane)) for lane in (b, c)] == [5 * 8, 11 * 8]
    assert (b.moves, c.moves) == (1, 1)
    b.close()
    made.rebalance(left(("c", 8.0)))
    stepped(c)
    assert len(driver.sms(c)) == 132
    c.close()
    made.restore()
    assert not driver.contexts
    assert not driver.streams
    assert "c asked 66, got 64, then " in made.notes(EXCLUSIVE)[0]


def test_an_exclusive_lane_does_not_grow_beyond_the_share_of_the_plan() -> None:
    driver = Watched()
    made, (a, b) = green(driver, [load("a"), load("b", share=0.6)], EXCLUSIVE)
    a.close()
    made.rebalance(left(("b", 9.0), share=0.6))
    stepped(b)
    assert len(driver.sms(b)) <= 0.6 * 132
    b.close()
    made.restore()


def test_competitive_lanes_grow_to_what_their_shares_are_now_and_never_shrink() -> None:
    driver = Watched()
    made, (a, b, c) = green(driver, [load("a"), load("b"), load("c")], COMPETITIVE)
    before = {lane.name: driver.sms(lane) for lane in (a, b, c)}
    assert {len(sms) for sms in before.values()} == {48}
    a.close()
    made.rebalance(left(("b", 9.0), ("c", 9.0)))
    stepped(b, c)
    assert all(driver.sms(lane) > before[lane.name] for lane in (b, c))
    assert [len(driver.sms(lane)) for lane in (b, c)] == [64, 64]
    # "c" needs less now, and keeps what it has.
    made.rebalance(left(("b", 90.0), ("c", 2.0)))
    stepped(b, c)
    assert len(driver.sms(b)) > 64
    assert len(driver.sms(c)) == 64
    b.close()
    made.rebalance(left(("c", 2.0)))
    stepped(c)
    assert len(driver.sms(c)) == 132
    c.close()
    made.restore()
    assert not driver.contexts
    assert not driver.streams


@pytest.mark.parametrize("call", ["create_context", "context_sms", "create_stream"])
def test_a_lane_that_cannot_grow_goes_on_where_it_is(call: str) -> None:
    driver = FakeDriver(fail={call: 3})
    made, (a, b) = green(driver, [load("a"), load("b")], EXCLUSIVE)
    a.close()
    made.rebalance(left(("b", 9.0)))
    stepped(b, b)
    assert (b.moves, b.got_sms) == (0, [64])
    b.close()
    made.restore()
    assert not driver.contexts
    assert not driver.streams
    assert made.notes(EXCLUSIVE)[-1].startswith(f"green: sms-b stays where it is: CudaDriverError: {call} failed")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("options", [EXCLUSIVE, COMPETITIVE])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_leaves_serves_the_others(options: LaneOptions, fails: bool) -> None:
    def during(number: int) -> None:
        if fails:
            raise RuntimeError("injected")

    driver = FakeDriver()
    works = [Moving("short", 2, during), *(Moving(name, 60, lambda number: time.sleep(0.005)) for name in "ab")]
    made = GreenBackend(DEVICE, driver=driver, cuda=FakeCuda(calls=driver.calls))
    execution = Executor(made, options).run(works, [load("short", 50), load("a", 50), load("b", 50)])
    assert execution.results["short"].outcome == (FAILED if fails else TRAINED)
    assert all(execution.results[name].outcome == TRAINED for name in "ab")
    for work in works[1:]:
        assert work.moved_after
        assert work.moved_after == sorted(set(work.moved_after))
        assert work.overlaps == []
    assert ", then " in execution.notes[0]
    assert not driver.contexts
    assert not driver.streams


# ------------------------------------------------------------------------------------------------------- the executor


class Broken(CpuBackend):
    rebalance_s = 0.0

    def rebalance(self, left: Sequence[Remaining]) -> None:
        raise RuntimeError("no idea")


class Looking(CpuBackend):
    """Keeps what it was told, and whether two threads told it at once."""

    rebalance_s = 1e9

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.told: list[list[str]] = []
        self.busy, self.overlapped = threading.Lock(), False

    def rebalance(self, left: Sequence[Remaining]) -> None:
        if not self.busy.acquire(blocking=False):
            self.overlapped = True
            return
        self.told.append(sorted(each.load.task for each in left))
        assert all(each.load.num_examples >= 1 for each in left)
        time.sleep(0.001)
        self.busy.release()


def run(backend: PartitionBackend, works: Iterable[FakeWork]) -> Execution:
    listed = list(works)
    return Executor(backend, COMPETITIVE).run(listed, [load(work.task, work.num_examples) for work in listed])


def test_a_backend_that_fails_to_rebalance_costs_no_work() -> None:
    execution = run(Broken(Device(name="t", kind="cpu", num_cores=2)), [FakeWork("a"), FakeWork("b")])
    assert {result.outcome for result in execution.results.values()} == {TRAINED}
    assert "lanes stay where they are: RuntimeError: no idea" in execution.notes
    assert len(execution.notes) == 1


def test_a_backend_is_told_when_a_task_has_ended() -> None:
    backend = Looking(Device(name="t", kind="cpu", num_cores=4))
    run(backend, [FakeWork(f"t{index}", num_examples=20 * index + 5) for index in range(4)])
    assert not backend.overlapped
    assert backend.told[-1] == []
    assert all(set(later) <= set(earlier) for earlier, later in zip(backend.told, backend.told[1:], strict=False))


# ------------------------------------------------------------------------------------------------------------- graphs


def test_a_training_that_moves_captures_anew_and_computes_the_same() -> None:
    capture, workload = FakeCapture(), Pictures("task")
    work = TaskTraining(
        workload=workload,
        plan=TaskPlan(task="task", num_examples=100),
        arrays=first_weights(workload),
        origin=ORIGIN,
        device=CPU,
        capture=capture,
    )
    while not work.finished:
        if work.steps_done in (0, 2, 7, 10):
            work.moved()
        work.step()
    work.finish()
    assert same(work, train(Pictures("task"), None))
    assert capture.captures == 3
    assert work.notes == ()


def test_memory_of_a_training_that_moves_is_known_to_its_new_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    work = train_started(Pictures("task"))
    recorded: list[tuple[int, ...]] = []

    class OnCuda(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: Any) -> None:
            assert stream == "lane"
            recorded.append(tuple(self.shape))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "lane")
    work._device = torch.device("cuda", 0)
    assert work._model is not None
    assert work._optimizer is not None
    state = {name: value.as_subclass(OnCuda) for name, value in work._model.state_dict().items()}
    monkeypatch.setattr(work._model, "state_dict", lambda: state)
    for values in work._optimizer.state.values():
        values["momentum_buffer"] = values["momentum_buffer"].as_subclass(OnCuda)
    for name in ("_first", "_last", "_sum"):
        setattr(work._losses, name, getattr(work._losses, name).as_subclass(OnCuda))
    work.moved()
    shapes = [tuple(value.shape) for value in state.values()]
    assert sorted(recorded) == sorted([*shapes, *shapes, (), (), ()])


def train_started(workload: Pictures) -> TaskTraining:
    work = TaskTraining(
        workload=workload,
        plan=TaskPlan(task="task", num_examples=100),
        arrays=first_weights(workload),
        origin=ORIGIN,
        device=CPU,
    )
    work.step()
    work.step()
    return work
