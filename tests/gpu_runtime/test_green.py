"""Green contexts through a fake driver: what is asked and got, who overlaps whom, and that nothing stays behind."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from cuda_fakes import FakeCuda, FakeDriver
from runtime_fakes import FakeWork, build, hold, plan_of, start_arrays

from gpu_runtime import cuda_driver
from gpu_runtime.allocator import TaskLoad
from gpu_runtime.contracts import CANCELLED, FAILED, TRAINED
from gpu_runtime.cuda_driver import CudaDriverError
from gpu_runtime.device import Device, discover
from gpu_runtime.executor import Executor
from gpu_runtime.lanes import BackendError, LaneOptions
from gpu_runtime.lanes.green import GreenBackend, GreenLane
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings

DEVICE = Device(name="test", kind="cuda", num_cores=132)
EXCLUSIVE, COMPETITIVE = LaneOptions(mode="exclusive"), LaneOptions(mode="competitive")


def load(task: str, share: float = 1.0, num_examples: int = 10) -> TaskLoad:
    return TaskLoad(task=task, num_examples=num_examples, solo_cost_s=1.0, maximum_share=share)


def backend(driver: FakeDriver) -> GreenBackend:
    return GreenBackend(DEVICE, driver=driver, cuda=FakeCuda(calls=driver.calls))


def opened(made: GreenBackend, loads: list[TaskLoad], options: LaneOptions) -> dict[str, GreenLane]:
    lanes: dict[str, GreenLane] = {}
    for lane in made.lanes(loads, options):
        assert isinstance(lane, GreenLane)
        lane.open(0.0)
        lanes[lane.name] = lane
    return lanes


def closed(made: GreenBackend, lanes: dict[str, GreenLane]) -> None:
    for lane in lanes.values():
        lane.close()
    made.restore()


# ------------------------------------------------------------------------------------------------------- partitions


def test_exclusive_contexts_are_disjoint() -> None:
    driver = FakeDriver()
    made = backend(driver)
    lanes = opened(made, [load("a"), load("b"), load("c", num_examples=20)], EXCLUSIVE)
    first, second, third = driver.contexts.values()
    assert [len(first), len(second), len(third)] == [32, 32, 64]
    assert len(first | second | third) == 128
    assert driver.counts["split"] == 1
    closed(made, lanes)
    assert made.notes(EXCLUSIVE) == (
        "green: SMs of 132 in units of 8: a asked 33, got 32; b asked 33, got 32; c asked 66, got 64",
        "green: 4 SMs are in no part: the driver cuts 8 at a time",
    )


def test_competitive_contexts_overlap_when_shares_add_up_to_more_than_one() -> None:
    driver = FakeDriver()
    made = backend(driver)
    # Each alone keeps a quarter of the device busy, but slows down below three quarters of its SMs.
    curve = ((0.25, 0.3), (0.75, 1.0), (1.0, 1.0))
    loads = [
        TaskLoad(task=name, num_examples=10, solo_cost_s=1.0, demand=0.25, speed_curve=curve) for name in ("a", "b")
    ]
    lanes = opened(made, loads, COMPETITIVE)
    first, second = driver.contexts.values()
    assert (len(first), len(second)) == (96, 96)
    assert first & second
    assert len(first | second) == 128
    closed(made, lanes)
    assert made.notes(COMPETITIVE) == ("green: SMs of 132 in units of 8: a asked 99, got 96; b asked 99, got 96",)


def test_asked_120_got_114() -> None:
    """An L40S: 142 SMs, of which the driver groups 114."""
    driver = FakeDriver(num_sms=142, unit_sms=6, num_units=19)
    made = backend(driver)
    lanes = opened(made, [load("a", share=120 / 142)], COMPETITIVE)
    assert [lane.got_sms for lane in lanes.values()] == [[114]]
    closed(made, lanes)
    assert made.notes(COMPETITIVE) == ("green: SMs of 142 in units of 6: a asked 120, got 114",)


def test_what_the_context_says_goes_before_what_was_planned() -> None:
    made = backend(driver := FakeDriver(withheld_sms=2))
    closed(made, opened(made, [load("a", share=0.5)], COMPETITIVE))
    assert "a asked 66, got 62" in made.notes(COMPETITIVE)[0]
    assert not driver.contexts


def test_a_task_alone_has_the_whole_device() -> None:
    made = backend(driver := FakeDriver())
    lanes = opened(made, [load("a")], EXCLUSIVE)
    assert [len(context) for context in driver.contexts.values()] == [132]
    closed(made, lanes)
    assert made.notes(EXCLUSIVE) == ("green: SMs of 132 in units of 8: a asked 132, got 132",)


def test_a_share_below_the_minimum_is_raised_and_said() -> None:
    made = backend(driver := FakeDriver())
    lanes = opened(made, [load("a", share=0.01), load("b", share=0.5)], COMPETITIVE)
    assert sorted(len(context) for context in driver.contexts.values()) == [8, 64]
    closed(made, lanes)
    assert made.minimum_share == pytest.approx(8 / 132)
    assert made.notes(COMPETITIVE)[1] == "green: a: a share of 0.010 is below the least part, 8 SMs (0.061)"


def test_more_tasks_than_units_share_parts() -> None:
    made = backend(FakeDriver(num_sms=18, unit_sms=8, num_units=2))
    lanes = made.lanes([load("a"), load("b"), load("c", num_examples=25)], EXCLUSIVE)
    assert {lane.tasks for lane in lanes} == {frozenset({"c"}), frozenset({"a", "b"})}


def test_a_driver_that_does_not_tell_its_minimum_is_asked_by_a_split() -> None:
    made = backend(driver := FakeDriver(tells_minimum=False))
    assert made.minimum_share == pytest.approx(8 / 132)
    assert driver.counts["split"] == 2


# ---------------------------------------------------------------------------------------------------- life and death


def test_streams_are_destroyed_before_their_contexts_and_after_all_lanes_closed() -> None:
    made = backend(driver := FakeDriver())
    lanes = opened(made, [load("a"), load("b")], EXCLUSIVE)
    for lane in lanes.values():
        lane.run("a", lambda: None, 1)
        lane.close()
    assert len(driver.streams) == 2
    made.restore()
    assert driver.calls[-7:] == [
        "synchronize stream",
        "synchronize stream",
        "empty_cache",
        "destroy_stream 104",
        "destroy_context 103",
        "destroy_stream 102",
        "destroy_context 101",
    ]
    made.restore()
    assert not driver.streams
    assert not driver.contexts
    assert not any("destroy" in note for note in made.notes(EXCLUSIVE))


@pytest.mark.parametrize("call", ["create_context", "context_sms", "create_stream"])
def test_an_error_in_the_middle_of_creation_destroys_what_was_made(call: str) -> None:
    made = backend(driver := FakeDriver(fail={call: 2}))
    first, second = made.lanes([load("a"), load("b")], EXCLUSIVE)
    first.open(0.0)
    with pytest.raises(CudaDriverError, match=f"{call} failed: CUDA_ERROR_INJECTED"):
        second.open(0.0)
    assert len(driver.contexts) == len(driver.streams) == 1
    first.close()
    made.restore()
    assert not driver.streams
    assert not driver.contexts


def test_torch_that_refuses_the_stream_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    made = backend(driver)

    def refuse(handle: int, device: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(FakeCuda, "ExternalStream", lambda self, handle, device: refuse(handle, device))
    (lane,) = made.lanes([load("a")], COMPETITIVE)
    with pytest.raises(RuntimeError, match="no such device"):
        lane.open(0.0)
    assert not driver.streams
    assert not driver.contexts


def test_a_context_is_destroyed_even_if_its_stream_cannot_be() -> None:
    made = backend(driver := FakeDriver(fail={"destroy_stream": 1}))
    closed(made, opened(made, [load("a")], COMPETITIVE))
    assert not driver.contexts
    assert made.notes(COMPETITIVE)[-1] == "green: sms-a: destroy_stream failed: CUDA_ERROR_INJECTED"


def test_a_lane_that_still_serves_is_destroyed_when_it_closes() -> None:
    made = backend(driver := FakeDriver())
    (lane,) = opened(made, [load("a")], COMPETITIVE).values()
    made.restore()
    assert driver.contexts
    assert "empty_cache" not in driver.calls
    lane.close()
    assert not driver.streams
    assert not driver.contexts


def test_lanes_that_were_never_opened_have_nothing_to_destroy() -> None:
    made = backend(driver := FakeDriver())
    made.lanes([load("a"), load("b")], EXCLUSIVE)
    made.restore()
    assert not any("destroy" in call for call in driver.calls)


# ------------------------------------------------------------------------------------------------- with the executor


def test_the_report_has_asked_and_got() -> None:
    made = backend(driver := FakeDriver())
    works = [FakeWork(task="a"), FakeWork(task="b")]
    execution = Executor(made, EXCLUSIVE).run(works, [load("a"), load("b")])
    assert {result.outcome for result in execution.results.values()} == {TRAINED}
    assert execution.notes[0] == "green: SMs of 132 in units of 8: a asked 66, got 64; b asked 66, got 64"
    assert not driver.contexts


def test_a_lane_that_cannot_open_fails_its_task_alone() -> None:
    made = backend(driver := FakeDriver(fail={"create_stream": 2}))
    works = [FakeWork(task="a"), FakeWork(task="b")]
    execution = Executor(made, EXCLUSIVE).run(works, [load("a"), load("b")])
    assert sorted(result.outcome for result in execution.results.values()) == sorted((FAILED, TRAINED))
    (failed,) = (result for result in execution.results.values() if result.outcome == FAILED)
    assert failed.error == "CudaDriverError: create_stream failed: CUDA_ERROR_INJECTED"
    assert not driver.contexts


class Held:
    itself: Any = None


class OnStream(FakeWork):
    """Work that holds something of the lane's stream until it lets go."""

    def __init__(self, task: str, driver: FakeDriver, *, in_cycles: bool = False, **options: Any) -> None:
        super().__init__(task=task, **options)
        self._in_cycles = in_cycles
        self.freed_in_time: list[bool] = []
        self._driver = driver
        self._held: Any = None

    def step(self) -> None:
        self._held = held = Held()
        if self._in_cycles:
            held.itself = held
        weakref.finalize(held, self._freed)
        super().step()

    def _freed(self) -> None:
        self.freed_in_time.append(bool(self._driver.streams))

    def finish(self) -> None:
        self._held = None

    abandon = finish


