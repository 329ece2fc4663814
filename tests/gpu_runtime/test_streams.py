"""CUDA streams through a fake driver: order of waits, copies and events. What needs a device is in test_cuda.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_fakes import FakeCuda
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.lanes import LaneOptions
from gpu_runtime.lanes.streams import RUN_AHEAD, StreamLane, priorities_by_length
from gpu_runtime.transfer import batches_on


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


# ------------------------------------------------------------------------------------------------------------ copies


class FakeCopies:
    """The streams of a prefetching copy, writing down what happens on which."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_events = 0

    def Stream(self, device: torch.device) -> Any:
        def record_event() -> int:
            self.num_events += 1
            self.log.append(f"event {self.num_events}")
            return self.num_events

        return SimpleNamespace(record_event=record_event)

    def stream(self, stream: Any) -> Any:
        class Current:
            def __enter__(self) -> None: ...

            def __exit__(self, *exception: object) -> None: ...

        return Current()

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="lane", wait_event=lambda event: self.log.append(f"wait {event}"))


def watched(number: float, log: list[str]) -> torch.Tensor:
    class Watched(torch.Tensor):
        def pin_memory(self, *_: Any) -> Any:
            log.append(f"pin {number:g}")
            return self

        def to(self, device: Any, non_blocking: bool = False) -> Any:
            assert non_blocking
            log.append(f"copy {number:g}")
            return self

        def record_stream(self, stream: Any) -> None:
            log.append(f"record {number:g} on {stream.name}")

    return torch.full((1,), number).as_subclass(Watched)


def test_batches_are_copied_one_ahead_and_waited_for() -> None:
    cuda = FakeCopies()
    source = [(watched(number, cuda.log), 0) for number in (1, 2)]
    batches = batches_on(torch.device("cuda", 0), source, cuda)
    next(batches)
    assert cuda.log == ["pin 1", "copy 1", "event 1", "pin 2", "copy 2", "event 2", "wait 1", "record 1 on lane"]
    next(batches)
    assert cuda.log[-2:] == ["wait 2", "record 2 on lane"]
    assert list(batches) == []


def test_batches_on_the_host_are_passed_on() -> None:
    source = [(torch.ones(1), torch.zeros(1))]
    assert list(batches_on(torch.device("cpu"), source)) == source
    assert list(batches_on(torch.device("cuda", 0), [], FakeCopies())) == []
