"""Does the profile predict how long a mix takes? Random mixes, predicted by the profile alone, then run."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable
from typing import Any

from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.disturbance import ForeignLoad
from gpu_runtime.bench.mixes import MIXES, Calibration, Mix
from gpu_runtime.bench.ours import Ours
from gpu_runtime.bench.rounds import EXTRA_S, WARM_UP_STEPS
from gpu_runtime.bench.variants import VariantError

TRIAL_S = 30.0
KINDS = tuple(dict.fromkeys(task for mix in MIXES.values() for task in mix.tasks if "." not in task))


def random_mix(draw: random.Random) -> Mix:
    """Two to four different tasks, the longest at most six times as long as the shortest."""
    return Mix(seconds={task: draw.uniform(1.0, 6.0) for task in draw.sample(KINDS, draw.randint(2, 4))})


def predictions(
    ours: Ours,
    calibration: Calibration,
    *,
    num_mixes: int,
    repeats: int,
    seconds: float,
    seed: int,
    budget: Budget,
    max_foreign_cores: float,
    foreign: ForeignLoad | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Predicted and measured makespan of random mixes: as many as the budget allows.

    The prediction is made before the mix runs; measured is the median of `repeats` runs. `error` is
    |predicted - measured| / measured.
    """
    draw, foreign = random.Random(seed), foreign or ForeignLoad()
    found: list[dict[str, Any]] = []
    for _ in range(num_mixes):
        if budget.left_s < 2 * seconds:
            break
        work = calibration.work(random_mix(draw), seconds)
        ours.prepare(work)
        predicted_s = ours.predicted_s(work)
        measured_s: list[float] = []
        cores: list[float | None] = []
        try:
            ours.run(
                {task: dataclasses.replace(share, num_steps=WARM_UP_STEPS) for task, share in work.items()}, TRIAL_S
            )
            while len(measured_s) < repeats and (not measured_s or budget.left_s > seconds):
                foreign.start()
                measured_s.append(ours.run(work, 10 * seconds + EXTRA_S).whole_s)
                cores.append(foreign.cores)
        except VariantError as error:
            say(f"no prediction of {', '.join(work)}: {error}")
            continue
        typical_s = statistics.median(measured_s)
        found.append(
            {
                "tasks": {task: share.num_steps for task, share in work.items()},
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "error": abs(predicted_s - typical_s) / typical_s,
                "foreign_cores": cores,
                "disturbed": statistics.median(each or 0.0 for each in cores) > max_foreign_cores,
            }
        )
        say(f"predicted {predicted_s:.2f} s, measured {typical_s:.2f} s: {', '.join(work)}")
    return found
