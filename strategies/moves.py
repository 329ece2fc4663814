"""Moves: how far each client of a task moved each parameter, uneven steps normalised, one array at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from strategies.aggregation import TaskModel, client_weights, is_parameter, local_steps
from strategies.replies import NDArray, Update
from strategies.task_kept import TaskKeptError

Floats = npt.NDArray[np.float64]


class Moves:
    """The normalised moves of one task, which weighted by `weights` add up to `aggregation.normalised_average`.

        u_d = tau_eff (x_d - x) / tau_d        1 / tau_eff = sum_d p_d / tau_d

    So clients can be compared although their loads differ. Arrays are widened one by one, never the whole model of all
    clients at once.

    Args:
        updates: at least one; taken in the order of client names.
        current: the task's arrays they started from.
        weights: one for each update in that order, adding up to 1.
        model: what the server knows of the task's model.

    Attributes:
        keys: the parameters, in the order of `current`.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        current: Mapping[str, NDArray],
        weights: Floats,
        model: TaskModel | None = None,
    ) -> None:
        self.updates = sorted(updates, key=lambda update: update.client)
        self.current = current
        self.weights = weights
        self.keys = [key for key, value in current.items() if is_parameter(key, value, model)]
        steps = local_steps(self.updates, model)
        self._scales = 1.0 / steps / float(np.sum(weights / steps))

    @classmethod
    def weighted(
        cls,
        updates: Sequence[Update],
        current: Mapping[str, NDArray],
        weighting: str,
        model: TaskModel | None = None,
    ) -> Moves:
        """Weights by examples used or held."""
        ordered = sorted(updates, key=lambda update: update.client)
        return cls(ordered, current, client_weights(ordered, weighting), model)

    @classmethod
    def equal(cls, updates: Sequence[Update], current: Mapping[str, NDArray], model: TaskModel | None = None) -> Moves:
        """Every update weighs the same."""
        return cls(updates, current, np.full(len(updates), 1.0 / len(updates)), model)

    def __len__(self) -> int:
        return len(self.updates)

    def of(self, key: str) -> npt.NDArray[np.inexact]:
        """Moves of one parameter in float64 (complex128), the first axis running over clients."""
        wide = np.complex128 if np.iscomplexobj(self.current[key]) else np.float64
        origin = self.current[key].astype(wide)
        return np.stack(
            [
                scale * (update.arrays[key].astype(wide) - origin)
                for scale, update in zip(self._scales, self.updates, strict=True)
            ]
        )

    def squared_norms(self) -> Floats:
        """Of each client's whole move, over all parameters."""
        total = np.zeros(len(self))
        for key in self.keys:
            total += squares(self.of(key))
        return total

    def moved(self, key: str, move: npt.NDArray[np.inexact]) -> NDArray:
        """The parameter after `move`, in its own type.

        Raises:
            TaskKeptError: the result is out of its range.
        """
        start = self.current[key]
        wide = start.astype(move.dtype) + move
        with np.errstate(over="ignore"):
            narrow = np.asarray(wide).astype(start.dtype)
        if not np.isfinite(narrow).all():
            raise TaskKeptError(f"array {key!r} would hold values beyond {start.dtype}")
        return np.asarray(narrow)


def squares(stack: npt.NDArray[np.inexact]) -> Floats:
    """The sum of squares of each entry along the first axis."""
    flat = np.abs(stack.reshape(len(stack), -1))
    return np.asarray(np.einsum("ij,ij->i", flat, flat), dtype=np.float64)


def shaped(factors: Floats, stack: npt.NDArray[np.inexact]) -> Floats:
    """`factors`, one for each client, so that they multiply `stack`."""
    return factors.reshape(-1, *[1] * (stack.ndim - 1))
