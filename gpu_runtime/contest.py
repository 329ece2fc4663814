"""Which of several ways to do the same work is fastest, from short rounds in which each takes its turn. Plain Python.

Single runs say little: a machine changes its pace from one second to the next. What runs of the same round have in
common cancels in their ratio, so decisions rest on the median of such paired ratios. Used by mix_trial.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A preferred candidate (an earlier one in the list) stays unless a later one is so much faster.
CLEARLY_FASTER = 1.05
MIN_ROUNDS, MAX_ROUNDS = 3, 9
# A pair is decided when all its ratios lie on one side of the limit: with few rounds, so far from it; then anyhow.
FEW_ROUNDS, FAR = 5, 1.1

# A machine that is slower than expected gets shorter rounds, down to this part of a whole one: few rounds tell little.
LEAST_PART = 0.25

# Work done per second in one run of a candidate, of so large a part of the whole run; None when it cannot do the work.
RunOnce = Callable[[str, float], float | None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The candidate to take, and the speed of each in its unit: of the best its median, of others that by their ratio.

    Candidates that could not do the work are missing. `num_rounds` is how many rounds each took part in.
    """

    best: str
    speeds: dict[str, float]
    num_rounds: dict[str, int]


def contest(
    candidates: Sequence[str],
    run: RunOnce,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome | None:
    """Run rounds until one candidate is left, `MAX_ROUNDS` are over, or the next round would not fit into the budget.

    A candidate leaves as soon as it is clear that it will not be chosen: its time goes to those that are still close.
    Every second round runs backwards, so that a pace that rises or falls steadily favours nobody.

    Args:
        candidates: in the order of preference.
        run: one short run of a candidate, by name and part (0 to 1) of a whole run.
        budget_s: seconds that all runs together may take; the first round is always finished.
        clock: seconds, rising.

    Returns:
        None when no candidate could do the work.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    active = list(candidates)
    started_s, longest_s, part = clock(), 0.0, 1.0
    for index in range(MAX_ROUNDS):
        began_s = clock()
        if index > 0:
            left_s = budget_s - (began_s - started_s)
            part = min(1.0, max(LEAST_PART, left_s / longest_s / max(1, FEW_ROUNDS - index))) if longest_s > 0 else 1.0
            if part * longest_s > left_s:
                break
        for name in active if index % 2 == 0 else reversed(active):
            speed = run(name, part)
            if speed is None:
                del samples[name]
            else:
                samples[name].append(speed)
        longest_s = max(longest_s, (clock() - began_s) / part)
        active = [name for name in active if name in samples]
        leader = leader_of({name: samples[name] for name in active})
        active = [name for name in active if name == leader or not is_decided(samples, leader, name, candidates)]
        if len(active) < 2:
            break
    if not samples:
        return None
    # Those that left earlier count only if all others have failed since.
    best = leader_of({name: samples[name] for name in active} or samples)
    speed = statistics.median(samples[best])
    return Outcome(
        best=best,
        speeds={
            name: speed if name == best else speed * statistics.median(ratios(found, samples[best]))
            for name, found in samples.items()
        },
        num_rounds={name: len(found) for name, found in samples.items()},
    )


def ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of the rounds that both took part in: all candidates start in the first one."""
    return [speed / other for speed, other in zip(speeds, others, strict=False)]


def leader_of(samples: dict[str, list[float]]) -> str:
    """The first candidate, or a later one that is clearly faster, by the median of paired ratios; "" of none.

    Fewer than `MIN_ROUNDS` have to show more: one lucky run must not decide.
    """
    best = ""
    for name, speeds in samples.items():
        lead = ratios(speeds, samples[best]) if best else []
        if not best or statistics.median(lead) > CLEARLY_FASTER * (FAR if len(lead) < MIN_ROUNDS else 1.0):
            best = name
    return best


def is_decided(samples: dict[str, list[float]], leader: str, name: str, order: Sequence[str]) -> bool:
    """Whether more rounds would hardly change that `leader` is taken and not `name`."""
    lead = ratios(samples[leader], samples[name])
    # What the lead must exceed: an earlier candidate stays even when the later one is a little faster.
    is_preferred = order.index(leader) < order.index(name)
    limit = 1 / CLEARLY_FASTER if is_preferred else CLEARLY_FASTER
    return len(lead) >= MIN_ROUNDS and min(lead) > limit * (FAR if len(lead) < FEW_ROUNDS else 1.0)
