"""The rate of a link as its own messages show it, without clocks that agree."""

from __future__ import annotations

MIN_BYTES = 4096
_BACKED_UP = 1.1
_FORGET = 0.9


class RateEstimate:
    """Bytes per second of one direction, from pairs of messages of which the second had to wait for the first.

    A link that has nothing to wait for delivers messages as far apart as they were queued. Where they arrive further
    apart, the link was busy for all of that time with the second one. Seconds may be on two clocks, one for queueing
    and one for arrival; only differences count. Old pairs are forgotten by and by.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._before: tuple[float, float] | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """None before anything was measured."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    def add(self, num_bytes: float, seconds: float) -> None:
        """So many bytes kept the link busy for so long."""
        if seconds > 0 and num_bytes > 0:
            self._bytes = self._bytes * _FORGET + num_bytes
            self._seconds = self._seconds * _FORGET + seconds

    def interrupt(self) -> None:
        """The next message has no predecessor: something else than the link held messages up."""
        self._before = None

    def observe(self, queued_s: float, arrived_s: float, num_bytes: int) -> None:
        """The next message of the direction: when it was queued, when its last byte arrived, and its size."""
        before, self._before = self._before, (queued_s, arrived_s)
        if before is None or num_bytes < MIN_BYTES:
            return
        apart_s = arrived_s - before[1]
        if apart_s > _BACKED_UP * (queued_s - before[0]):
            self.add(num_bytes, apart_s)
