"""What tracing costs: the same rounds of the runtime with a trace and without, in pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.mixes import Work
from gpu_runtime.bench.ours import Ours
from gpu_runtime.bench.paired import interval
from gpu_runtime.bench.rounds import EXTRA_S, WARM_UP_STEPS


def trace_overhead(
    ours: Ours,
    works: Mapping[str, Work],
    *,
    pairs: int,
    seconds: float,
    budget: Budget,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Seconds with a trace over seconds without, for each mix: median of paired ratios and its interval.

    Every second pair runs the other way round. On CUDA a trace includes the samples of the device.

    Args:
        ours: the runtime.
        works: what to run, by mix.
        pairs: most pairs of each mix.
        seconds: about how long a run takes.
        budget: mixes for whose first pair it is too short are left out.
        say: called with a line of progress.
    """
    found: dict[str, dict[str, Any]] = {}
    for mix, work in works.items():
        time = budget.part(1, len(works) - len(found))
        if time.left_s < 2 * seconds:
            break
        ours.prepare(work)
        trial = {task: replace(share, num_steps=WARM_UP_STEPS) for task, share in work.items()}
        for trace in (False, True):
            ours.run(trial, 10 * seconds + EXTRA_S, trace=trace)
        ratios: list[float] = []
        while len(ratios) < pairs and (not ratios or time.left_s > 2 * seconds):
            order = (False, True) if len(ratios) % 2 == 0 else (True, False)
            took_s = {trace: ours.run(work, 10 * seconds + EXTRA_S, trace=trace).whole_s for trace in order}
            ratios.append(took_s[True] / took_s[False])
        found[mix] = asdict(interval(ratios))
        say(f"{mix}: a trace takes {found[mix]['median']:.3f} of the time without, {len(ratios)} pairs")
    return found
