"""What was measured, as plain data: rows, headline and targets of the benchmark's JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu_runtime.bench.paired import MIN_PAIRS, Interval, interval, paired_ratio
from gpu_runtime.bench.results import state_of
from gpu_runtime.contracts import Emulation
from gpu_runtime.pipeline.cut_costs import Link
from gpu_runtime.pipeline.planner import Choice
from simulations.bench.pipelines.rounds import Sample, Samples
from simulations.bench.pipelines.service import Iteration, median_of
from simulations.bench.pipelines.variants import FL, GRID, OURS, OURS_ANY, PIPAR, SPLITFED, Compared, key_of
from simulations.bench.pipelines.virtual import virtual_iteration

REAL, VIRTUAL = "real", "virtual"
RESOURCES = ("device", "server", "uplink", "downlink")

MAX_MEASURED_OVER_PREDICTED, MAX_OVER_GRID, MAX_OVER_OTHERS = 1.10, 1.05, 1.03
# Of the 16 settings, in how many the two limits above must hold.
MIN_GOOD_FRACTION = 12 / 16
MAX_VALIDATION_ERROR, MIN_VALIDATED = 0.10, 6
# Speed-ups over classic FL: where ours must be so much faster, with fp32 and with any encoding.
FEATURED, MIN_SPEEDUP, MIN_SPEEDUP_ANY = "resnet18/4g", 5.0, 8.0
MIN_BEST_SPEEDUP_ANY = 30.0
MAX_IDLE_OVER_FLOOR = 1.1
MIN_CHANNEL_MB_PER_S = 400.0
MAX_ACCURACY_POINTS = 0.5


def row_of(
    model: str,
    link: str,
    emulation: Emulation,
    probed: Link,
    batch_size: int,
    model_bytes: int,
    found: Compared,
    samples: Samples | None,
) -> dict[str, Any]:
    """One setting. Without `samples` all times are virtual; the grid's best is the best of what was measured of it."""
    clock = VIRTUAL if samples is None else REAL
    virtual = {
        key_of(choice): virtual_iteration(choice, batch_size, probed)
        for choice in (*found.choices.values(), *found.grid)
    }
    if samples is None:
        samples = {key: {0: Sample(iteration=iteration)} for key, iteration in virtual.items()}
    grid = [choice for choice in found.grid if key_of(choice) in samples]
    best = min(grid, key=lambda choice: _median_s(samples[key_of(choice)]))
    choices = {**found.choices, GRID: best}
    seconds = {
        name: {index: sample.iteration.seconds for index, sample in samples[key_of(choice)].items()}
        for name, choice in choices.items()
    }
    return {
        "setting": f"{model}/{link}",
        "model": model,
        "link": link,
        "clock": clock,
        "variants": {
            name: {
                **_variant(choice, samples[key_of(choice)], virtual[key_of(choice)]),
                "over_fl": _ratio(seconds[name], seconds[FL], clock),
                "over_splitfed": _ratio(seconds[name], seconds[SPLITFED], clock),
            }
            for name, choice in choices.items()
        },
        "ours_over": {name: _ratio(seconds[OURS], seconds[name], clock) for name in choices if name != OURS},
        "grid_measured": len(grid),
        "exchange": {"model_bytes": model_bytes, "seconds": exchange_s(model_bytes, emulation)},
    }


def exchange_s(model_bytes: int, emulation: Emulation) -> float:
    """Seconds of a whole model down and up again, once a round: what classic FL moves, and no iteration counts."""
    rates = (emulation.downlink_bytes_per_s, emulation.uplink_bytes_per_s)
    return sum(emulation.latency_s + (model_bytes / rate if rate else 0.0) for rate in rates)


def validation_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Real over virtual time, for every variant of every setting that was measured in real time."""
    return [
        {"setting": row["setting"], "variant": name, **variant["real_over_virtual"]}
        for row in rows
        if row["clock"] == REAL
        for name, variant in row["variants"].items()
        if name != FL
    ]


def headline_of(
    rows: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]], channel: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers that the targets are about; maps are keyed by `model/link`, with `xK` behind it for K clients."""

    def speedup(variant: str, over: str) -> dict[str, float]:
        return {row["setting"]: 1 / row["variants"][variant][over]["median"] for row in rows}

    real = [row for row in rows if row["clock"] == REAL]
    return {
        "measured_over_predicted": {
            row["setting"]: row["variants"][OURS]["measured_over_predicted"]["median"] for row in real
        },
        "ours_over_grid_best": {row["setting"]: row["ours_over"][GRID]["median"] for row in rows},
        "speedup_over_fl": speedup(OURS, "over_fl"),
        "speedup_over_fl_any_encoding": speedup(OURS_ANY, "over_fl"),
        "speedup_over_splitfed": speedup(OURS, "over_splitfed"),
        "server_idle_over_floor": {each["setting"]: each["server_idle_over_floor"] for each in clients},
        "channel_mb_per_s": dict(channel),
        "clock": {row["setting"]: row["clock"] for row in rows},
    }


