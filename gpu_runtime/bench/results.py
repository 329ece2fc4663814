"""What was measured, as plain data: rows, headline and targets of the benchmark's JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu_runtime.bench.floor import Floor, SoloTimes, floor
from gpu_runtime.bench.mixes import CONVOLUTIONAL, SMALL_STEPS, Mix, Work
from gpu_runtime.bench.paired import MIN_PAIRS, Interval, interval, paired_ratio
from gpu_runtime.bench.rounds import Measured, Sample

BASELINE, ONE_THREAD, OURS = "sequential", "sequential-1", "ours"

MAX_TO_FLOOR = {CONVOLUTIONAL: 1.08, SMALL_STEPS: 1.15}
MAX_TO_BASELINE = 1.02
MIN_SPEEDUP = {"imbalanced": 1.15, "balanced": 1.3, "small": 1.7}
MAX_FINISH_SPREAD = 0.05
MAX_TRACE_OVERHEAD = 1.02
MAX_PREDICTION_ERROR, MIN_GOOD_PREDICTIONS = 0.15, 0.9


def row_of(mix: str, kind: Mix, work: Work, measured: Measured, cores: int, *, has_floor: bool) -> dict[str, Any]:
    """One mix: times, paired ratios to baseline and floor, what was disturbed, cut or not available."""
    samples = measured.samples
    seconds = {name: {index: each.run.whole_s for index, each in found.items()} for name, found in samples.items()}
    floors = _floors(samples, cores) if has_floor else {}
    floor_s = {index: each.makespan_s for index, each in floors.items()}
    names = list(samples)
    ours_over = {name: paired_ratio(seconds[OURS], seconds[name]) for name in names if name != OURS}
    num_examples = sum(share.num_examples for share in work.values())
    return {
        "mix": mix,
        "character": kind.character,
        "tasks": {
            task: {
                "num_steps": share.num_steps,
                "num_examples": share.num_examples,
                "one_thread_s": _median_alone(samples, ONE_THREAD, task),
                "all_threads_s": _median_alone(samples, BASELINE, task),
            }
            for task, share in work.items()
        },
        "num_pairs": {name: len(found) for name, found in samples.items()},
        "seconds": {name: list(found.values()) for name, found in seconds.items()},
        "floor_s": list(floor_s.values()),
        "ratio_to_baseline": {name: _plain(paired_ratio(seconds[name], seconds[BASELINE])) for name in names},
        "ratio_to_floor": {name: _plain(paired_ratio(seconds[name], floor_s)) for name in names if floor_s},
        "ours_over": {name: _plain(ratio) for name, ratio in ours_over.items()},
        "finish_spread": _plain(_spread(samples[OURS], floors, list(work))),
        "backend": next(iter(samples[OURS].values())).run.backend,
        "foreign_cores": {name: [each.foreign_cores for each in found.values()] for name, found in samples.items()},
        "disturbed": {name: sum(each.disturbed for each in found.values()) for name, found in samples.items()},
        "cut": {name: sum(each.run.done_fraction < 1.0 for each in found.values()) for name, found in samples.items()},
        "joules_per_1000_examples": {name: _joules(found, num_examples) for name, found in samples.items()},
        "not_available": dict(measured.not_available),
    }


NOT_TRACED: Mapping[str, Mapping[str, Any]] = {}


def headline_of(
    rows: Sequence[Mapping[str, Any]],
    predictions: Sequence[Mapping[str, Any]],
    trace_overhead: Mapping[str, Mapping[str, Any]] = NOT_TRACED,
) -> dict[str, Any]:
    """The numbers that the targets are about; maps are keyed by mix, intervals stand beside them."""

    def inverse(ratio: Mapping[str, Any]) -> dict[str, Any]:
        return {**ratio, "median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}

    to_floor = {row["mix"]: row["ratio_to_floor"][OURS] for row in rows if row["ratio_to_floor"]}
    speedup = {row["mix"]: inverse(row["ratio_to_baseline"][OURS]) for row in rows}
    spread = {row["mix"]: row["finish_spread"] for row in rows if row["finish_spread"]}
    return {
        "ratio_to_floor": {mix: ratio["median"] for mix, ratio in to_floor.items()},
        "speedup": {mix: ratio["median"] for mix, ratio in speedup.items()},
        "finish_spread": {mix: ratio["median"] for mix, ratio in spread.items()},
        "best_other_variant": {row["mix"]: _best_other(row) for row in rows},
        "makespan_prediction_error": [each["error"] for each in predictions],
        "trace_overhead": {mix: ratio["median"] for mix, ratio in trace_overhead.items()},
        "intervals": {
            "ratio_to_floor": to_floor,
            "speedup": speedup,
            "finish_spread": spread,
            "trace_overhead": dict(trace_overhead),
        },
    }


def targets_of(
    rows: Sequence[Mapping[str, Any]],
    predictions: Sequence[Mapping[str, Any]],
    trace_overhead: Mapping[str, Mapping[str, Any]] = NOT_TRACED,
) -> list[dict[str, Any]]:
    """Each target of each mix, "met" or "missed" if the measurement can tell (`state_of`).

    `disturbed`: others used the machine during most runs of ours or of what it is compared with; that tells nothing.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        to_baseline = row["ratio_to_baseline"][OURS]
        limits: list[tuple[str, float, Any]] = [("ratio_to_baseline", MAX_TO_BASELINE, to_baseline)]
        if row["mix"] in MIN_SPEEDUP:
            limits.append(("ratio_to_baseline", 1 / MIN_SPEEDUP[row["mix"]], to_baseline))
        if row["ratio_to_floor"]:
            if row["character"] in MAX_TO_FLOOR:
                limits.append(("ratio_to_floor", MAX_TO_FLOOR[row["character"]], row["ratio_to_floor"][OURS]))
            if row["finish_spread"]:
                limits.append(("finish_spread", MAX_FINISH_SPREAD, row["finish_spread"]))
        for what, limit, ratio in limits:
            disturbed = _mostly_disturbed(row)
            state = state_of(limit, ratio, trusted=not disturbed and ratio["num_pairs"] >= MIN_PAIRS)
            found.append(
                {"mix": row["mix"], "what": what, "limit": limit, "state": state, "disturbed": disturbed, **ratio}
            )
    if predictions:
        good = sum(each["error"] <= MAX_PREDICTION_ERROR for each in predictions) / len(predictions)
        disturbed = 2 * sum(each["disturbed"] for each in predictions) > len(predictions)
        state = "met" if good >= MIN_GOOD_PREDICTIONS else "missed"
        found.append(
            {
                "mix": "random",
                "what": f"part of predictions within {MAX_PREDICTION_ERROR:g}",
                "limit": MIN_GOOD_PREDICTIONS,
                "state": "unclear" if disturbed else state,
                "disturbed": disturbed,
                "median": good,
            }
        )
    for mix, ratio in trace_overhead.items():
        state = state_of(MAX_TRACE_OVERHEAD, ratio, trusted=ratio["num_pairs"] >= MIN_PAIRS)
        found.append(
            {
                "mix": mix,
                "what": "trace_overhead",
                "limit": MAX_TRACE_OVERHEAD,
                "state": state,
                "disturbed": False,
                **ratio,
            }
        )
    return found


