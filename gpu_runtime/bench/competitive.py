"""Competitive sharing of one device against every other way of running several trainings on it.

Fixed work, all variants interleaved in one invocation, paired ratios; the method is described in docs/benchmarks.md.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gpu_runtime.apart import narrow
from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.fused import VmapFused
from gpu_runtime.bench.mixes import MIXES, Calibration, Mix
from gpu_runtime.bench.ours import Ours
from gpu_runtime.bench.paired import MIN_PAIRS
from gpu_runtime.bench.prediction import predictions
from gpu_runtime.bench.processes import ProcessPerTask
from gpu_runtime.bench.results import BASELINE, ONE_THREAD, OURS, headline_of, row_of, targets_of
from gpu_runtime.bench.rounds import OVERHEAD_S, Gate, Rounds
from gpu_runtime.bench.scratch import scratch_folder
from gpu_runtime.bench.trace_overhead import trace_overhead
from gpu_runtime.bench.variants import Sequential, Threads, Variant, one_each, packed_on
from gpu_runtime.device import CPU, CUDA, Device, read_nvml
from gpu_runtime.lanes import BACKENDS, choose

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        total_s: seconds that the whole benchmark may take.
        featured_s, other_s: about how long one baseline run takes, of featured mixes and of the others.
        pairs: rounds of each mix.
        every_variant: other mixes get every variant too, not only those the targets need.
        num_predictions, prediction_repeats: random mixes whose makespan is predicted, and runs of each.
        profile_s: seconds that the runtime may take to profile a task.
        trace_pairs: runs with and without a trace, of the featured mixes, or of all where none is featured.
    """

    total_s: float
    featured_s: float
    other_s: float
    pairs: int = MIN_PAIRS
    every_variant: bool = True
    num_predictions: int = 10
    prediction_repeats: int = 1
    profile_s: float = 0.5
    trace_pairs: int = 0


QUICK = Size(total_s=155.0, featured_s=0.65, other_s=0.35, every_variant=False)
FULL = Size(total_s=2500.0, featured_s=3.0, other_s=3.0, pairs=9, prediction_repeats=3, profile_s=1.5, trace_pairs=9)


def size_of(
    *,
    quick: bool,
    total_s: float | None = None,
    seconds: float | None = None,
    pairs: int | None = None,
    trace_overhead: bool = False,
) -> Size:
    """The quick or the full size, with what is given instead; with `trace_overhead` that is measured in any case."""
    size = QUICK if quick else FULL
    if total_s is not None:
        size = replace(size, total_s=total_s)
    if seconds is not None:
        size = replace(size, featured_s=seconds, other_s=seconds)
    if pairs is not None:
        size = replace(size, pairs=pairs)
    return replace(size, trace_pairs=size.pairs) if trace_overhead else size


def mixes_of(text: str) -> tuple[str, ...]:
    """Names of mixes from a comma-separated list; all where it is empty.

    Raises:
        ValueError: a name that is not known.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or tuple(MIXES)
    unknown = [name for name in names if name not in MIXES]
    if unknown:
        raise ValueError(f"unknown mixes {unknown}; there are {', '.join(MIXES)}")
    return names


def run(
    device: Device,
    mixes: Sequence[str] = tuple(MIXES),
    *,
    size: Size = QUICK,
    gate: Gate | None = None,
    seed: int = 0,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Run the benchmark and return its JSON object.

    Args:
        device: where.
        mixes: names in `MIXES`.
        size: how much is measured; `QUICK`, `FULL` or another.
        gate: when a run counts as disturbed.
        seed: of the order of variants and of the random mixes.
        say: called with a line of progress now and then.

    Raises:
        VariantError: the baseline or the runtime itself failed.
    """
    gate = gate or Gate()
    budget, draw = Budget(size.total_s), random.Random(seed)
    rows: list[dict[str, Any]] = []
    not_measured: dict[str, str] = {}
    with ExitStack() as stack:
        stack.enter_context(fresh_profiles())
        # A team of this thread would slow every variant's wide steps, but not those of the processes.
        stack.enter_context(narrow())
        calibration = Calibration(device)
        variants, missing = variants_on(device, size)
        for variant in variants.values():
            stack.callback(variant.close)
        reserve_s = size.num_predictions * (size.other_s * 1.5 * size.prediction_repeats + size.profile_s / 2)
        traced = _traced(mixes) if size.trace_pairs else ()
        reserve_s += len(traced) * 2.2 * size.trace_pairs * _seconds(MIXES[traced[0]], size) if traced else 0.0
        weights = {mix: _weight(MIXES[mix], size) for mix in mixes}
        for position, mix in enumerate(mixes):
            if budget.left_s < 2 * weights[mix]:
                not_measured[mix] = "no time left"
                continue
            left = sum(weights[each] for each in mixes[position:])
            time = Budget(max(0.0, budget.left_s - reserve_s)).part(weights[mix], left)
            chosen = _chosen(MIXES[mix], variants, device, size)
            work = calibration.work(MIXES[mix], _seconds(MIXES[mix], size))
            unsuitable = {name: reason for name in chosen if (reason := variants[name].unsuitable(work))}
            rounds = Rounds(
                [variants[name] for name in chosen if name not in unsuitable],
                essential=_essential(device),
                gate=gate,
                draw=draw,
                joules=lambda: read_nvml(device.index).energy_joule if device.kind == CUDA else None,
            )
            measured = rounds.measure(work, pairs=size.pairs, budget=time)
            if not {BASELINE, OURS} <= measured.samples.keys():
                not_measured[mix] = "; ".join(measured.not_available.values())
                continue
            measured.not_available.update(missing | unsuitable)
            measured.not_available.update(
                {name: "left out of a quick run of this mix" for name in variants if name not in chosen}
            )
            row = row_of(mix, MIXES[mix], work, measured, device.num_cores, has_floor=device.kind == CPU)
            rows.append(row)
            say(_progress(row, budget))
        ours = variants[OURS]
        assert isinstance(ours, Ours)
        predicted = predictions(
            ours,
            calibration,
            num_mixes=size.num_predictions,
            repeats=size.prediction_repeats,
            seconds=size.other_s,
            seed=seed,
            budget=budget,
            max_foreign_cores=gate.max_foreign_cores,
            say=say,
        )
        overhead = trace_overhead(
            ours,
            {mix: calibration.work(MIXES[mix], _seconds(MIXES[mix], size)) for mix in traced},
            pairs=size.trace_pairs,
            seconds=max((_seconds(MIXES[mix], size) for mix in traced), default=0.0),
            budget=budget,
            say=say,
        )
    return {
        "name": "competitive",
        "device": device.name,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "driver": device.driver},
        "settings": {
            "kind": device.kind,
            "num_cores": device.num_cores,
            "mixes": list(mixes),
            "seed": seed,
            **asdict(size),
            **asdict(gate),
            "spent_s": budget.spent_s,
        },
        "rows": rows,
        "not_measured": not_measured,
        "headline": headline_of(rows, predicted, overhead),
        "targets": targets_of(rows, predicted, overhead),
        "predictions": predicted,
    }


