"""Fakes of `torch.cuda` and of the CUDA driver: they keep a log, and the driver fails on cue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from gpu_runtime.cuda_driver import CudaDriver, CudaDriverError, SmResource


class FakeCuda:
    """As much of `torch.cuda` as a lane uses; events are over only when waited for.

    Args:
        real_time: events carry the host's time; else each takes a millisecond.
        calls: where calls are logged.
    """

    def __init__(self, *, real_time: bool = False, calls: list[str] | None = None) -> None:
        self.calls: list[str] = [] if calls is None else calls
        self.now_ms = 0.0
        self.current = "default"
        self._real_time = real_time

    def is_initialized(self) -> bool:
        return False

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set_device {device}")

    def default_stream(self, device: torch.device) -> Any:
        class Default(str):
            def query(self) -> bool:
                return True

        return Default("default")

    def Stream(self, device: torch.device, priority: int) -> Any:
        self.calls.append(f"stream priority {priority}")
        return self._stream()

    def ExternalStream(self, handle: int, device: torch.device) -> Any:
        self.calls.append(f"external stream {handle}")
        return self._stream()

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
                cuda.now_ms = time.perf_counter() * 1e3 if cuda._real_time else cuda.now_ms + 1.0
                self.at_ms = cuda.now_ms

            def synchronize(self) -> None:
                cuda.calls.append("synchronize event")

            def elapsed_time(self, other: Any) -> float:
                assert enable_timing
                return float(other.at_ms - self.at_ms)

        return Event()

    def _stream(self) -> Any:
        cuda = self

        class Stream:
            def wait_stream(self, other: str) -> None:
                cuda.calls.append(f"wait_stream {other}")

            def synchronize(self) -> None:
                cuda.calls.append("synchronize stream")

        return Stream()


class FakeDriver(CudaDriver):
    """A device of `num_sms` SMs that can be cut into at most `num_units` units of `unit_sms`.

    Args:
        tells_minimum: whether the device's resource tells the least partition, as drivers since CUDA 13 do.
        withheld_sms: SMs that every context has fewer than its parts.
        fail: method name to the number of the call, from 1, from which on it fails.
    """

    def __init__(
        self,
        num_sms: int = 132,
        unit_sms: int = 8,
        num_units: int = 16,
        *,
        cuda_version: tuple[int, int] = (13, 0),
        tells_minimum: bool = True,
        withheld_sms: int = 0,
        fail: dict[str, int] | None = None,
    ) -> None:
        self.num_sms, self.unit_sms, self.num_units = num_sms, unit_sms, num_units
        self.cuda_version, self.tells_minimum, self.withheld_sms = cuda_version, tells_minimum, withheld_sms
        self.fail = fail or {}
        self.calls: list[str] = []
        self.counts: dict[str, int] = {}
        self.contexts: dict[int, frozenset[int]] = {}
        self.streams: dict[int, int] = {}
        self.ever: dict[int, frozenset[int]] = {}
        self._next = 100

    def version(self) -> tuple[int, int]:
        return self.cuda_version

    def device_sms(self, device: int) -> SmResource:
        self._may_fail("device_sms")
        minimum = self.unit_sms if self.tells_minimum else 0
        return SmResource(num_sms=self.num_sms, minimum=minimum, handle=frozenset(range(self.num_sms)))

    def split(self, sms: SmResource, num_groups: int, minimum: int) -> tuple[SmResource, ...]:
        self._may_fail("split")
        size = -(-minimum // self.unit_sms) * self.unit_sms
        count = min(num_groups, self.num_units * self.unit_sms // size)
        return tuple(
            SmResource(num_sms=size, minimum=0, handle=frozenset(range(index * size, (index + 1) * size)))
            for index in range(count)
        )

    def create_context(self, device: int, parts: Sequence[SmResource]) -> int:
        self._may_fail("create_context")
        self._next += 1
        sms = [sm for part in parts for sm in part.handle]
        assert len(set(sms)) == len(sms), "the parts of one context must not overlap"
        self.contexts[self._next] = self.ever[self._next] = frozenset(sms)
        return self._next

    def context_sms(self, context: int) -> int:
        self._may_fail("context_sms")
        return len(self.contexts[context]) - self.withheld_sms

    def destroy_context(self, context: int) -> None:
        assert context in self.contexts
        assert context not in self.streams.values(), "a context must outlive its streams"
        self._may_fail("destroy_context", context)
        del self.contexts[context]

    def create_stream(self, context: int, priority: int) -> int:
        assert context in self.contexts
        self._may_fail("create_stream")
        self._next += 1
        self.streams[self._next] = context
        return self._next

    def destroy_stream(self, stream: int) -> None:
        assert stream in self.streams
        del self.streams[stream]
        self._may_fail("destroy_stream", stream)

    def _may_fail(self, name: str, *arguments: int) -> None:
        count = self.counts[name] = self.counts.get(name, 0) + 1
        self.calls.append(" ".join([name, *map(str, arguments)]))
        if count >= self.fail.get(name, count + 1):
            raise CudaDriverError(f"{name} failed: CUDA_ERROR_INJECTED")
