"""How near rounds come to the least they could take by true costs: arch-sync against equal and proportional loads.

Rounds are profile-only (`simulations.profile_rounds`): virtual seconds, no training, so no metrics.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from server_app.history import versions
from simulations.fleet import Fleet, load_fleet
from simulations.profile_rounds import SETTLED_FROM_ROUND, ProfileGame, ProfileRound
from strategies.options import StrategyOptions
from tasks.registry import task_refs

SUITE_OF: Mapping[str, str] = {"campus": "driving", "workshop": "tiny", "district": "tiny"}
# Drift and dropout of a condition, whatever the fleet's own.
CONDITIONS: Mapping[str, tuple[float, float]] = {"calm": (0.0, 0.0), "drift": (0.02, 0.0), "dropout": (0.02, 0.1)}
VARIANTS: Mapping[str, tuple[str, str]] = {
    "arch-sync": ("arch-sync", "auto"),
    "fedavg-equal": ("fedavg", "equal"),
    "fedavg-proportional": ("fedavg", "proportional"),
}
COLUMNS = ("fleet", "condition", "variant", "makespan s", "over bound", "idle", "optimum idle", "examples/s")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run."""

    num_seeds: int = 3
    num_rounds: int = 12


QUICK, FULL = Size(num_seeds=2, num_rounds=6), Size()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told beside the common options."""
    parser.add_argument("--fleets", default="", help=f"comma-separated, of {', '.join(SUITE_OF)}; default: all")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The benchmark's JSON object.

    Raises:
        ValueError: an unknown fleet.
    """
    fleets = [name.strip() for name in options.fleets.split(",") if name.strip()] or list(SUITE_OF)
    unknown = [name for name in fleets if name not in SUITE_OF]
    if unknown:
        raise ValueError(f"no fleet {unknown[0]!r} here; there are: {', '.join(SUITE_OF)}")
    size = QUICK if options.quick else FULL
    rows = []
    for name in fleets:
        for condition, (drift, dropout) in CONDITIONS.items():
            say(f"{name}, {condition}")
            fleet = replace(load_fleet(name), drift=drift, dropout=dropout)
            rows += [
                {"fleet": name, "condition": condition, "variant": variant, **_measure(fleet, variant, size)}
                for variant in VARIANTS
            ]
    return {
        "name": "synchronisation",
        "device": "virtual",
        "versions": versions(),
        "settings": {"num_seeds": size.num_seeds, "num_rounds": size.num_rounds, "trained": False},
        "rows": rows,
        "headline": _headline(rows),
    }


def table(result: Mapping[str, Any]) -> str:
    """The rows, aligned."""
    lines = [COLUMNS]
    lines += [
        (
            row["fleet"],
            row["condition"],
            row["variant"],
            f"{row['makespan_s']:.4g}",
            f"{row['makespan_over_bound']:.3f}",
            f"{100 * row['idle_fraction']:.1f}%",
            f"{100 * row['optimum_idle_fraction']:.1f}%",
            f"{row['examples_per_s']:.0f}",
        )
        for row in result["rows"]
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _measure(fleet: Fleet, variant: str, size: Size) -> dict[str, float]:
    """Means over seeds and over rounds from the third on."""
    strategy, loads = VARIANTS[variant]
    played: list[ProfileRound] = []
    for seed in range(1, size.num_seeds + 1):
        options = StrategyOptions(name=strategy, loads=loads, seed=seed)
        game = ProfileGame(fleet, task_refs(SUITE_OF[fleet.name]), options, seed=seed)
        for server_round in range(1, size.num_rounds + 1):
            settled = server_round >= SETTLED_FROM_ROUND
            one = game.play(server_round, with_bound=settled)
            if settled:
                played.append(one)
    pairs = [(one, one.optimum) for one in played if one.optimum is not None]
    examples = sum(
        task.examples for one in played for client in one.record.clients.values() for task in client.tasks.values()
    )
    return {
        "makespan_s": fmean(one.record.makespan_s for one in played),
        "makespan_over_bound": fmean(one.record.makespan_s / optimum.bound_s for one, optimum in pairs),
        "idle_fraction": fmean(one.busy_idle_fraction for one in played),
        "optimum_idle_fraction": fmean(optimum.idle_fraction for _, optimum in pairs),
        "examples_per_s": examples / sum(one.record.makespan_s for one in played),
    }


def _headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {
        "makespan_over_bound": {},
        "idle_over_optimum": {},
        "round_speedup_over_equal": {},
    }
    by_key = {(row["fleet"], row["condition"], row["variant"]): row for row in rows}
    for (fleet, condition, variant), row in by_key.items():
        if variant != "arch-sync":
            continue
        key = f"{fleet}/{condition}"
        found["makespan_over_bound"][key] = row["makespan_over_bound"]
        found["idle_over_optimum"][key] = row["idle_fraction"] - row["optimum_idle_fraction"]
        equal = by_key[fleet, condition, "fedavg-equal"]
        found["round_speedup_over_equal"][key] = equal["makespan_s"] / row["makespan_s"]
    return found