def variants_on(device: Device, size: Size) -> tuple[dict[str, Variant], dict[str, str]]:
    """All variants that can be measured on a device, the baseline first, and for the others the reason why not."""
    ours = Ours(OURS, device, profile_s=size.profile_s)
    if device.kind == CPU:
        cores = device.num_cores
        found: list[Variant] = [
            Sequential(BASELINE, device, cores),
            Sequential(ONE_THREAD, device, 1),
            ours,
            ProcessPerTask("process-per-task", device),
            Threads("thread-per-task", device, groups=one_each, width=1),
            Threads("static-packing", device, groups=packed_on(cores), width=1, pinned=True),
            Threads("oversubscribed", device, groups=one_each, width=cores, patience=2.0),
            VmapFused(device),
        ]
    else:
        found = [
            Sequential(BASELINE, device, 1),
            ours,
            Ours("sequential-runtime", device, mode="sequential", profile_s=size.profile_s),
            ProcessPerTask("time-slicing", device),
            Threads("streams-uncapped", device, groups=one_each, width=1),
            VmapFused(device),
        ]
    missing: dict[str, str] = {}
    automatic = choose("auto", "competitive", device).name
    for name, backend in BACKENDS.items():
        if name in (automatic, "sequential"):
            continue
        for mode in ("competitive", "exclusive"):
            reason = backend.unavailable(device)
            variant = f"{name}-{mode}"
            if reason:
                missing[variant] = reason
            else:
                found.append(Ours(variant, device, mode=mode, backend=name, profile_s=size.profile_s))
    return {variant.name: variant for variant in found}, missing


@contextlib.contextmanager
def fresh_profiles() -> Iterator[None]:
    """Profiles are measured now: the runtime's cache on disk is an empty folder in the block."""
    before = os.environ.get("PACELINE_CACHE_DIR")
    with scratch_folder() as folder:
        os.environ["PACELINE_CACHE_DIR"] = str(folder)
        try:
            yield
        finally:
            os.environ.pop("PACELINE_CACHE_DIR")
            if before is not None:
                os.environ["PACELINE_CACHE_DIR"] = before


def _essential(device: Device) -> tuple[str, ...]:
    """Never left out: the baseline, what the floor is made of, and the runtime."""
    return (BASELINE, ONE_THREAD, OURS) if device.kind == CPU else (BASELINE, OURS)


def _chosen(mix: Mix, variants: dict[str, Variant], device: Device, size: Size) -> list[str]:
    essential = _essential(device)
    return [name for name in variants if size.every_variant or mix.featured or name in essential]


def _seconds(mix: Mix, size: Size) -> float:
    """About how long one baseline run of the mix takes."""
    return size.featured_s if mix.featured else size.other_s


def _traced(mixes: Sequence[str]) -> tuple[str, ...]:
    """Mixes whose trace overhead is measured."""
    return tuple(mix for mix in mixes if MIXES[mix].featured) or tuple(mixes)


def _weight(mix: Mix, size: Size) -> float:
    """About how long a round of the mix takes: variants in units of the baseline, and what surrounds each run."""
    if mix.featured or size.every_variant:
        return 7.5 * _seconds(mix, size) + 7 * OVERHEAD_S
    return 3.2 * size.other_s + 3 * OVERHEAD_S


def _progress(row: dict[str, Any], budget: Budget) -> str:
    ratio = row["ratio_to_baseline"][OURS]
    text = f"{row['mix']}: ours takes {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] of the baseline"
    if row["ratio_to_floor"]:
        text += f", {row['ratio_to_floor'][OURS]['median']:.2f} of the floor"
    return f"{text}; {budget.left_s:.0f} s left"
