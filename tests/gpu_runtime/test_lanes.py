"""One suite for every backend: each must pass all of it on a device it can work on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.device import Device, discover
from gpu_runtime.lanes import BACKENDS, BackendError, Lane, LaneOptions, PartitionBackend, choose
from gpu_runtime.lanes.streams import RUN_AHEAD, StreamLane, priorities_by_length

CPU = Device(name="test", kind="cpu", num_cores=3)
CUDA = Device(name="test", kind="cuda", num_cores=132)
LOADS = [TaskLoad(task=name, num_examples=size, solo_cost_s=1.0) for name, size in (("a", 1), ("b", 2), ("c", 3))]

ON_CPU = [name for name, backend in BACKENDS.items() if not backend.unavailable(CPU)]
CASES = [pytest.param("cpu", name, id=f"{name}-cpu") for name in ON_CPU] + [
    pytest.param("cuda", name, id=f"{name}-cuda", marks=pytest.mark.gpu)
    for name, backend in BACKENDS.items()
    if not backend.unavailable(CUDA)
]


def backend_of(kind: str, name: str) -> PartitionBackend:
    return BACKENDS[name](CPU if kind == "cpu" else discover(kind="cuda"))


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("mode", ["competitive", "exclusive"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
class TestEveryBackend:
    def lanes(self, kind: str, name: str, mode: str, deterministic: bool, count: int) -> tuple[Lane, ...]:
        options = LaneOptions(mode=mode, deterministic=deterministic, trace=True)
        return backend_of(kind, name).lanes(LOADS[:count], options)

    def test_every_task_has_a_lane(self, kind: str, name: str, mode: str, deterministic: bool, count: int) -> None:
        lanes = self.lanes(kind, name, mode, deterministic, count)
        for load in LOADS[:count]:
            assert any(lane.tasks is None or load.task in lane.tasks for lane in lanes)
        assert len({lane.name for lane in lanes}) == len(lanes)

    def test_fixed_widths_fit(self, kind: str, name: str, mode: str, deterministic: bool, count: int) -> None:
        lanes = self.lanes(kind, name, mode, deterministic, count)
        widths = [lane.width for lane in lanes if lane.width is not None]
        assert all(width >= 1 for width in widths)
        assert sum(widths) <= backend_of(kind, name).threads
        if deterministic:
            assert set(widths) <= {1}

    def test_work_runs_and_is_traced(self, kind: str, name: str, mode: str, deterministic: bool, count: int) -> None:
        made = backend_of(kind, name)
        lane = made.lanes(LOADS[:count], LaneOptions(mode=mode, deterministic=deterministic, trace=True))[0]
        ran: list[int] = []
        origin_s = time.perf_counter()
        lane.open(origin_s)
        try:
            for number in range(5):
                lane.run("a", lambda number=number: ran.append(number), lane.width or 1)  # type: ignore[misc]
            with pytest.raises(RuntimeError, match="in a step"):
                lane.run("a", _raise, lane.width or 1)
        finally:
            lane.close()
            made.restore()
        seconds = time.perf_counter() - origin_s
        assert ran == [0, 1, 2, 3, 4]
        assert len(lane.spans) >= 5
        assert all(span.task == "a" and span.lane == lane.name for span in lane.spans)
        assert all(-1e-3 <= span.start_s <= span.end_s <= seconds + 1e-3 for span in lane.spans)

    def test_the_callers_threads_are_restored(
        self, kind: str, name: str, mode: str, deterministic: bool, count: int
    ) -> None:
        before = torch.get_num_threads()
        made = backend_of(kind, name)
        lane = made.lanes(LOADS[:count], LaneOptions(mode=mode, deterministic=deterministic))[0]
        lane.open(0.0)
        lane.run("a", lambda: None, lane.width or 1)
        lane.close()
        made.restore()
        assert torch.get_num_threads() == before
        assert lane.spans == ()


def _raise() -> None:
    raise RuntimeError("in a step")


# ----------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("backend", "mode", "device", "chosen"),
    [
        ("auto", "competitive", CPU, "cpu"),
        ("auto", "exclusive", CPU, "cpu"),
        ("auto", "sequential", CPU, "sequential"),
        ("cpu", "sequential", CPU, "sequential"),
        ("sequential", "competitive", CPU, "sequential"),
        ("auto", "competitive", CUDA, "streams"),
        ("auto", "sequential", CUDA, "sequential"),
    ],
)
def test_choice(backend: str, mode: str, device: Device, chosen: str) -> None:
    assert choose(backend, mode, device).name == chosen


@pytest.mark.parametrize(
    ("backend", "device", "complaint"),
    [
        ("green", CPU, "unknown sharing backend 'green'; there are auto, sequential, cpu, streams"),
        ("streams", CPU, r"'streams' cannot be used: torch.cuda.is_available\(\) is false"),
        ("cpu", CUDA, "'cpu' cannot be used: the device is not a CPU"),
    ],
)
def test_choice_that_cannot_be(backend: str, device: Device, complaint: str) -> None:
    with pytest.raises(BackendError, match=complaint):
        choose(backend, "competitive", device)


# -------------------------------------------------------------------------------------------------------- exclusive


def test_exclusive_deals_out_the_cores_by_share() -> None:
    device = Device(name="test", kind="cpu", num_cores=6)
    lanes = BACKENDS["cpu"](device).lanes(LOADS, LaneOptions(mode="exclusive"))
    assert {lane.tasks: lane.width for lane in lanes} == {
        frozenset({"a"}): 1,
        frozenset({"b"}): 2,
        frozenset({"c"}): 3,
    }


def test_exclusive_packs_more_tasks_than_cores() -> None:
    device = Device(name="test", kind="cpu", num_cores=2)
    lanes = BACKENDS["cpu"](device).lanes(LOADS, LaneOptions(mode="exclusive"))
    assert {lane.tasks: lane.width for lane in lanes} == {frozenset({"c"}): 1, frozenset({"a", "b"}): 1}


# ---------------------------------------------------------------------------------------------------------- streams


@given(lengths=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_longer_tasks_are_more_urgent(lengths: list[float]) -> None:
    named = {f"t{index}": length for index, length in enumerate(lengths)}
    priorities = priorities_by_length(named, highest=-3)
    assert all(-3 <= priority <= 0 for priority in priorities.values())
    for a in named:
        for b in named:
            assert named[a] <= named[b] or priorities[a] <= priorities[b]
    if len(named) > 1:
        assert set(priorities.values()) >= {-3, 0}


class FakeCuda:
    """As much of `torch.cuda` as a lane uses; events are over only when waited for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now_ms = 0.0
        self.current = "default"

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set_device {device}")

    def default_stream(self, device: torch.device) -> str:
        return "default"

    def Stream(self, device: torch.device, priority: int) -> Any:
        cuda = self

        class Stream:
            def wait_stream(self, other: str) -> None:
                cuda.calls.append(f"wait_stream {other}")

            def synchronize(self) -> None:
                cuda.calls.append("synchronize stream")

        self.calls.append(f"stream priority {priority}")
        return Stream()

    def stream(self, stream: Any) -> Any:
        cuda = self

        class Current:
            def __enter__(self) -> None:
                cuda.current = "lane"

            def __exit__(self, *exception: object) -> None:
                cuda.current = "default"

        return Current()

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Any:
        cuda = self

        class Event(SimpleNamespace):
            def record(self, stream: Any) -> None:
                cuda.now_ms += 1.0
                self.at_ms = cuda.now_ms

            def synchronize(self) -> None:
                cuda.calls.append("synchronize event")

            def elapsed_time(self, other: Any) -> float:
                assert enable_timing
                return float(other.at_ms - self.at_ms)

        return Event()


