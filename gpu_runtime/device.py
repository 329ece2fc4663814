"""The device a runtime works on, and how much of it is given: CUDA through torch and NVML, else CPU cores."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CPU, CUDA = "cpu", "cuda"


class DeviceError(ValueError):
    """A device that is asked for and cannot be had."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device. `num_cores` counts CPU cores given, or SMs; `memory_bytes` 0 and `driver` "" mean unknown."""

    name: str
    kind: str
    num_cores: int
    memory_bytes: int = 0
    driver: str = ""
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.kind == CUDA else torch.device(CPU)


@dataclass(frozen=True, kw_only=True)
class NvmlReading:
    """What NVML tells about a GPU now; None where it may not or cannot be read."""

    driver: str | None = None
    utilization_fraction: float | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    power_watt: float | None = None
    energy_joule: float | None = None


def discover(cores: int = 0, kind: str = "") -> Device:
    """The device to work on: the current CUDA device where there is one, else the CPU.

    `torch.accelerator.current_accelerator()` names cuda on machines without one; only `is_available` is believed.

    Args:
        cores: CPU cores the runtime may use; 0 for those that the environment gives.
        kind: "cpu" or "cuda" to insist on one.

    Raises:
        DeviceError: cuda is asked for and absent.
    """
    if kind == CUDA and not torch.cuda.is_available():
        raise DeviceError("a cuda device was asked for, and torch.cuda.is_available() is false")
    if kind != CPU and torch.cuda.is_available():
        return _cuda_device(torch.cuda.current_device())
    return Device(name=_cpu_name(), kind=CPU, num_cores=cores_given(cores), memory_bytes=_host_memory_bytes())


def cores_given(asked: int = 0) -> int:
    """CPU cores this process may use: `asked` (0: OMP_NUM_THREADS if set), never more than the system allows it."""
    allowed = _cores_allowed()
    wanted = asked or _positive_int(os.environ.get("OMP_NUM_THREADS", "")) or allowed
    return max(1, min(wanted, allowed))


def read_nvml(index: int = 0) -> NvmlReading:
    """Read what NVML allows; containers, MIG and missing libraries leave fields None and never raise."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: all mean "unknown"
        return NvmlReading()
    try:
        handle = nvml_handle(pynvml, index)
    except Exception:
        handle = None

    def read(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception:  # every single read may be forbidden or unsupported
            return None

    memory = read(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    utilization = read(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    reading = NvmlReading(
        driver=read(lambda: str(pynvml.nvmlSystemGetDriverVersion())),
        utilization_fraction=read(lambda: utilization.gpu / 100),
        memory_total_bytes=read(lambda: int(memory.total)),
        memory_free_bytes=read(lambda: int(memory.free)),
        power_watt=read(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        energy_joule=read(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
    )
    read(pynvml.nvmlShutdown)
    return reading


def nvml_handle(pynvml: Any, index: int) -> Any:
    """NVML's handle of torch's CUDA device `index`; raises whatever NVML does.

    By its UUID, because NVML counts all devices of the machine, in the order of the bus, and torch those that
    CUDA_VISIBLE_DEVICES leaves. By index where torch or NVML do not know the UUID.
    """
    try:
        uuid = torch.cuda.get_device_properties(index).uuid
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # no CUDA here, a part of a device (MIG), an older library
        return pynvml.nvmlDeviceGetHandleByIndex(index)


def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        name=properties.name,
        kind=CUDA,
        num_cores=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        driver=read_nvml(index).driver or "",
        index=index,
    )


def _cores_allowed() -> int:
    """Cores in the affinity mask, cut to the container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return affinity if quota == "max" else max(1, min(affinity, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return affinity


def _positive_int(text: str) -> int:
    """First number of OMP_NUM_THREADS (it may be a list, one per nesting level), 0 where there is none."""
    head = text.split(",")[0].strip()
    return int(head) if head.isdecimal() else 0


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "CPU"


def _host_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
