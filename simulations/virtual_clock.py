"""One device's round on the virtual clock: an event simulation of an executor that shares the device among tasks.

Between two events (a task ends) every task runs at a constant rate, so the simulation jumps from one task's end to
the next instead of replaying single steps: a step is a small part of a task, a round of any length takes
microseconds, and the planner's closed forms (demand-seconds, longest task) are met exactly, not up to a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_runtime.contracts import SHARING_MODES, Span, TaskCost

_RELATIVE_TIE = 1e-12
_BISECTIONS = 200


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one task has to do: `num_examples` W at its true `cost`.

    `expected_cost_s` is the solo cost per example that the executor believes when it sets shares (default: the true
    one). `share` fixes the task's share instead of equal finish, until a task ends.
    """

    task: str
    num_examples: float
    cost: TaskCost
    expected_cost_s: float | None = None
    share: float | None = None

    @property
    def expected_s(self) -> float:
        """Solo seconds per example as the executor believes."""
        return self.cost.solo_cost_s if self.expected_cost_s is None else self.expected_cost_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each task ended, in seconds since the start of the round, and when the reply was back at the server."""

    finish_s: dict[str, float]
    makespan_s: float
    spans: tuple[Span, ...]


def run_device(
    work: Sequence[Work],
    *,
    mode: str,
    capacity: float = 1.0,
    fixed_s: float = 0.0,
    download_s: float = 0.0,
    upload_s: float = 0.0,
) -> Timeline:
    """Simulate one round of one device.

    The tasks start after `download_s + fixed_s`; the reply is back `upload_s` after the last of them ended.

    * `sequential`: one task after the other, each alone, in the order given.
    * `competitive`: all at once. Task i runs at s_i / c_i examples per second; s_i from equal finish of the expected
      costs, or from its share; never more than `capacity` demand in sum (all are slowed alike); set anew whenever a
      task ends. With true expectations the last task ends at max(sum V c W / C, max c W), the least possible.
    * `exclusive`: all at once with disjoint shares (sum at most 1) that stay as they are when a task ends.

    Raises:
        ValueError: unknown mode, a cost or capacity that is not above 0, or a demand outside 0..1.
    """
    _check(work, mode, capacity)
    start_s = download_s + fixed_s
    active = [item for item in work if item.num_examples > 0]
    spans = _sequential(active, start_s) if mode == "sequential" else _concurrent(active, start_s, mode, capacity)
    finish_s = {item.task: start_s for item in work}
    for span in spans:
        finish_s[span.task] = max(finish_s[span.task], span.end_s)
    end_s = max(finish_s.values(), default=start_s)
    return Timeline(finish_s=finish_s, makespan_s=end_s + upload_s, spans=tuple(spans))


def lower_bound_s(work: Sequence[Work], *, capacity: float = 1.0) -> float:
    """max(sum V c W / C, max c W): no way of sharing the device ends earlier."""
    solo = [item.cost.solo_cost_s * item.num_examples for item in work]
    demand_s = sum(item.cost.demand * seconds for item, seconds in zip(work, solo, strict=True))
    return max([demand_s / capacity, *solo])


def transfer_s(num_bytes: int, bytes_per_s: float | None, latency_s: float | None) -> float:
    """Seconds to move `num_bytes` over a link; a rate or latency of None is not modelled."""
    return (num_bytes / bytes_per_s if bytes_per_s else 0.0) + (latency_s or 0.0)


def speed_at(cost: TaskCost, share: float) -> float:
    """s(v): the speed curve at `share`, linear between its samples and from (0, 0) to the first one.

    A cost without samples is taken to be s(v) = min(1, v / V).
    """
    if not cost.speed_curve:
        return min(1.0, share / cost.demand) if cost.demand > 0 else 1.0
    left_v, left_s = 0.0, 0.0
    for v, s in cost.speed_curve:
        if share <= v:
            return left_s + (s - left_s) * (share - left_v) / (v - left_v) if v > left_v else s
        left_v, left_s = v, s
    return left_s


def share_for(cost: TaskCost, speed: float) -> float:
    """The least share v with s(v) >= `speed`; 1 where the curve never reaches it."""
    if not cost.speed_curve:
        return min(1.0, speed * cost.demand)
    left_v, left_s = 0.0, 0.0
    for v, s in cost.speed_curve:
        if s >= speed:
            return left_v + (v - left_v) * (speed - left_s) / (s - left_s) if s > left_s else v
        left_v, left_s = v, max(left_s, s)
    return 1.0


def _sequential(work: Sequence[Work], start_s: float) -> list[Span]:
    spans = []
    for item in work:
        end_s = start_s + item.num_examples * item.cost.solo_cost_s
        spans.append(Span(task=item.task, lane="0", start_s=start_s, end_s=end_s))
        start_s = end_s
    return spans


def _concurrent(work: Sequence[Work], now_s: float, mode: str, capacity: float) -> list[Span]:
    """Run all tasks from one end of a task to the next."""
    remaining = {i: item.num_examples for i, item in enumerate(work)}
    fixed_shares = {i: item.share for i, item in enumerate(work) if item.share is not None}
    exclusive = _exclusive_speeds(work) if mode == "exclusive" else None
    spans = []
    while remaining:
        if exclusive is not None:
            speeds = {i: exclusive[i] for i in remaining}
        else:
            speeds = _equal_finish_speeds(work, remaining, capacity)
            speeds.update({i: speed_at(work[i].cost, share) for i, share in fixed_shares.items()})
        demand = sum(work[i].cost.demand * speed for i, speed in speeds.items())
        slow_down = min(1.0, capacity / demand) if demand > 0 else 1.0
        rates = {i: slow_down * speed / work[i].cost.solo_cost_s for i, speed in speeds.items()}
        ends_s = {i: remaining[i] / rates[i] for i in remaining}
        step_s = min(ends_s.values())
        for i, end_s in ends_s.items():
            spans.append(Span(task=work[i].task, lane=str(i), start_s=now_s, end_s=now_s + step_s))
            if end_s <= step_s * (1 + _RELATIVE_TIE):
                del remaining[i]
            else:
                remaining[i] -= rates[i] * step_s
        now_s += step_s
        fixed_shares = {}
    return spans


def _equal_finish_speeds(work: Sequence[Work], remaining: dict[int, float], capacity: float) -> dict[int, float]:
    """s_i = c_i W_i / T with T = max(sum V c W / C, max c W) over what remains, by the expected costs."""
    solo_s = {i: work[i].expected_s * examples for i, examples in remaining.items()}
    demand_s = sum(work[i].cost.demand * seconds for i, seconds in solo_s.items())
    finish_s = max(demand_s / capacity, *solo_s.values())
    return {i: seconds / finish_s for i, seconds in solo_s.items()}


def _exclusive_speeds(work: Sequence[Work]) -> dict[int, float]:
    """Disjoint shares: those given, else those of the earliest equal finish by the expected costs that add up to 1."""
    given = [item.share for item in work if item.share is not None]
    if len(given) == len(work):
        scale = min(1.0, 1.0 / sum(given)) if given else 1.0
        return {i: speed_at(work[i].cost, share * scale) for i, share in enumerate(given)}
    solo_s = [item.expected_s * item.num_examples for item in work]
    early, late = max(solo_s), sum(solo_s) * 1e6
    for _ in range(_BISECTIONS):
        middle = (early + late) / 2
        shares = [share_for(item.cost, seconds / middle) for item, seconds in zip(work, solo_s, strict=True)]
        early, late = (early, middle) if sum(shares) <= 1 else (middle, late)
    return {i: seconds / late for i, seconds in enumerate(solo_s)}


def _check(work: Sequence[Work], mode: str, capacity: float) -> None:
    if mode not in SHARING_MODES:
        raise ValueError(f"sharing mode must be one of {', '.join(SHARING_MODES)}, not {mode!r}")
    if not capacity > 0:
        raise ValueError(f"capacity must be above 0, not {capacity}")
    for item in work:
        if not item.cost.solo_cost_s > 0 or not item.expected_s > 0:
            raise ValueError(f"task {item.task!r}: seconds per example must be above 0")
        if not 0 <= item.cost.demand <= 1:
            raise ValueError(f"task {item.task!r}: demand must lie in 0..1, not {item.cost.demand}")
        if item.share is not None and not item.share > 0:
            raise ValueError(f"task {item.task!r}: share must be above 0, not {item.share}")
