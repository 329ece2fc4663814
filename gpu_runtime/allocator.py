"""Equal-finish shares: how much of a device each task may take so that all tasks end together. Plain Python.

Words and symbols as in docs/architecture.md: load W, solo cost c, demand V, speed curve s(v), capacity C, share v.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class TaskLoad:
    """Work of one task: `num_examples` W at `solo_cost_s` c each, `demand` V, and its `speed_curve` s(v).

    An empty curve stands for s(v) = min(1, v / V). `maximum_share` is a cap set by the plan. `peak_memory_bytes` is 0
    where unknown.
    """

    task: str
    num_examples: float
    solo_cost_s: float
    demand: float = 1.0
    speed_curve: Curve = ()
    maximum_share: float = 1.0
    peak_memory_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("num_examples", "solo_cost_s", "demand", "maximum_share"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.task}: {name} must be finite and above 0, not {value}")

    @property
    def solo_s(self) -> float:
        """Seconds alone on the device: W c."""
        return self.num_examples * self.solo_cost_s

    @property
    def curve(self) -> Curve:
        return self.speed_curve or ((min(self.demand, 1.0), 1.0), (1.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Share of each task, and the seconds `finish_s` W c / s(v) after which it ends at that share."""

    shares: Mapping[str, float]
    finish_s: Mapping[str, float]


def speed(curve: Curve, share: float) -> float:
    """s(v): linear between the samples, from (0, 0) to the last one, flat beyond."""
    v0, s0 = 0.0, 0.0
    for v1, s1 in curve:
        if share < v1:
            return s0 + (s1 - s0) * (share - v0) / (v1 - v0)
        v0, s0 = v1, s1
    return s0


def share_for(curve: Curve, wanted: float) -> float:
    """The smallest v with s(v) >= `wanted`; the last sample's v where the curve never gets there."""
    v0, s0 = 0.0, 0.0
    for v1, s1 in curve:
        if wanted <= s1:
            return v0 if s1 == s0 else v0 + (v1 - v0) * max(0.0, wanted - s0) / (s1 - s0)
        v0, s0 = v1, s1
    return v0


def predicted_makespan(loads: Sequence[TaskLoad], capacity: float = 1.0) -> float:
    """max(sum_i V_i c_i W_i / C, max_i c_i W_i): demand-seconds of the device, and no task beats itself alone."""
    served = sum(load.demand * load.solo_s for load in loads) / capacity
    return max([served, *(load.solo_s for load in loads)], default=0.0)


def equal_finish(loads: Sequence[TaskLoad], *, capacity: float = 1.0, minimum_share: float = 0.0) -> Allocation:
    """Shares at which W_i c_i / s_i(v_i) is the same T for all tasks that are not at a bound, T as small as can be.

    At a common finish T task i needs the speed W_i c_i / T; what its share bounds leave of that serves the demand
    V_i s_i(v_i), and sum_i V_i s_i(v_i) <= C. Demand falls as T grows, so T is found by bisection. Where even the
    minimum shares demand more than C, every task gets its minimum.

    Args:
        loads: the tasks, each with something to do.
        capacity: C, demand-seconds that the device serves per second.
        minimum_share: least share of any task.
    """
    if not loads:
        return Allocation(shares={}, finish_s={})

    def share_at(load: TaskLoad, finish_s: float) -> float:
        wanted = min(1.0, load.solo_s / finish_s)
        return max(minimum_share, min(load.maximum_share, share_for(load.curve, wanted)))

    def demand_at(finish_s: float) -> float:
        return sum(load.demand * speed(load.curve, share_at(load, finish_s)) for load in loads)

    # No T below the predicted makespan is feasible; past `high` every task is at its minimum or its cap.
    low = predicted_makespan(loads, capacity)
    high = low
    while demand_at(high) > capacity * (1 + 1e-12) and high < low * 2.0**40:
        high *= 2.0
    if high > low:
        low = high / 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if demand_at(middle) > capacity * (1 + 1e-12) else (low, middle)
    shares = {load.task: share_at(load, high) for load in loads}
    finish = {load.task: load.solo_s / speed(load.curve, shares[load.task]) for load in loads}
    return Allocation(shares=shares, finish_s=finish)


def whole_shares(shares: Mapping[str, float], cores: int) -> dict[str, int]:
    """Cores for each task: at least one each, in all `cores`, as near to proportional to `shares` as can be.

    Raises:
        ValueError: more tasks than cores.
    """
    if len(shares) > cores:
        raise ValueError(f"{len(shares)} tasks cannot each have a whole one of {cores} cores")
    total = sum(shares.values())
    counts = dict.fromkeys(shares, 1)
    for _ in range(cores - len(shares)):
        # The next core goes where it is missed most: the largest share per core held (D'Hondt's rule).
        neediest = max(shares, key=lambda task: shares[task] / counts[task] if total > 0 else 1 / counts[task])
        counts[neediest] += 1
    return counts


def packed(loads: Mapping[str, float], groups: int) -> list[list[str]]:
    """Tasks in at most `groups` groups of nearly equal load: longest first, each to the lightest group (LPT)."""
    totals = [0.0] * min(groups, len(loads))
    members: list[list[str]] = [[] for _ in totals]
    for task in sorted(loads, key=lambda name: (-loads[name], name)):
        lightest = min(range(len(totals)), key=totals.__getitem__)
        members[lightest].append(task)
        totals[lightest] += loads[task]
    return members
