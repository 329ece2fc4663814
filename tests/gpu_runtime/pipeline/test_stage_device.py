"""A device shared by sessions: each in order and never twice at once, fair, no more threads than cores."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from gpu_runtime.device import Device
from gpu_runtime.pipeline.session import SplitError
from gpu_runtime.pipeline.stage_device import RETRY_WIDTH_EVERY, StageDevice, _Width


def device_of(cores: int, *, deterministic: bool = False) -> StageDevice:
    return StageDevice(Device(name="test", kind="cpu", num_cores=cores), deterministic=deterministic)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads


def test_results_errors_and_seconds_come_back() -> None:
    device = device_of(1)
    device.join("a")
    done = device.run("a", lambda: time.sleep(0.01) or 7)
    assert done.result == 7
    assert done.seconds >= 0.01
    with pytest.raises(ZeroDivisionError):
        device.run("a", lambda: 1 / 0)
    assert device.run("a", lambda: 8).result == 8
    device.close()


def test_the_work_of_a_session_keeps_its_order_and_never_overlaps() -> None:
    device, lock = device_of(4), threading.Lock()
    busy: Counter[str] = Counter()
    overlaps: list[str] = []
    order: dict[str, list[int]] = {name: [] for name in "abcdef"}

    def work(name: str, number: int) -> None:
        with lock:
            busy[name] += 1
            overlaps.extend([name] * (busy[name] > 1))
        order[name].append(number)
        time.sleep(0.0005)
        with lock:
            busy[name] -= 1

    for name in order:
        device.join(name)
    futures = [device.post(name, lambda n=name, i=number: work(n, i)) for number in range(20) for name in order]
    for future in futures:
        future.result()
    device.close()
    assert overlaps == []
    assert all(numbers == list(range(20)) for numbers in order.values())


def test_a_lone_session_has_all_cores_and_several_have_one_each() -> None:
    device = device_of(3)
    device.join("a")
    assert {device.run("a", torch.get_num_threads).result for _ in range(5)} == {3}
    device.join("b")
    for name in "abababab":
        assert device.run(name, torch.get_num_threads).result == 1
    device.leave("b")
    while "b" in device._members:
        time.sleep(0.001)
    assert device.run("a", torch.get_num_threads).result == 3
    device.close()


def test_wide_work_stays_in_one_thread() -> None:
    device = device_of(3)
    device.join("a")
    names = {device.run("a", lambda: threading.current_thread().name).result for _ in range(10)}
    device.close()
    assert names == {"stage core-0"}


def test_deterministic_work_is_narrow() -> None:
    device = device_of(3, deterministic=True)
    device.join("a")
    assert device.run("a", torch.get_num_threads).result == 1
    device.close()


def test_two_sessions_run_at_the_same_time() -> None:
    device, meeting = device_of(2), threading.Barrier(2)
    device.join("a")
    device.join("b")
    futures = [device.post(name, lambda: meeting.wait(20)) for name in "ab"]
    assert {future.result().result for future in futures} == {0, 1}
    device.close()


def test_the_least_served_goes_first() -> None:
    device = device_of(1)
    for name in "ab":
        device.join(name)
    device._members["a"].served_s = 1000.0
    gate, order = threading.Event(), list[str]()
    device.post("b", lambda: gate.wait(20))
    futures = [device.post(name, lambda n=name: order.append(n)) for name in ("a", "a", "b", "b")]
    gate.set()
    for future in futures:
        future.result()
    device.close()
    assert order == ["b", "b", "a", "a"]


def test_the_session_furthest_behind_goes_first_whoever_was_served_less() -> None:
    device = device_of(1)
    for name in "ab":
        device.join(name)
    device._members["a"].served_s = 1000.0
    gate, order = threading.Event(), list[str]()
    device.post("b", lambda: gate.wait(20))
    jobs = [("a", 0.2), ("a", 0.4), ("b", 0.3), ("b", 0.5)]
    futures = [device.post(name, lambda n=name: order.append(n), progress=done) for name, done in jobs]
    gate.set()
    for future in futures:
        future.result()
    device.close()
    assert order == ["a", "b", "a", "b"]


def test_a_lone_session_takes_the_width_that_is_faster() -> None:
    width = _Width(4)
    seen = []
    for _ in range(2 * RETRY_WIDTH_EVERY + 1):
        seen.append(width.next())
        width.note(seen[-1], 10.0 if seen[-1] == 4 else 1.0)  # a neighbour is in the way of one of the threads
    assert seen[:6] == [4, 4, 4, 1, 1, 1]
    assert set(seen[6:RETRY_WIDTH_EVERY]) == {1}
    assert seen[RETRY_WIDTH_EVERY] == 4
    assert width.best == 1
    for _ in range(6 * RETRY_WIDTH_EVERY):
        chosen = width.next()
        width.note(chosen, 0.1 if chosen == 4 else 1.0)  # it has gone
    assert width.best == 4


def test_one_core_leaves_no_choice() -> None:
    width = _Width(1)
    for _ in range(RETRY_WIDTH_EVERY + 5):
        assert width.next() == 1
        width.note(1, 1.0)


def test_newcomers_have_no_claim_on_the_past() -> None:
    device = device_of(1)
    device.join("old")
    device.run("old", lambda: time.sleep(0.02))
    device.join("new")
    assert device._members["new"].served_s == device._members["old"].served_s
    device.close()


def test_sessions_that_have_left_or_never_came_are_refused() -> None:
    device = device_of(1)
    device.join("a")
    with pytest.raises(ValueError, match="is there already"):
        device.join("a")
    device.leave("a")
    device.leave("a")
    for name in "ab":
        while name in device._members:
            time.sleep(0.001)
        with pytest.raises(SplitError, match="the session has ended"):
            device.run(name, lambda: None)
    device.close()


def test_closing_drops_what_waits() -> None:
    device, gate = device_of(1), threading.Event()
    device.join("a")
    running = device.post("a", lambda: gate.wait(20))
    waiting = device.post("a", lambda: None)
    closer = threading.Thread(target=device.close)
    closer.start()
    with pytest.raises(SplitError, match="the split service is closing"):
        waiting.result(20)
    gate.set()
    closer.join()
    assert running.result().result is True
    with pytest.raises(SplitError, match="the split service is closing"):
        device.run("a", lambda: None)


def test_lanes_that_cannot_work_fail_everyone() -> None:
    device = device_of(1)
    device._lanes[0].open = lambda origin_s: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    device.join("a")
    with pytest.raises(SplitError, match="lane core-0 of the split service cannot work: division by zero"):
        device.run("a", lambda: None)
    device.close()
