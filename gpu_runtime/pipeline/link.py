"""Emulated links: when a message that is queued now would have arrived over a slower link.

Nothing here waits. Whoever holds the message keeps it back until then (`channel`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from gpu_runtime.contracts import Emulation

Clock = Callable[[], float]


class Direction:
    """One direction of a link: a queue that sends one message after the other, and a delay behind it.

    A message of b bytes occupies the link for `message_s + b / rate`, from when it is queued or from when the one
    before has left, whichever is later, and arrives `latency_s` after it has left. Latency takes no throughput.

    Args:
        rates: (from when on, bytes per second or None for unlimited) in order of time; the first from 0.
        latency_s: one way.
        message_s: what a message occupies the link for, whatever its size.
    """

    def __init__(self, rates: Sequence[tuple[float, float | None]], latency_s: float, message_s: float) -> None:
        self._rates = rates
        self._latency_s = latency_s
        self._message_s = message_s
        self._free_at_s = 0.0
        self.unlimited = latency_s == 0 and message_s == 0 and all(rate is None for _, rate in rates)

    def arrival_s(self, queued_s: float, num_bytes: int) -> float:
        """When a message queued at `queued_s` arrives. Called in the order in which messages are queued."""
        start_s = max(queued_s, self._free_at_s) + self._message_s
        self._free_at_s = self._sent_s(start_s, num_bytes)
        return self._free_at_s + self._latency_s

    def _sent_s(self, at_s: float, num_bytes: float) -> float:
        """When the last of the bytes has left that begin to leave at `at_s`."""
        for i, (_, rate) in enumerate(self._rates):
            until_s = self._rates[i + 1][0] if i + 1 < len(self._rates) else math.inf
            if until_s <= at_s:
                continue
            if rate is None:
                return at_s
            if at_s + num_bytes / rate <= until_s:
                return at_s + num_bytes / rate
            num_bytes -= (until_s - at_s) * rate
            at_s = until_s
        return at_s


class EmulatedLink:
    """The link of one device, shared by all its channels, thread-safe. Its time begins with its first message.

    Args:
        emulation: rates, latency and changes.
        clock: seconds.
    """

    def __init__(self, emulation: Emulation, clock: Clock = time.monotonic) -> None:
        changes = emulation.changes
        up = [(0.0, emulation.uplink_bytes_per_s), *((c.at_s, c.uplink_bytes_per_s) for c in changes)]
        down = [(0.0, emulation.downlink_bytes_per_s), *((c.at_s, c.downlink_bytes_per_s) for c in changes)]
        self._up = Direction(up, emulation.latency_s, emulation.message_s)
        self._down = Direction(down, emulation.latency_s, emulation.message_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s: float | None = None

    def up(self, num_bytes: int) -> float:
        """When, on the clock, a message to the service that is queued now arrives."""
        return self._arrival_s(self._up, num_bytes)

    def down(self, num_bytes: int) -> float:
        """The same for a message from the service."""
        return self._arrival_s(self._down, num_bytes)

    def _arrival_s(self, direction: Direction, num_bytes: int) -> float:
        now_s = self._clock()
        if direction.unlimited:
            return now_s
        with self._lock:
            if self._began_s is None:
                self._began_s = now_s
            return self._began_s + direction.arrival_s(now_s - self._began_s, num_bytes)
