"""Flower's error replies in one line: what a client's exception, or the death of a simulation's worker, comes to."""

from __future__ import annotations

import re

from flwr.app import Message

WORKER_DIED = (
    "the worker process that simulates clients died (killed, or out of memory?); Flower starts no other in its place"
)
# Longest reason that is quoted whole, and the longest line of any.
SHORT = 200
LONGEST = 500

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What Ray raises in Flower's worker thread when the process at the other end is no more. Exceptions of client code come
# as ray.exceptions.RayTaskError(...).
_DEAD_WORKER = re.compile(
    r"<class 'ray\.exceptions\.(ActorDied|RayActor|ActorUnavailable|WorkerCrashed|OutOfMemory|NodeDied|LocalRayletDied"
    r"|OwnerDied)Error'>"
)


def worker_died(reply: Message) -> bool:
    """Whether this is an error reply because the process that simulates clients has died, not because of a client.

    Flower 1.42 puts the dead worker back into its pool, so that every later message it is given fails likewise.
    """
    return reply.has_error() and _DEAD_WORKER.match(reply.error.reason or "") is not None


def error_line(reply: Message) -> str:
    """Why an error reply is one: a short reason whole, of a long one (simulation sends a traceback) the last line."""
    if worker_died(reply):
        return WORKER_DIED
    reason = _COLOUR.sub("", reply.error.reason or "")
    lines = [" ".join(line.split()) for line in reason.splitlines() if line.strip()]
    if not lines:
        return f"error code {reply.error.code}"
    whole = " ".join(lines)
    line = whole if len(whole) <= SHORT else lines[-1]
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