def state_of(limit: float, ratio: Mapping[str, float], *, trusted: bool = True) -> str:
    """How a measured ratio stands to its upper limit.

    "met": the median is within it; "missed": the whole interval is beyond; "open": only the median is beyond;
    "unclear": the measurement cannot be trusted (too few pairs, or disturbed).
    """
    if not trusted:
        return "unclear"
    if ratio["median"] <= limit:
        return "met"
    return "missed" if ratio["low"] > limit else "open"


def _mostly_disturbed(row: Mapping[str, Any]) -> bool:
    compared = [name for name in (BASELINE, ONE_THREAD, OURS) if name in row["num_pairs"]]
    return any(2 * row["disturbed"][name] > row["num_pairs"][name] for name in compared)


def _floors(samples: Mapping[str, Mapping[int, Sample]], cores: int) -> dict[int, Floor]:
    """The floor of each round, from what each task took alone in the two sequential runs of the same round."""
    one, every = samples.get(ONE_THREAD, {}), samples[BASELINE]
    floors = {}
    for index in sorted(one.keys() & every.keys()):
        runs = one[index].run, every[index].run
        if min(run.done_fraction for run in runs) < 1.0:
            continue
        one_s, all_s = (run.alone_s for run in runs)
        floors[index] = floor({task: SoloTimes(one_s=one_s[task], all_s=all_s[task]) for task in one_s}, cores)
    return floors


def _spread(ours: Mapping[int, Sample], floors: Mapping[int, Floor], tasks: Sequence[str]) -> Interval | None:
    """How far apart, in parts of the makespan, those tasks end that can end together.

    On the CPU these are the tasks that the floor's schedule never runs on all threads: such a task is done early or
    late as one likes, while one that must be widened is done last, alone. Elsewhere all tasks count.
    """
    spreads = []
    for index, sample in ours.items():
        if floors and index not in floors:
            continue
        free = [task for task in tasks if not floors or floors[index].wide_fraction[task] == 0.0]
        ends = [sample.run.finish_s[task] for task in free]
        if len(ends) >= 2:
            spreads.append((max(ends) - min(ends)) / sample.run.seconds)
    return interval(spreads) if spreads else None


def _best_other(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fastest of the other variants that was never cut, and our time over its; None where all were."""
    others = [name for name, cut in row["cut"].items() if name != OURS and not cut and row["ours_over"][name]]
    if not others:
        return None
    best = min(others, key=lambda name: statistics.median(row["seconds"][name]))
    return {"variant": best, "ours_over_it": row["ours_over"][best]["median"]}


def _median_alone(samples: Mapping[str, Mapping[int, Sample]], variant: str, task: str) -> float | None:
    alone = [each.run.alone_s[task] for each in samples.get(variant, {}).values() if task in each.run.alone_s]
    return statistics.median(alone) if alone else None


def _joules(found: Mapping[int, Sample], num_examples: int) -> float | None:
    known = [each.joules / num_examples * 1e3 for each in found.values() if each.joules is not None]
    return statistics.median(known) if known else None


def _plain(ratio: Interval | None) -> dict[str, Any] | None:
    return None if ratio is None else asdict(ratio)
