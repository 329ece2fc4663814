"""Joins the checked updates of one task to new weights, always in the order of client names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.replies import NDArray, Update

# Running statistics of normalisation layers: averages of what was seen, not parameters that steps moved.
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """What the server knows of a task's model beyond its arrays. Keys as on the wire.

    Attributes:
        trainable: parameters that local steps move.
        frozen: parameters that they do not (`requires_grad` is False): they stay what they are.
        momentum: of the local optimiser; 0 where it has none, or where steps are to be counted as they are.
        nesterov: whether that momentum is Nesterov's.
    """

    trainable: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    momentum: float = 0.0
    nesterov: bool = False

    def effective_steps(self, num_steps: int) -> float:
        """How far `num_steps` local steps go, in units of one: the 1-norm of FedNova's `a` (Wang et al. 2020, sec. 4).

        Momentum m starts at zero each round, so step t of n passes its gradient on with (1 - m^(n-t+1)) / (1 - m):

            |a| = (n - m (1 - m^n) / (1 - m)) / (1 - m)

        Nesterov's steps are the gradient and m times that momentum: n + m |a|.
        """
        m = self.momentum
        if not m:
            return float(num_steps)
        plain: float = (num_steps - m * (1.0 - m**num_steps) / (1.0 - m)) / (1.0 - m)
        return num_steps + m * plain if self.nesterov else plain


def weight_of(update: Update, weighting: str) -> float:
    """Examples used this round, or held, by `weighting`."""
    return float(update.num_examples if weighting == "used" else update.num_held)


def is_parameter(key: str, value: NDArray, model: TaskModel | None = None) -> bool:
    """Whether local steps moved this array, so that server arithmetic on differences makes sense.

    Without a `model` told by the server it goes by type and name.
    """
    inexact = bool(np.issubdtype(value.dtype, np.inexact))
    if model is not None:
        return inexact and key in model.trainable
    return inexact and not key.endswith(STATISTICS)


def normalised_average(
    updates: Sequence[Update],
    current: Mapping[str, NDArray],
    weighting: str = "used",
    model: TaskModel | None = None,
) -> dict[str, NDArray]:
    """FedNova (Wang et al., NeurIPS 2020, eq. 9): clients that made more local steps do not pull harder.

        x_new = x + tau_eff * sum_d p_d (x_d - x) / tau_d        1 / tau_eff = sum_d p_d / tau_d

    with tau_d the local steps (`TaskModel.effective_steps`) and p_d the weights, which sum to 1. At equal steps this is
    the weighted average. Sums are made in float64. Arrays that no step moved: see `other_arrays`.

    The paper leaves tau_eff free and uses sum_d p_d tau_d. With that, factors add up to more than 1 when steps differ
    (1.7 at 10, 15, 90 and 135 steps), and steps that have already brought clients near an optimum overshoot it. The
    harmonic mean is the largest tau_eff at which x_new is still a convex combination of the clients' weights.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    weights = client_weights(ordered, weighting)
    steps = local_steps(ordered, model)
    factors = weights / steps / float(np.sum(weights / steps))
    joined = other_arrays(ordered, current, weighting, model)
    for key, start in current.items():
        if key not in joined:
            wide = np.complex128 if np.iscomplexobj(start) else np.float64
            origin = start.astype(wide)
            moved = sum(
                (
                    factor * (update.arrays[key].astype(wide) - origin)
                    for factor, update in zip(factors, ordered, strict=True)
                ),
                start=np.zeros_like(origin),
            )
            joined[key] = np.asarray(origin + moved).astype(start.dtype)
    return {key: joined[key] for key in current}


def other_arrays(
    updates: Sequence[Update],
    current: Mapping[str, NDArray],
    weighting: str = "used",
    model: TaskModel | None = None,
) -> dict[str, NDArray]:
    """Arrays that are no parameters: running statistics by weighted average, integers and flags (counters) from the
    client of the largest weight, the first by name among equals, since an average of counts counts nothing. Frozen
    parameters stay.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    weights = client_weights(ordered, weighting)
    heaviest = ordered[int(np.argmax(weights))]
    joined: dict[str, NDArray] = {}
    for key, start in current.items():
        if is_parameter(key, start, model):
            continue
        if model is not None and key in model.frozen:
            joined[key] = start
        elif model is not None and np.issubdtype(start.dtype, np.inexact) and not key.endswith(STATISTICS):
            # As a difference, so that constants stay to the last bit.
            moved = np.zeros(start.shape, dtype=np.result_type(start.dtype, np.float64))
            for weight, update in zip(weights, ordered, strict=True):
                moved += weight * (update.arrays[key].astype(moved.dtype) - start)
            joined[key] = np.asarray(start + moved).astype(start.dtype)
        elif np.issubdtype(start.dtype, np.inexact):
            total = np.zeros(start.shape, dtype=np.float64)
            for weight, update in zip(weights, ordered, strict=True):
                total += weight * update.arrays[key].astype(np.float64)
            joined[key] = total.astype(start.dtype)
        else:
            joined[key] = heaviest.arrays[key]
    return joined


def mean_loss(updates: Sequence[Update]) -> float | None:
    """Mean training loss over examples, None where no client reported one."""
    known = [update for update in sorted(updates, key=lambda update: update.client) if update.mean_loss is not None]
    if not known:
        return None
    total = sum(update.num_examples for update in known)
    return sum(update.num_examples * update.mean_loss for update in known if update.mean_loss is not None) / total


def local_steps(ordered: Sequence[Update], model: TaskModel | None = None) -> npt.NDArray[np.float64]:
    """The effective local steps of each update."""
    model = model or TaskModel()
    return np.array([model.effective_steps(update.num_steps) for update in ordered], dtype=np.float64)


def client_weights(ordered: Sequence[Update], weighting: str) -> npt.NDArray[np.float64]:
    """Each update's part of the whole, by `weighting`."""
    weights = np.array([weight_of(update, weighting) for update in ordered], dtype=np.float64)
    return np.asarray(weights / weights.sum(), dtype=np.float64)