def stream_lane(cuda: FakeCuda, *, trace: bool) -> StreamLane:
    options = LaneOptions(trace=trace)
    return StreamLane("s", torch.device("cuda", 0), tasks=None, priority=-2, options=options, cuda=cuda)


def test_a_stream_lane_runs_on_its_stream_after_what_the_caller_did() -> None:
    cuda = FakeCuda()
    lane = stream_lane(cuda, trace=False)
    lane.open(0.0)
    assert cuda.calls == ["set_device cuda:0", "stream priority -2", "wait_stream default"]
    seen: list[str] = []
    lane.run("a", lambda: seen.append(cuda.current), 1)
    assert seen == ["lane"]
    assert cuda.current == "default"
    lane.close()
    assert cuda.calls[-1] == "synchronize stream"


def test_a_stream_lane_stays_a_bounded_number_of_steps_ahead() -> None:
    cuda = FakeCuda()
    lane = stream_lane(cuda, trace=False)
    lane.open(0.0)
    for _ in range(RUN_AHEAD):
        lane.run("a", lambda: None, 1)
    assert "synchronize event" not in cuda.calls
    lane.run("a", lambda: None, 1)
    assert cuda.calls.count("synchronize event") == 1


def test_spans_of_a_stream_lane_are_device_time() -> None:
    cuda = FakeCuda()
    lane = stream_lane(cuda, trace=True)
    lane.open(time.perf_counter())
    lane.run("a", lambda: None, 1)
    lane.run("b", lambda: None, 1)
    lane.close()
    first, second = lane.spans
    assert (first.task, second.task) == ("a", "b")
    assert first.end_s - first.start_s == pytest.approx(1e-3)
    assert second.start_s - first.end_s == pytest.approx(1e-3)


def test_a_stream_lane_that_never_opened_closes() -> None:
    stream_lane(FakeCuda(), trace=True).close()
