"""A benchmark's time: what is left, dealt out over its parts. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds that may still be spent.

    Args:
        total_s: seconds from now.
        clock: seconds, rising.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._end_s = self._started_s + total_s

    @property
    def spent_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def left_s(self) -> float:
        """Not below 0."""
        return max(0.0, self._end_s - self._clock())

    def part(self, weight: float, of: float) -> Budget:
        """A budget of `weight / of` of what is left; what it does not use stays here."""
        return Budget(self.left_s * min(1.0, weight / of), self._clock)