def targets_of(
    rows: Sequence[Mapping[str, Any]],
    clients: Sequence[Mapping[str, Any]],
    channel: Mapping[str, float],
    accuracy: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Each target of each setting, then those over all settings; states as of `gpu_runtime.bench.results.state_of`.

    A virtual row has no interval: it is "met" or "missed", and says "virtual".
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        limits = [
            ("ours over grid", MAX_OVER_GRID, row["ours_over"][GRID]),
            ("ours over splitfed", MAX_OVER_OTHERS, row["ours_over"][SPLITFED]),
            ("ours over pipar", MAX_OVER_OTHERS, row["ours_over"][PIPAR]),
        ]
        if row["clock"] == REAL:
            predicted = row["variants"][OURS]["measured_over_predicted"]
            limits.insert(0, ("measured over predicted", MAX_MEASURED_OVER_PREDICTED, predicted))
        if row["setting"] == FEATURED:
            limits += [
                ("ours over fl", 1 / MIN_SPEEDUP, row["variants"][OURS]["over_fl"]),
                ("ours-any over fl", 1 / MIN_SPEEDUP_ANY, row["variants"][OURS_ANY]["over_fl"]),
            ]
        disturbed = _mostly_disturbed(row)
        for what, limit, ratio in limits:
            state = state_of(limit, ratio, trusted=_trusted(row, ratio) and not disturbed)
            found.append(_target(row["setting"], what, limit, state, ratio["median"], row["clock"], disturbed))
    for what in ("measured over predicted", "ours over grid"):
        states = [each["state"] for each in found if each["what"] == what]
        if states:
            good = states.count("met") / len(states)
            sure = 1 - states.count("missed") / len(states)
            state = "met" if good >= MIN_GOOD_FRACTION else "open" if sure >= MIN_GOOD_FRACTION else "missed"
            found.append(_target("all", f"part of settings: {what}", MIN_GOOD_FRACTION, state, good))
    if rows:
        best = min(rows, key=lambda row: float(row["variants"][OURS_ANY]["over_fl"]["median"]))
        ratio = best["variants"][OURS_ANY]["over_fl"]
        limit = 1 / MIN_BEST_SPEEDUP_ANY
        state = state_of(limit, ratio, trusted=_trusted(best, ratio) and not _mostly_disturbed(best))
        found.append(_target(best["setting"], "best ours-any over fl", limit, state, ratio["median"], best["clock"]))
    validated = _num_validated(rows)
    if any(row["clock"] == REAL for row in rows):
        state = "met" if validated >= MIN_VALIDATED else "open"
        found.append(_target("all", "number of settings: virtual clock within 10 %", MIN_VALIDATED, state, validated))
    for each in clients:
        over = each["server_idle_over_floor"]
        state = "met" if over <= MAX_IDLE_OVER_FLOOR else "open"
        found.append(_target(each["setting"], "server idle over floor", MAX_IDLE_OVER_FLOOR, state, over))
    for name, rate in channel.items():
        state = "met" if rate >= MIN_CHANNEL_MB_PER_S else "open"
        found.append(_target("channel", f"number of MB/s, {name}", MIN_CHANNEL_MB_PER_S, state, rate))
    for each in accuracy:
        state = "met" if each["points_lost"] <= MAX_ACCURACY_POINTS else "open"
        what = f"points lost by {each['encoding']}"
        found.append(_target(each["task"], what, MAX_ACCURACY_POINTS, state, each["points_lost"]))
    return found


def interval_of(values: Sequence[float]) -> dict[str, Any]:
    """Median and bootstrap interval, as in the rows."""
    return asdict(interval(values))


def _variant(choice: Choice, samples: Mapping[int, Sample], virtual: Iteration) -> dict[str, Any]:
    middle = median_of([sample.iteration for sample in samples.values()])
    seconds = [sample.iteration.seconds for sample in samples.values()]
    return {
        "split_point": choice.split_point,
        "micro_batches": choice.micro_batches,
        "encoding": choice.encoding,
        "seconds": seconds,
        "iteration_s": middle.seconds,
        "predicted_s": choice.step_s,
        "virtual_s": virtual.seconds,
        "measured_over_predicted": interval_of([each / choice.step_s for each in seconds]),
        "real_over_virtual": interval_of([each / virtual.seconds for each in seconds]),
        "busy_s": {name: getattr(middle, f"{name}_s") for name in RESOURCES},
        "predicted_busy_s": {name: getattr(virtual, f"{name}_s") for name in RESOURCES},
        "idle_fraction": {name: middle.idle_fraction(name) for name in RESOURCES},
        "bytes_up": middle.bytes_up,
        "bytes_down": middle.bytes_down,
        "foreign_cores": [sample.foreign_cores for sample in samples.values()],
        "disturbed": sum(sample.disturbed for sample in samples.values()),
    }


def _ratio(values: Mapping[int, float], baseline: Mapping[int, float], clock: str) -> dict[str, Any]:
    ratio: Interval | None = paired_ratio(values, baseline)
    assert ratio is not None, "every round has every choice"
    return {**asdict(ratio), "num_pairs": ratio.num_pairs if clock == REAL else 0}


def _median_s(samples: Mapping[int, Sample]) -> float:
    return statistics.median(sample.iteration.seconds for sample in samples.values())


def _trusted(row: Mapping[str, Any], ratio: Mapping[str, Any]) -> bool:
    return bool(row["clock"] == VIRTUAL or ratio["num_pairs"] >= MIN_PAIRS)


def _mostly_disturbed(row: Mapping[str, Any]) -> bool:
    ours = row["variants"][OURS]
    return 2 * int(ours["disturbed"]) > len(ours["seconds"])


def _num_validated(rows: Sequence[Mapping[str, Any]]) -> int:
    """Settings whose run of ours took what the virtual clock says, within 10 %."""
    ratios = [row["variants"][OURS]["real_over_virtual"]["median"] for row in rows if row["clock"] == REAL]
    return sum(abs(ratio - 1) <= MAX_VALIDATION_ERROR for ratio in ratios)


def _target(
    setting: str, what: str, limit: float, state: str, median: float, clock: str = REAL, disturbed: bool = False
) -> dict[str, Any]:
    return {
        "setting": setting,
        "what": what,
        "limit": limit,
        "state": state,
        "median": median,
        "clock": clock,
        "disturbed": disturbed,
    }