@pytest.mark.parametrize("fails", [False, True])
def test_what_hangs_in_reference_cycles_is_freed_before_its_stream_is_destroyed(fails: bool) -> None:
    def during(number: int) -> None:
        if fails:
            raise RuntimeError("injected")

    gc.disable()
    try:
        made = backend(driver := FakeDriver())
        work = OnStream("a", driver, during=during, in_cycles=True)
        execution = Executor(made, COMPETITIVE).run([work], [load("a")])
    finally:
        gc.enable()
    assert execution.results["a"].outcome == (FAILED if fails else TRAINED)
    assert len(work.freed_in_time) == work.steps_done
    assert all(work.freed_in_time)
    assert not driver.streams


def test_cancelled_work_lets_go_before_its_stream_is_destroyed() -> None:
    cancel = threading.Event()
    made = backend(driver := FakeDriver())
    work = OnStream("a", driver, num_examples=10**9, during=lambda number: cancel.set())
    execution = Executor(made, COMPETITIVE).run([work], [load("a")], cancel=cancel)
    assert execution.results["a"].outcome == CANCELLED
    assert not driver.streams
    assert work.freed_in_time
    assert all(work.freed_in_time)


# ------------------------------------------------------------------------------------------------------ availability


def test_split_refused() -> None:
    made = backend(FakeDriver(fail={"split": 1}))
    with pytest.raises(BackendError, match=r"^green: split failed: CUDA_ERROR_INJECTED$"):
        made.lanes([load("a")], EXCLUSIVE)


