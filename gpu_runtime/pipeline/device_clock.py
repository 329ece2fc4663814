"""Seconds of work on a device, and a slower device than this one acted out by sleeping."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class DeviceClock:
    """Measures pieces of work, and stretches each to `slowdown` times its own time.

    Own time is CPU time of the working thread on the CPU, so that what others do there at the same time is not
    stretched too; on CUDA the time until the device is done. Used by one thread.

    Args:
        device: where the work runs.
        slowdown: 1: as fast as this device is.

    Attributes:
        busy_s: seconds of work so far, sleep included.
    """

    def __init__(self, device: torch.device, slowdown: float = 1.0) -> None:
        if not slowdown >= 1:
            raise ValueError(f"a device can be slowed down by a factor of 1 or more, not {slowdown}")
        self._device, self._slowdown = device, slowdown
        self._owed_s = 0.0
        self.busy_s = 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A piece of work; it is stretched when the block is left without an error."""
        started_s, own_started_s = time.perf_counter(), time.thread_time()
        yield
        if self._slowdown > 1:
            self._stretch(started_s, own_started_s)
        self.busy_s += time.perf_counter() - started_s

    def _stretch(self, started_s: float, own_started_s: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            own_s = time.perf_counter() - started_s
        else:
            own_s = time.thread_time() - own_started_s
        # Sleeping always lasts a little too long: what is over counts for the next piece.
        self._owed_s += self._slowdown * own_s - (time.perf_counter() - started_s)
        if self._owed_s > 0:
            asleep_s = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - asleep_s
        else:
            self._owed_s = 0.0
