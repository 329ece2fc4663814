"""What a link can do: a short probe with pings of two sizes, then its own messages, without clocks that agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MIN_BYTES = 4096
_FORGET = 0.8
_MIN_PAIRS = 3
_NUM_SMALL_PINGS = 3
_FIRST_PING_BYTES, _LAST_PING_BYTES = 16 << 10, 1 << 20
# A direction is measured once its bytes have taken this long; with the pings before, that is about 0.1 s.
_ENOUGH_S = 0.05

# Sends so many bytes, asks for so many back, and says how long that took; None when the link broke meanwhile.
Ping = Callable[[int, int], float | None]


@dataclass(frozen=True, kw_only=True)
class ProbedLink:
    """One-way latency in seconds, rates in bytes per second. None where the probe was interrupted."""

    latency_s: float | None = None
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None


def probe_link(ping: Ping) -> ProbedLink:
    """Measure an idle link. What a message takes whatever its size is part of the small pings, and taken off."""
    times = [ping(0, 0) for _ in range(_NUM_SMALL_PINGS)]
    empty_s = min((time for time in times if time is not None), default=None)
    if empty_s is None:
        return ProbedLink()
    return ProbedLink(
        latency_s=empty_s / 2,
        uplink_bytes_per_s=_probe_direction(lambda size: ping(size, 0), empty_s),
        downlink_bytes_per_s=_probe_direction(lambda size: ping(0, size), empty_s),
    )


def _probe_direction(ping: Callable[[int], float | None], empty_s: float) -> float | None:
    size = _FIRST_PING_BYTES
    while True:
        time_s = ping(size)
        if time_s is None:
            return None
        if time_s - empty_s > _ENOUGH_S or size >= _LAST_PING_BYTES:
            return size / (time_s - empty_s) if time_s > empty_s else None
        size *= 4


class RateEstimate:
    """Bytes per second of one direction, from pairs of messages of which the second had to wait for the first.

    Then the link was busy with the second one for the whole time between their arrivals. That is so when they arrive
    much further apart than they were queued, or when the first was still on its way as the second was queued (judged
    by the shortest time that any message took). Queueing and arrival may be on two clocks: only differences count.
    Old pairs are forgotten by and by.
    """

    def __init__(self) -> None:
        self.probed: float | None = None
        self._bytes = 0.0
        self._seconds = 0.0
        self._num_pairs = 0
        self._before: tuple[float, float] | None = None
        self._shortest_s = math.inf

    @property
    def bytes_per_s(self) -> float | None:
        """What the messages say, or the probe while there were too few; None when neither says anything."""
        return self._bytes / self._seconds if self._num_pairs >= _MIN_PAIRS else self.probed

    def interrupt(self) -> None:
        """The next message has no predecessor: something else than the link holds messages up."""
        self._before = None

    def observe(self, queued_s: float, arrived_s: float, num_bytes: int) -> None:
        """The next message of the direction: when it was queued, when its last byte arrived, and its size."""
        before, self._before = self._before, (queued_s, arrived_s)
        self._shortest_s = min(self._shortest_s, arrived_s - queued_s)
        if before is None or num_bytes < MIN_BYTES:
            return
        apart_s = arrived_s - before[1]
        waited = queued_s + self._shortest_s <= before[1] or apart_s >= 2 * (queued_s - before[0])
        if waited and apart_s > 0:
            self._bytes = self._bytes * _FORGET + num_bytes
            self._seconds = self._seconds * _FORGET + apart_s
            self._num_pairs += 1
