"""What a GPU says about itself while a round runs: utilisation, memory and power, read from NVML by a thread.

Used by runtime.py when a plan asks for a trace; trace.py draws the samples. Nothing here may disturb training: every
read may fail, and a driver that does not answer costs the samples, not the round.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gpu_runtime.contracts import DeviceSample
from gpu_runtime.device import CUDA, Device, nvml_handle

# NVML averages utilisation over a sixth of a second or more: to look more often would show nothing new.
PERIOD_S = 0.15
# A round that lasts longer is sampled half as often, again and again: its report is a message.
MAX_SAMPLES = 600
# A reading that has failed so often in a row is not asked for again.
MAX_FAILURES = 3
# What a driver may take for its last answer when a round ends.
LAST_S = 0.5

Number = TypeVar("Number", bound=float)


class DeviceSampler:
    """Samples a device from `start` to `stop`. Does nothing on other devices than CUDA.

    Args:
        device: whose.
        origin_s: `time.perf_counter()` from which times count.
        period_s: seconds between samples, at first.
        max_samples: most samples that are kept.
    """

    # Of this process: a driver that hung in the last round would keep a thread of every round.
    _last: threading.Thread | None = None

    def __init__(
        self, device: Device, origin_s: float, *, period_s: float = PERIOD_S, max_samples: int = MAX_SAMPLES
    ) -> None:
        self._device, self._origin_s = device, origin_s
        self._period_s, self._max_samples = period_s, max_samples
        self._samples: list[DeviceSample] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        last = DeviceSampler._last
        if self._device.kind == CUDA and (last is None or not last.is_alive()):
            DeviceSampler._last = self._thread = threading.Thread(
                target=self._sample, name="device samples", daemon=True
            )
            self._thread.start()

    def stop(self) -> tuple[DeviceSample, ...]:
        """The samples so far. A read that does not return is left to itself."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(LAST_S)
        return tuple(self._samples)

    # ------------------------------------------------------------------------------------------------------ internals

    def _sample(self) -> None:
        """Body of the thread."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library, no driver, no permission: nothing to see
            return
        with contextlib.suppress(Exception):  # the device has gone, or is hidden from this container
            self._read_until_stopped(pynvml, nvml_handle(pynvml, self._device.index))
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()

    def _read_until_stopped(self, pynvml: Any, handle: Any) -> None:
        busy = _Reading[float](lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        memory = _Reading[int](lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
        power = _Reading[float](lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        while not (busy.off and memory.off and power.off):
            sample = DeviceSample(
                time_s=time.perf_counter() - self._origin_s,
                busy_fraction=busy.read(),
                memory_bytes=memory.read(),
                power_w=power.read(),
            )
            if self._stopping.is_set() and self._samples:
                return
            if (sample.busy_fraction, sample.memory_bytes, sample.power_w) != (None, None, None):
                self._keep(sample)
            if self._stopping.wait(self._period_s):
                return

    def _keep(self, sample: DeviceSample) -> None:
        if len(self._samples) >= self._max_samples:
            self._samples = self._samples[::2]
            self._period_s *= 2
        self._samples.append(sample)


class _Reading(Generic[Number]):
    """One number that a device may tell or not."""

    def __init__(self, call: Callable[[], Number]) -> None:
        self._call = call
        self._num_failures = 0

    @property
    def off(self) -> bool:
        return self._num_failures >= MAX_FAILURES

    def read(self) -> Number | None:
        if self.off:
            return None
        try:
            value: Number = self._call()
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a device cannot have {value} of anything")
        except Exception:  # forbidden, unsupported, lost: all mean "unknown"
            self._num_failures += 1
            return None
        self._num_failures = 0
        return value
