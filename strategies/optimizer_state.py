"""The state a stock strategy keeps between rounds (moments, momentum): looked at and put back from outside.

Flower's strategies replace their state while they aggregate, also when what comes out cannot be used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

State = dict[str, Any]


def state_of(strategy: Strategy) -> State:
    """A copy of every attribute that holds numbers or has room for them: plain, in arrays, in lists and maps."""
    return {name: copy.deepcopy(value) for name, value in vars(strategy).items() if _is_state(value)}


def put_back(strategy: Strategy, before: State) -> None:
    """Make the attributes what they were when `before` was taken."""
    for name in set(state_of(strategy)) - set(before):
        delattr(strategy, name)
    vars(strategy).update(before)


def is_finite(after: State, *, unless: State) -> bool:
    """Whether all numbers are finite. What was not so in `unless` either (a bound of infinity) does not count."""
    return all(_finite(value) or (name in unless and not _finite(unless[name])) for name, value in after.items())


def _is_state(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list) and not value) or bool(_arrays_in(value))


def _arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(value, ArrayRecord):
        return [array.numpy() for array in value.values()]
    if isinstance(value, Mapping):
        return [array for part in value.values() for array in _arrays_in(part)]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [array for part in value for array in _arrays_in(part)]
    if isinstance(value, np.ndarray | np.number | int | float | complex) and not isinstance(value, bool):
        return [np.asarray(value)]
    return []


def _finite(value: Any) -> bool:
    return all(bool(np.isfinite(array).all()) for array in _arrays_in(value) if np.issubdtype(array.dtype, np.inexact))
