"""Demand from operators: by hand, from a trace as the profiler writes it, and from a real step on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from runtime_fakes import Pictures, hold

from gpu_runtime import profiler, virtual_resource
from gpu_runtime.device import Device
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings
from gpu_runtime.virtual_resource import (
    OperatorDemand,
    cpu_operators,
    cuda_operators,
    demand_of,
    from_thread_times,
    kernels_in,
)


def kernel(name: str, dur: float, grid: list[int]) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "dur": dur, "args": {"grid": grid, "block": [128, 1, 1]}}


TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "dur": 900.0, "args": {}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 50.0, "args": {}},
        kernel("gemm", 300.0, [33, 2, 1]),
        kernel("gemm", 300.0, [132, 4, 1]),
        kernel("relu", 200.0, [33, 1, 1]),
    ]
}


def test_kernels_fill_the_sms_that_their_grid_covers() -> None:
    gemm, relu = kernels_in(TRACE, num_sms=132, num_steps=2)
    # Of two steps: 300 us at 0.5 and 300 us at 1.0; 200 us at 0.25.
    assert (gemm.name, gemm.seconds, gemm.filled) == ("gemm", pytest.approx(300e-6), pytest.approx(0.75))
    assert (relu.name, relu.seconds, relu.filled) == ("relu", pytest.approx(100e-6), pytest.approx(0.25))
    assert demand_of([gemm, relu]) == pytest.approx((0.75 * 300 + 0.25 * 100) / 400)
    # The device idles for 600 of 1000 us.
    assert demand_of([gemm, relu], step_s=1e-3) == pytest.approx((0.75 * 300 + 0.25 * 100) / 1000)


def test_demand_stays_between_0_and_1() -> None:
    assert demand_of([]) == 0.0
    assert demand_of([], step_s=1.0) == 0.0
    assert demand_of([OperatorDemand(name="a", seconds=2.0, filled=1.0)], step_s=1.0) == 1.0


@pytest.mark.parametrize("trace", [{}, {"traceEvents": []}, {"traceEvents": [{"cat": "cpu_op"}]}])
def test_a_trace_without_kernels(trace: dict[str, Any]) -> None:
    assert kernels_in(trace, 100) == []


def test_a_kernel_without_a_grid_counts_as_filling() -> None:
    (found,) = kernels_in({"traceEvents": [{"cat": "kernel", "name": "k", "dur": 5}]}, 100)
    assert found.filled == 1.0


def test_operators_of_a_cpu_by_hand() -> None:
    found = from_thread_times({"conv": 4.0, "relu": 1.0, "sort": 1.0}, {"conv": 2.0, "relu": 1.0, "sort": 3.0}, cores=2)
    assert found == [
        OperatorDemand(name="conv", seconds=2.0, filled=1.0),
        OperatorDemand(name="relu", seconds=1.0, filled=0.5),
        OperatorDemand(name="sort", seconds=1.0, filled=0.5),
    ]


def test_a_real_step_on_the_cpu() -> None:
    before = torch.get_num_threads()
    layer = torch.nn.Linear(32, 32)
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        layer(torch.ones(8, 32)).sum().backward()

    found = cpu_operators(step, cores=1, num_steps=2)
    assert len(steps) == 6
    assert "aten::addmm" in {operator.name for operator in found}
    assert all(0 <= operator.filled <= 1 for operator in found)
    assert torch.get_num_threads() == before


class Recorded:
    """In place of torch's profiler."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._trace = trace

    def __call__(self, **_: Any) -> Recorded:
        return self

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        with open(path, "w") as file:
            json.dump(self._trace, file)


def test_a_step_on_cuda_by_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device, steps = torch.device("cuda", 0), []
    found = cuda_operators(lambda: steps.append(1), device, 132, num_steps=2, record=Recorded(TRACE))
    assert found == kernels_in(TRACE, 132, 2)
    assert len(steps) == 2
    with pytest.raises(RuntimeError, match="has seen no kernel"):
        cuda_operators(lambda: None, device, 132, record=Recorded({"traceEvents": []}))


@pytest.mark.parametrize(("visible", "expected"), [(True, 0.625 * 400e-6 / 1e-3), (False, 0.5)])
def test_without_the_profiler_the_batch_is_doubled(
    monkeypatch: pytest.MonkeyPatch, visible: bool, expected: float
) -> None:
    kernels = kernels_in(TRACE, 132, 2) if visible else None

    def operators(self: Any) -> list[OperatorDemand]:
        if kernels is None:
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
        return kernels

    monkeypatch.setattr(profiler._Probe, "operators", operators)
    monkeypatch.setattr(profiler._Probe, "_cuda_step_s", lambda self, budget_s: 1.5e-3)
    workload = Pictures("pictures")
    model = workload.build_model()
    probe = profiler._Probe(workload, Device(name="t", kind="cpu", num_cores=1), model, torch.Generator())
    assert probe._cuda_demand(1e-3, 0.1) == pytest.approx(expected)


def test_the_runtime_tells_operators() -> None:
    runtime = EmbeddedRuntime("runtime_fakes:build", SharingSettings(cores=1))
    found = runtime.operators(hold("pictures")[0])
    assert "aten::convolution_backward" in {operator.name for operator in found}
    assert virtual_resource.demand_of(found) == 1.0
