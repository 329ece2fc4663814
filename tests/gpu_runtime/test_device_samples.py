"""Samples of a GPU through a fake of NVML: whatever fails is unknown, and nothing fails or waits because of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_fakes import hold, plan_of, start_arrays
from test_runtime import runtime

from gpu_runtime import device as device_module
from gpu_runtime import device_samples
from gpu_runtime.contracts import DeviceSample, Report, from_json, to_json
from gpu_runtime.device import Device
from gpu_runtime.device_samples import MAX_FAILURES, DeviceSampler
from gpu_runtime.trace import chrome_trace

CUDA = Device(name="test", kind="cuda", num_cores=132, index=1)


class FakeNvml(SimpleNamespace):
    """pynvml whose readings are those of `answers`: a value, or a function of the number of the call, from 1."""

    def __init__(self, **answers: Any) -> None:
        self.counts: dict[str, int] = {}
        self.opened = 0
        known = {"handle": "gpu", "busy": 50, "memory": 4096, "power": 2500} | answers

        def answer(name: str) -> Any:
            count = self.counts[name] = self.counts.get(name, 0) + 1
            value = known[name]
            return value(count) if callable(value) else value

        def open_or_close(by: int) -> None:
            answer("init") if "init" in known else None
            self.opened += by

        super().__init__(
            nvmlInit=lambda: open_or_close(1),
            nvmlShutdown=lambda: open_or_close(-1),
            nvmlDeviceGetHandleByIndex=lambda index: answer("handle"),
            nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=answer("busy")),
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=answer("memory")),
            nvmlDeviceGetPowerUsage=lambda handle: answer("power"),
        )


def fails(first: int = 1) -> Callable[[int], int]:
    def answer(count: int) -> int:
        if count >= first:
            raise RuntimeError("Insufficient Permissions")
        return 10

    return answer


def sampled(
    monkeypatch: pytest.MonkeyPatch, nvml: Any, *, until: Callable[[], bool] = lambda: True, **options: Any
) -> tuple[DeviceSample, ...]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = DeviceSampler(CUDA, time.perf_counter(), **{"period_s": 0.001, **options})
    sampler.start()
    deadline = time.monotonic() + 10.0
    while not until() and time.monotonic() < deadline:
        time.sleep(0.001)
    return sampler.stop()


def no_sampler_is_left() -> bool:
    return not any(thread.name == "device samples" for thread in threading.enumerate())


def test_utilisation_memory_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    samples = sampled(monkeypatch, nvml, until=lambda: nvml.counts.get("power", 0) > 5)
    assert len(samples) >= 5
    assert {(each.busy_fraction, each.memory_bytes, each.power_w) for each in samples} == {(0.5, 4096, 2.5)}
    times = [each.time_s for each in samples]
    assert times == sorted(times)
    assert times[0] >= 0
    assert nvml.opened == 0
    assert no_sampler_is_left()


@pytest.mark.parametrize("name", ["busy", "memory", "power"])
@pytest.mark.parametrize("value", [fails(), fails(3), float("nan"), -1, "N/A", None])
def test_a_reading_that_fails_is_unknown_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    nvml = FakeNvml(**{name: value})
    other = "power" if name != "power" else "busy"
    samples = sampled(monkeypatch, nvml, until=lambda: nvml.counts.get(other, 0) > 10)
    field = {"busy": "busy_fraction", "memory": "memory_bytes", "power": "power_w"}
    assert getattr(samples[-1], field[name]) is None
    assert all(getattr(each, field[other]) is not None for each in samples)
    # Asked a few times in a row, then no more.
    assert nvml.counts[name] <= MAX_FAILURES + 2


def test_a_device_that_tells_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(busy=fails(), memory=fails(), power=fails())
    assert sampled(monkeypatch, nvml, until=no_sampler_is_left) == ()
    assert nvml.counts["power"] == MAX_FAILURES
    assert nvml.opened == 0


@pytest.mark.parametrize("nvml", [None, FakeNvml(init=fails()), FakeNvml(handle=fails())])
def test_without_nvml_there_are_no_samples(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    assert sampled(monkeypatch, nvml, until=no_sampler_is_left) == ()


def test_samples_are_bounded_and_cover_the_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    samples = sampled(monkeypatch, nvml, until=lambda: nvml.counts.get("power", 0) > 24, max_samples=8)
    assert 4 <= len(samples) <= 8
    gaps = [b.time_s - a.time_s for a, b in pairwise(samples)]
    assert max(gaps) > 0.002  # the period grew
    assert samples[0].time_s < samples[-1].time_s / 2


def test_a_driver_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_samples, "LAST_S", 0.05)
    answering = threading.Event()
    nvml = FakeNvml(memory=lambda count: 4096 if count == 1 else answering.wait(60) and 0)
    samples = sampled(monkeypatch, nvml, until=lambda: nvml.counts.get("memory", 0) > 1)
    assert [each.memory_bytes for each in samples] == [4096]
    # Nor does it gather threads, round after round.
    assert sampled(monkeypatch, nvml) == ()
    assert [thread.name for thread in threading.enumerate()].count("device samples") == 1
    answering.set()
    assert sampled(monkeypatch, FakeNvml(), until=no_sampler_is_left) == ()
    assert sampled(monkeypatch, FakeNvml())


def test_a_cpu_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml := FakeNvml())
    plan = plan_of("rows", trace=True)
    assert runtime(1).train(plan, start_arrays("rows"), hold("rows")).report.samples == ()
    assert nvml.counts == {}


@pytest.mark.parametrize("trace", [False, True])
def test_a_traced_round_reports_samples(monkeypatch: pytest.MonkeyPatch, trace: bool) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    made = runtime(1)

    class OnCuda(DeviceSampler):
        def __init__(self, device: Device, origin_s: float) -> None:
            super().__init__(CUDA, origin_s)

    monkeypatch.setattr("gpu_runtime.runtime.DeviceSampler", OnCuda)
    report = made.train(plan_of("slow", trace=trace), start_arrays("slow"), hold("slow")).report
    assert bool(report.samples) == trace
    assert from_json(Report, to_json(report)) == report
    counters = [event for event in chrome_trace([report])["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == (
        {"device busy", "device memory", "device power"} if trace else set()
    )


# ------------------------------------------------------------------------------------------------------- which device


def test_nvml_is_asked_for_torchs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    nvml = FakeNvml()
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    assert device_module.nvml_handle(nvml, 1) == "GPU-uuid-1"
    nvml.nvmlDeviceGetHandleByUUID = fails()
    assert device_module.nvml_handle(nvml, 1) == "gpu"


@pytest.mark.gpu
def test_this_machines_device_has_samples() -> None:
    sampler = DeviceSampler(device_module.discover(), time.perf_counter(), period_s=0.02)
    sampler.start()
    time.sleep(0.5)
    assert sampler.stop()
