"""What is given is used, never more; what cannot be read is unknown."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_runtime import device as device_module
from gpu_runtime.device import DeviceError, NvmlReading, cores_given, discover, read_nvml


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_cores_allowed", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("asked", "variable", "given"),
    [
        (0, None, 8),
        (0, "2", 2),
        (0, "4,2", 4),
        (0, "all", 8),
        (0, "0", 8),
        (0, "99", 8),
        (3, "2", 3),
        (99, None, 8),
    ],
)
def test_cores_given(monkeypatch: pytest.MonkeyPatch, asked: int, variable: str | None, given: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores_given(asked) == given


def test_the_cpu_is_described() -> None:
    device = discover(kind="cpu")
    assert device.kind == "cpu"
    assert device.name
    assert device.num_cores >= 1
    assert device.torch_device == torch.device("cpu")


def test_an_accelerator_that_is_only_named_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert discover().kind == "cpu"
    with pytest.raises(DeviceError, match="is_available"):
        discover(kind="cuda")


def test_cuda_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H200", multi_processor_count=132, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device_module, "read_nvml", lambda index: NvmlReading(driver="580.1"))
    found = discover()
    assert (found.kind, found.num_cores, found.memory_bytes, found.driver) == ("cuda", 132, 1 << 37, "580.1")
    assert found.torch_device == torch.device("cuda", 1)
    assert discover(kind="cpu").kind == "cpu"


class FakeNvml(SimpleNamespace):
    """pynvml with some calls forbidden."""

    def __init__(self, *forbidden: str) -> None:
        def answer(name: str, value: Any) -> Any:
            def call(*_: object) -> Any:
                if name in forbidden:
                    raise RuntimeError("Insufficient Permissions")
                return value

            return call

        super().__init__(
            nvmlInit=answer("init", None),
            nvmlShutdown=answer("shutdown", None),
            nvmlDeviceGetHandleByIndex=answer("handle", "handle"),
            nvmlDeviceGetMemoryInfo=answer("memory", SimpleNamespace(total=100, free=40)),
            nvmlDeviceGetUtilizationRates=answer("utilization", SimpleNamespace(gpu=50)),
            nvmlSystemGetDriverVersion=answer("driver", "580.1"),
            nvmlDeviceGetPowerUsage=answer("power", 2000),
            nvmlDeviceGetTotalEnergyConsumption=answer("energy", 3000),
        )


ALL = NvmlReading(
    driver="580.1",
    utilization_fraction=0.5,
    memory_total_bytes=100,
    memory_free_bytes=40,
    power_watt=2.0,
    energy_joule=3.0,
)


@pytest.mark.parametrize(
    ("forbidden", "unknown"),
    [
        ((), ()),
        (("memory",), ("memory_total_bytes", "memory_free_bytes")),
        (("utilization", "power", "shutdown"), ("utilization_fraction", "power_watt")),
        (("energy", "driver"), ("energy_joule", "driver")),
        (("init",), tuple(vars(ALL))),
    ],
)
def test_nvml_reads_that_fail_are_unknown(
    monkeypatch: pytest.MonkeyPatch, forbidden: tuple[str, ...], unknown: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*forbidden))
    expected = {name: None if name in unknown else value for name, value in vars(ALL).items()}
    assert vars(read_nvml()) == expected


def test_without_the_nvml_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml() == NvmlReading()


@pytest.mark.gpu
def test_this_machines_cuda_device() -> None:
    found = discover()
    assert found.kind == "cuda"
    assert found.num_cores > 1
    assert found.memory_bytes > 0
