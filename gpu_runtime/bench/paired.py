"""Paired ratios: what two variants took in the same rounds, with a bootstrap interval. Plain Python."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_PAIRS = 5
NUM_BOOTSTRAP = 2000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Median of paired ratios with its bootstrap 95 % interval, from `num_pairs` pairs."""

    median: float
    low: float
    high: float
    num_pairs: int

    def excludes_up_to(self, limit: float) -> bool:
        """Whether the interval lies wholly above `limit`."""
        return self.low > limit


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Median of `values` and its percentile bootstrap interval; the same seed gives the same interval.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"an interval needs finite values, not {list(values)}")
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_BOOTSTRAP))
    return Interval(
        median=statistics.median(values),
        low=medians[int(0.025 * NUM_BOOTSTRAP)],
        high=medians[int(0.975 * NUM_BOOTSTRAP) - 1],
        num_pairs=len(values),
    )


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float], seed: int = 0) -> Interval | None:
    """Interval of `values[round] / baseline[round]` over the rounds that both have; None where there is none."""
    rounds = sorted(values.keys() & baseline.keys())
    return interval([values[each] / baseline[each] for each in rounds], seed) if rounds else None
