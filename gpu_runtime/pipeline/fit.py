"""Seconds of a call and of an example, from calls timed at a few batch sizes. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from gpu_runtime.pipeline.makespan import Affine, not_negative


def fit_affine(samples: Iterable[tuple[int, float]]) -> Affine:
    """The line `call_s + n * example_s` through timings (n, seconds), neither part negative.

    Of several timings at one n the median counts, so that a few disturbed ones do no harm. Squares of *relative* errors
    are least: small batches matter as much as large ones. One n alone says nothing of `call_s`, which is 0 then.
    Example: 3 s for 1 example and 6 s for 4 are 2 s a call and 1 s an example.

    Raises:
        ValueError: no timings, or some that make no sense.
    """
    by_size: dict[int, list[float]] = {}
    for num_examples, seconds in samples:
        if num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, not {num_examples}")
        not_negative("seconds", seconds)
        by_size.setdefault(num_examples, []).append(seconds)
    if not by_size:
        raise ValueError("samples must not be empty")
    points = [(size, statistics.median(seconds)) for size, seconds in sorted(by_size.items())]
    if len(points) == 1 or points[-1][1] == 0:
        size, seconds = points[-1]
        return Affine(example_s=seconds / size)
    shortest_s = max(points[-1][1] * 1e-3, 1e-12)
    weighted = [(1.0 / max(seconds, shortest_s) ** 2, float(size), seconds) for size, seconds in points]
    weight = sum(w for w, _, _ in weighted)
    mean_size = sum(w * size for w, size, _ in weighted) / weight
    mean_s = sum(w * seconds for w, _, seconds in weighted) / weight
    slope = sum(w * (size - mean_size) * (seconds - mean_s) for w, size, seconds in weighted) / sum(
        w * (size - mean_size) ** 2 for w, size, _ in weighted
    )
    if slope < 0:  # no dearer with more examples: all of it is the call
        return Affine(call_s=mean_s)
    if mean_s < slope * mean_size:  # dearer than in proportion: the best line through nothing
        return Affine(
            example_s=sum(w * size * seconds for w, size, seconds in weighted)
            / sum(w * size * size for w, size, _ in weighted)
        )
    return Affine(call_s=mean_s - slope * mean_size, example_s=slope)