def test_a_split_into_nothing() -> None:
    with pytest.raises(BackendError, match="cuts 132 SMs into no part of 8"):
        backend(FakeDriver(num_units=0)).lanes([load("a")], EXCLUSIVE)


def unavailable(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | CudaDriverError) -> str:
    def fake_load() -> FakeDriver:
        if isinstance(driver, CudaDriverError):
            raise driver
        cuda_driver.check_version(driver)
        return driver

    monkeypatch.setattr(cuda_driver, "load", fake_load)
    return GreenBackend.unavailable(DEVICE)


def test_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable(monkeypatch, FakeDriver()) == ""


def test_unavailable_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GreenBackend.unavailable(Device(name="test", kind="cpu", num_cores=2)).startswith("torch.cuda")
    absent = CudaDriverError("the package cuda-bindings is needed")
    assert unavailable(monkeypatch, absent) == "the package cuda-bindings is needed"
    with pytest.raises(BackendError, match=r"^green: the package cuda-bindings is needed$"):
        GreenBackend(DEVICE).lanes([load("a")], EXCLUSIVE)
    too_old = unavailable(monkeypatch, FakeDriver(cuda_version=(12, 2)))
    assert too_old == "green contexts need a driver for CUDA 12.5 or newer, this one is for CUDA 12.2"
    assert unavailable(monkeypatch, FakeDriver(fail={"device_sms": 1})) == "device_sms failed: CUDA_ERROR_INJECTED"


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_unavailable_with_expandable_segments(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments:True")
    assert "expandable_segments" in unavailable(monkeypatch, FakeDriver())
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert unavailable(monkeypatch, FakeDriver()) == ""


# ---------------------------------------------------------------------------------------------------- the real thing

SMS_SEEN = r"""
extern "C" __global__ void sms_seen(int* seen) {
    unsigned int sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    seen[sm] = 1;
    long long start = clock64();
    while (clock64() - start < 200000) { }
}
"""


@pytest.fixture
def real() -> GreenBackend:
    device = discover(kind="cuda")
    if reason := GreenBackend.unavailable(device):
        pytest.skip(reason)
    return GreenBackend(device)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [EXCLUSIVE, COMPETITIVE], ids=["exclusive", "competitive"])
