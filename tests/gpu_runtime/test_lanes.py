"""One suite for every backend: each must pass all of it on a device it can work on."""

from __future__ import annotations

import time

import pytest
import torch
from cuda_fakes import FakeCuda, FakeDriver

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.device import Device, discover
from gpu_runtime.lanes import BACKENDS, BackendError, Lane, LaneOptions, PartitionBackend, choose
from gpu_runtime.lanes.green import GreenBackend
from gpu_runtime.settings import BACKENDS as SETTINGS_BACKENDS

CPU = Device(name="test", kind="cpu", num_cores=3)
CUDA = Device(name="test", kind="cuda", num_cores=132)
LOADS = [TaskLoad(task=name, num_examples=size, solo_cost_s=1.0) for name, size in (("a", 1), ("b", 2), ("c", 3))]

ON_CPU = [name for name, backend in BACKENDS.items() if not backend.unavailable(CPU)]
CASES = [pytest.param("cpu", name, id=f"{name}-cpu") for name in ON_CPU] + [
    pytest.param("cuda", name, id=f"{name}-cuda", marks=pytest.mark.gpu)
    for name, backend in BACKENDS.items()
    if not backend.unavailable(CUDA)
]
# On fakes of the driver and of torch.cuda.
CASES.append(pytest.param("fake", "green", id="green-fake"))


def backend_of(kind: str, name: str) -> PartitionBackend:
    if kind == "fake":
        return GreenBackend(CUDA, driver=FakeDriver(), cuda=FakeCuda(real_time=True))
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
        (
            "marble",
            CPU,
            "unknown sharing backend 'marble'; there are auto, sequential, cpu, processes, streams",
        ),
        ("green", CPU, r"'green' cannot be used: torch.cuda.is_available\(\) is false"),
        ("mps", CPU, r"'mps' cannot be used: torch.cuda.is_available\(\) is false"),
        ("streams", CPU, r"'streams' cannot be used: torch.cuda.is_available\(\) is false"),
        ("cpu", CUDA, "'cpu' cannot be used: the device is not a CPU"),
    ],
)
def test_choice_that_cannot_be(backend: str, device: Device, complaint: str) -> None:
    with pytest.raises(BackendError, match=complaint):
        choose(backend, "competitive", device)


def test_settings_offer_the_backends_there_are() -> None:
    assert set(SETTINGS_BACKENDS) == {"auto", *BACKENDS} - {"sequential"}


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
