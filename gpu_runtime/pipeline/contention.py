"""A round in which tasks share resources: clients share the server, tasks of a client its device and links.

`makespan.step_s` knows one task alone. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_runtime.pipeline.makespan import RESOURCES, Busy, not_negative

SERVER = "server"
# Simulated rounds over this estimate, 500 random ones at all loads: with a task a client 0.93..1.14 (nine of ten within
# 2 %), with two or three 0.82..1.40 (nine of ten within 13 %: like tasks of a device get in each other's way). Clients
# whose steps are of very different length, on a full server that serves in order of arrival: up to 1.46.
EXPONENT = 4.0


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """One task of one client: seconds of its round if it were alone, and for how long it keeps each resource busy."""

    client: str
    alone_s: float
    busy: Busy

    def __post_init__(self) -> None:
        not_negative("alone_s", self.alone_s)
        for resource in RESOURCES:
            not_negative(resource, getattr(self.busy, resource))


def lower_bound_s(works: Sequence[RoundWork], server_capacity: float = 1.0) -> float:
    """No round is shorter than any task alone, nor than the work of any resource.

    The server does `server_capacity` seconds of work a second. Example: 4 clients of 3 s each, of which 1 s is for a
    server of capacity 1, need at least max{3, 4 * 1} = 4 s.

    Raises:
        ValueError: a capacity that is not above 0.
    """
    loads = _loads(works, server_capacity)
    return max([*loads.values(), *(work.alone_s for work in works)], default=0.0)


def estimate_s(works: Sequence[RoundWork], server_capacity: float = 1.0) -> float:
    """What the round takes with waiting for one another.

    Clients that train step after step fall out of each other's way by themselves: waiting matters only where the work
    of a shared resource is nearly as long as a task's own round, and this is a smooth maximum of the two,
    (alone^p + load^p)^(1/p), which leaves a task that shares nothing as it is.

    Raises:
        ValueError: a capacity that is not above 0.
    """
    loads = _loads(works, server_capacity)
    longest_s = lower_bound_s(works, server_capacity)
    for work in works:
        if work.alone_s > 0:
            mine = [_own_load(work, name, server_capacity) / work.alone_s for name in _names(work)]
            all_of_them = [loads[name] / work.alone_s for name in _names(work)]
            longest_s = max(longest_s, work.alone_s * (1.0 + (_norm(all_of_them) - _norm(mine))))
    return longest_s


def _norm(loads: Sequence[float]) -> float:
    return float((1.0 + sum(load**EXPONENT for load in loads)) ** (1.0 / EXPONENT))


def _names(work: RoundWork) -> list[str]:
    return [SERVER if resource == SERVER else f"{work.client}/{resource}" for resource in RESOURCES]


def _own_load(work: RoundWork, name: str, server_capacity: float) -> float:
    seconds: float = getattr(work.busy, name.rpartition("/")[2])
    return seconds / server_capacity if name == SERVER else seconds


def _loads(works: Sequence[RoundWork], server_capacity: float) -> dict[str, float]:
    if not 0 < server_capacity < math.inf:
        raise ValueError(f"server_capacity must be finite and above 0, not {server_capacity}")
    loads: dict[str, float] = {}
    for work in works:
        for name in _names(work):
            loads[name] = loads.get(name, 0.0) + _own_load(work, name, server_capacity)
    return loads