def test_kernels_run_on_the_sms_of_their_lane_only(real: GreenBackend, options: LaneOptions) -> None:
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this torch compiles no kernels")
    kernel = torch.cuda._compile_kernel(SMS_SEEN, "sms_seen")
    device = real.device.torch_device
    lanes = opened(real, [load("a", share=0.5), load("b", share=0.5)], options)
    seen: dict[str, set[int]] = {}
    for name, lane in lanes.items():
        used = torch.zeros(1024, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        lane.run("a", lambda used=used: kernel((4096, 1, 1), (64, 1, 1), [used]), 1)  # type: ignore[misc]
        torch.cuda.synchronize(device)
        seen[name] = set(used.nonzero().flatten().tolist())
        assert 0 < len(seen[name]) <= lane.got_sms[-1]
    closed(real, lanes)
    first, second = seen.values()
    assert not first & second


@pytest.mark.gpu
def test_training_steps_run_in_a_real_partition(real: GreenBackend) -> None:
    device = real.device.torch_device
    (lane,) = opened(real, [load("a", share=0.25)], COMPETITIVE).values()
    weights = torch.ones(64, 64, device=device, requires_grad=True)
    torch.cuda.synchronize(device)
    for _ in range(3):
        lane.run("a", lambda: torch.autograd.backward((weights @ weights).sum()), 1)
    lane.close()
    assert torch.equal(weights.grad, torch.full_like(weights, 3 * 128.0))  # type: ignore[arg-type]
    real.restore()
    assert not lane.faults
    assert (torch.ones(8, device=device) * 2).sum().item() == 16


@pytest.mark.gpu
def test_memory_stays_flat_over_many_rounds(real: GreenBackend) -> None:
    device = real.device.torch_device

    def multiply() -> None:
        square = torch.ones(512, 512, device=device)
        torch.mm(square, square)

    reserved: list[int] = []
    for _ in range(20):
        lanes = opened(real, [load("a", share=0.5), load("b", share=0.5)], COMPETITIVE)
        for lane in lanes.values():
            lane.run("a", multiply, 1)
        closed(real, lanes)
        reserved.append(torch.cuda.memory_reserved(device))
    assert reserved[-1] <= reserved[2]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["competitive", "exclusive"])
@pytest.mark.usefixtures("real")
def test_tasks_train_in_parts_as_alone_round_after_round(mode: str) -> None:
    refs, failing = ("pictures", "normed", "rows"), ("raises", "nan")
    alone = EmbeddedRuntime(build).train(plan_of(*refs, sharing_mode="sequential"), start_arrays(*refs), hold(*refs))
    runtime = EmbeddedRuntime(build, SharingSettings(backend="green"))
    everything = refs + failing
    for _ in range(3):
        plan = plan_of(*everything, sharing_mode=mode)
        result = runtime.train(plan, start_arrays(*everything), hold(*everything))
        assert {task.task for task in result.report.tasks if task.outcome == TRAINED} == set(refs)
        assert result.report.backend == "green"
        assert result.report.notes[0].startswith("green: SMs of ")
        assert not [note for note in result.report.notes if "failed" in note]
        for name, array in alone.arrays.items():
            np.testing.assert_allclose(result.arrays[name], array, rtol=1e-3, atol=1e-4, err_msg=name)
