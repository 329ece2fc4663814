"""Loads in whole examples: bounds, even filling between bounds, and rounding that keeps bounds and sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strategies.options import StrategyError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]

# Solvers are exact to about 1e-8; remainders nearer than this are ties, broken by the order of clients.
REMAINDER_DIGITS = 5


def whole_bounds(task: str, held: Ints, min_load: float, max_load: float, total: int) -> tuple[Ints, Ints]:
    """Least and largest whole load of each client that holds `held` examples of `task`.

    `min_load` n is rounded up and `max_load` n down; the other way round where only that lets the total be met.

    Raises:
        StrategyError: no holder, or `total` is outside what the bounds allow.
    """
    if not len(held):
        raise StrategyError(f"task {task!r}: no client holds an example of it")
    num_held = int(held.sum())
    lower = np.ceil(min_load * held - 1e-9).astype(int)
    if lower.sum() > total:
        lower = np.floor(min_load * held + 1e-9).astype(int)
    upper = np.maximum(np.floor(max_load * held + 1e-9).astype(int), lower)
    if upper.sum() < total:
        upper = np.ceil(max_load * held - 1e-9).astype(int)
    if total > upper.sum():
        raise StrategyError(
            f"task {task!r}: {total} examples a round are more than strategy.max-load {max_load:g} times the "
            f"{num_held} held; the most that can be trained is {upper.sum()} (examples-per-round {max_load:g})"
        )
    if total < lower.sum():
        raise StrategyError(
            f"task {task!r}: {total} examples a round are fewer than strategy.min-load {min_load:g} times the "
            f"{num_held} held; the least that can be trained is {lower.sum()} (examples-per-round {min_load:g})"
        )
    return lower, upper


def fill_evenly(weights: Floats, lower: Ints, upper: Ints, total: float) -> Floats:
    """Loads clip(level * weight, lower, upper), with the level at which they sum to `total`.

    The sum rises with the level and bends where a load meets a bound; the bends around the total are found by halving.
    """
    bends = np.unique(np.concatenate([lower / weights, upper / weights]))

    def filled(level: float) -> Floats:
        return np.clip(level * weights, lower, upper)

    low, high = 0, len(bends) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if filled(bends[middle]).sum() <= total else (low, middle)
    below, above = filled(bends[low]), filled(bends[high])
    rise = above.sum() - below.sum()
    fraction = (total - below.sum()) / rise if rise > 0 else 0.0
    return np.asarray(below + fraction * (above - below), dtype=np.float64)


def whole_loads(wanted: Floats, lower: Ints, upper: Ints, total: int) -> Ints:
    """Round `wanted` to whole loads within the bounds that sum to `total`, by largest remainder."""
    loads: Ints = np.clip(np.floor(wanted + 10.0**-REMAINDER_DIGITS).astype(int), lower, upper)
    remainders = np.round(wanted - loads, REMAINDER_DIGITS)
    missing = total - int(loads.sum())
    step = 1 if missing > 0 else -1
    while missing:
        # One each, or more where a solver's error on huge loads leaves more missing than there are clients.
        chunk = max(1, abs(missing) // len(loads))
        for pair in np.argsort(-step * remainders, kind="stable"):
            room = upper[pair] - loads[pair] if step > 0 else loads[pair] - lower[pair]
            moved = step * min(chunk, abs(missing), int(room))
            loads[pair] += moved
            remainders[pair] -= moved
            missing -= moved
    return loads
