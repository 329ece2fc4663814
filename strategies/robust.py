"""Aggregators that a minority of lying or broken clients cannot move far, on moves normalised for uneven steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from strategies.aggregation import is_parameter
from strategies.moves import Floats, Moves, shaped, squares
from strategies.options import StrategyOptions
from strategies.replies import NDArray, Update
from strategies.task_aggregators import NormalisedAverage, TaskAggregator

Stack = npt.NDArray[np.inexact]
MAX_STEPS = 100
# Of the largest move: when the geometric median has come to rest, and the floor of its distances.
TOLERANCE = 1e-7


class RobustAggregator(TaskAggregator):
    """Joins moves array by array. Buffers, statistics and counters are the (lower) median of the clients' values."""

    compares_updates = True

    def aggregate(
        self, server_round: int, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        moves = Moves.weighted(updates, current, self.weighting, self.model)
        joined = self.join(moves)
        return {
            key: joined[key] if key in joined else self._other(key, start, moves.updates)
            for key, start in current.items()
        }

    @abstractmethod
    def join(self, moves: Moves) -> dict[str, NDArray]:
        """The parameters after the round."""

    def _other(self, key: str, start: NDArray, ordered: Sequence[Update]) -> NDArray:
        assert not is_parameter(key, start, self.model)
        if self.model is not None and key in self.model.frozen:
            return start
        stack = np.sort(np.stack([update.arrays[key] for update in ordered]), axis=0)
        return np.asarray(stack[(len(ordered) - 1) // 2])


class TrimmedMean(RobustAggregator):
    """Per element, the mean without the smallest and largest clients (Yin et al., ICML 2018). All weigh the same."""

    def __init__(self, weighting: str = "used", fraction: float = 0.2) -> None:
        super().__init__(weighting)
        self._fraction = fraction

    def join(self, moves: Moves) -> dict[str, NDArray]:
        # Rounded up, as the check for odd updates is off: 0.2 of three clients must not cut nobody.
        cut = min(math.ceil(self._fraction * len(moves) - 1e-9), (len(moves) - 1) // 2)
        return {key: moves.moved(key, _trimmed(moves.of(key), cut)) for key in moves.keys}


class CoordinateMedian(RobustAggregator):
    """Per element, the median (Yin et al., ICML 2018). All clients weigh the same."""

    def join(self, moves: Moves) -> dict[str, NDArray]:
        return {key: moves.moved(key, _trimmed(moves.of(key), (len(moves) - 1) // 2)) for key in moves.keys}


class GeometricMedian(RobustAggregator):
    """The point of least weighted distance to all moves, by Weiszfeld steps with a floor under distances.

    Pillutla, Kakade and Harchaoui, "Robust aggregation for federated learning", 2019, algorithm 2.
    """

    def join(self, moves: Moves) -> dict[str, NDArray]:
        point = {key: _trimmed(moves.of(key), (len(moves) - 1) // 2) for key in moves.keys}
        floor = TOLERANCE * float(np.sqrt(np.median(moves.squared_norms()))) or TOLERANCE
        for _ in range(MAX_STEPS):
            distances = np.sqrt(sum((squares(moves.of(key) - point[key]) for key in moves.keys), np.zeros(len(moves))))
            factors = moves.weights / np.maximum(distances, floor)
            factors /= factors.sum()
            step = 0.0
            for key in moves.keys:
                stack = moves.of(key)
                new = np.sum(shaped(factors, stack) * stack, axis=0)
                step += float(np.sum(np.abs(new - point[key]) ** 2))
                point[key] = new
            if step <= floor**2:
                break
        return {key: moves.moved(key, point[key]) for key in moves.keys}


class NormClipping(RobustAggregator):
    """The weighted mean of moves shortened to `bound` (Sun et al., 2019); 0: the (lower) median of their lengths."""

    def __init__(self, weighting: str = "used", bound: float = 0.0) -> None:
        super().__init__(weighting)
        self._bound = bound

    def join(self, moves: Moves) -> dict[str, NDArray]:
        norms = np.sqrt(moves.squared_norms())
        bound = self._bound or float(np.sort(norms)[(len(norms) - 1) // 2])
        factors = moves.weights * clip_factors(norms, bound)
        return {
            key: moves.moved(key, np.sum(shaped(factors, stack) * stack, axis=0))
            for key, stack in ((key, moves.of(key)) for key in moves.keys)
        }


def clip_factors(norms: Floats, bound: float) -> Floats:
    """What shortens vectors of these lengths to at most `bound`."""
    return np.asarray(bound / np.maximum(norms, max(bound, np.finfo(np.float64).tiny)), dtype=np.float64)


def _trimmed(stack: Stack, cut: int) -> Stack:
    """The mean per element of what is left when `cut` clients are taken from either end; complex ones part by part."""
    if np.iscomplexobj(stack):
        return np.asarray(_trimmed(stack.real, cut) + 1j * _trimmed(stack.imag, cut))
    ordered = np.sort(stack, axis=0)
    return np.asarray(ordered[cut : len(stack) - cut].mean(axis=0))


def aggregator_of(options: StrategyOptions) -> TaskAggregator:
    """A new aggregator of one task, as `strategy.aggregator` says."""
    weighting = options.weighting
    makers: Mapping[str, Callable[[], TaskAggregator]] = {
        "normalised": lambda: NormalisedAverage(weighting),
        "coordinate-median": lambda: CoordinateMedian(weighting),
        "trimmed-mean": lambda: TrimmedMean(weighting, options.trim_fraction),
        "geometric-median": lambda: GeometricMedian(weighting),
        "norm-clipping": lambda: NormClipping(weighting, options.norm_bound),
    }
    return makers[options.aggregator]()
