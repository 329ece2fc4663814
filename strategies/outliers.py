"""Refuses updates out of all proportion, which one client could freeze or destroy a task for all with.

Checks one by one (`strategies.replies`) cannot tell: this looks at all checked updates of a task together.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gpu_runtime.contracts import split_key
from strategies.aggregation import is_parameter
from strategies.replies import CheckedReply, NDArray, Update, refuse_task

# How many times further than the reference an element of an array may move in one round. The reference is the largest
# of 1, the largest element the array has now, and how far the array moved at the (lower) median client. Honest steps
# stay far below: weights of a network that trains are of the order of 1, and where they are not (targets in the
# millions, weights that start at 0) all clients move them alike. A client alone is its own median.
MAX_RATIO = 1e3
# Whatever the others do: the sum over 1e9 elements of squares of such moves still fits float32, in which server
# optimisers keep second moments and krum its distances.
MAX_MOVE = 1e14


def without_outliers(
    checked: Sequence[CheckedReply], current: Mapping[str, NDArray], compared: Collection[str] = ()
) -> list[CheckedReply]:
    """`checked` without the updates that move an array of `current` too far; records and `refused` name them.

    Tasks in `compared` have an aggregation that bounds or compares updates itself: of their parameters only moves
    beyond `MAX_MOVE` are refused, which depends on no other client. Their statistics are looked at as everyone's.
    """
    updates = [update for reply in checked for update in reply.updates]
    faults: dict[tuple[str, str], str] = {}
    for key, start in current.items():
        if not np.issubdtype(start.dtype, np.inexact):
            continue
        moves = {update.client: move_of(update, key, start) for update in updates if key in update.arrays}
        if not moves:
            continue
        if is_parameter(key, start) and split_key(key)[0] in compared:
            reference = MAX_MOVE
        else:
            reference = max(1.0, _largest(start), statistics.median_low(moves.values()))
        # A variance has the square of its quantity's unit, and so of a client's odd scale.
        limit = reference * (MAX_RATIO**2 if key.endswith("running_var") else MAX_RATIO)
        if is_parameter(key, start):
            limit = min(limit, MAX_MOVE)
        for client, move in moves.items():
            if move > limit:
                text = f"array {key!r} moved by {move:.3g}, out of all proportion: at most {limit:.3g} is believed"
                faults.setdefault((client, split_key(key)[0]), text)
    return [_without(reply, faults) for reply in checked]


def move_of(update: Update, key: str, start: NDArray) -> float:
    """The largest change of an element of one array."""
    # Differences of half floats that are far apart are no half floats.
    kind = np.result_type(start.dtype, np.float32)
    with np.errstate(over="ignore"):
        return _largest(update.arrays[key].astype(kind) - start.astype(kind))


def furthest(updates: Sequence[Update], current: Mapping[str, NDArray]) -> str:
    """The client whose update moves a parameter furthest, and how far, in words."""
    moves = {
        update.client: max(
            (move_of(update, key, current[key]) for key in update.arrays if _moves(key, current)), default=0.0
        )
        for update in updates
    }
    client = max(moves, key=lambda name: moves[name])
    return f"client {client!r} moved furthest, by {moves[client]:.3g}"


def _moves(key: str, current: Mapping[str, NDArray]) -> bool:
    return is_parameter(key, current[key])


def _largest(array: NDArray) -> float:
    return float(np.abs(array).max(initial=0.0))


def _without(reply: CheckedReply, faults: Mapping[tuple[str, str], str]) -> CheckedReply:
    for update in reply.updates:
        fault = faults.get((reply.client, update.task))
        if fault:
            reply = refuse_task(reply, update.task, fault)
    return reply
