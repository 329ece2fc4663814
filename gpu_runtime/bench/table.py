"""The result of the competitive benchmark as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(result: Mapping[str, Any]) -> str:
    """A line for each variant of each mix, then targets and predictions."""
    settings = result["settings"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    lines = [f"{result['device']}, {settings['num_cores']} cores, {versions}", ""]
    nowhere = _nowhere_available(result["rows"])
    for row in result["rows"]:
        work = ", ".join(f"{task} {details['num_steps']}" for task, details in row["tasks"].items())
        lines += [
            f"{row['mix']} (steps: {work}; backend {row['backend']})",
            f"  {'variant':<22}{'to baseline':<24}{'to floor':<24}{'pairs':>5}  remarks",
        ]
        for name, ratio in row["ratio_to_baseline"].items():
            to_floor = row["ratio_to_floor"].get(name)
            cells = f"  {name:<22}{_interval(ratio):<24}{_interval(to_floor):<24}{row['num_pairs'][name]:>5}"
            lines.append(f"{cells}  {_remarks(row, name)}".rstrip())
        lines += [
            f"  {name:<22}{_missing(reason)}" for name, reason in row["not_available"].items() if name not in nowhere
        ]
        if row["finish_spread"]:
            lines.append(f"  finish spread         {_interval(row['finish_spread'])}")
        lines.append("")
    lines += [f"{name}: {_missing(reason)}" for name, reason in nowhere.items()]
    lines += [f"{mix}: not measured: {reason}" for mix, reason in result["not_measured"].items()]
    for each in result["predictions"]:
        runs = ", ".join(f"{seconds:.2f}" for seconds in each["measured_s"])
        tasks = ", ".join(each["tasks"])
        lines.append(f"predicted {each['predicted_s']:.2f} s, measured {runs} s, error {each['error']:.3f}: {tasks}")
    lines.append("")
    for target in result["targets"]:
        lines.append(
            f"target {target['state']:<8}{target['mix']:<12}{target['what']} {target['median']:.3f}, "
            f"wanted {_wanted(target)}{' (disturbed)' if target['disturbed'] else ''}"
        )
    return "\n".join(lines)


def _wanted(target: Mapping[str, Any]) -> str:
    return f"{'at least' if target['what'].startswith('part of') else 'at most'} {target['limit']:.3f}"


def _missing(reason: str) -> str:
    return reason if reason.startswith("left out") else f"not available: {reason}"


def _nowhere_available(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Variants that are missing everywhere for the same reason."""
    if not rows:
        return {}
    common = set.intersection(*(set(row["not_available"].items()) for row in rows))
    return {name: reason for name, reason in rows[0]["not_available"].items() if (name, reason) in common}


def _interval(ratio: Mapping[str, Any] | None) -> str:
    return "-" if not ratio else f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _remarks(row: Mapping[str, Any], name: str) -> str:
    parts = []
    if row["disturbed"][name]:
        foreign = [cores for cores in row["foreign_cores"][name] if cores is not None]
        parts.append(f"{row['disturbed'][name]} disturbed (others used up to {max(foreign):.1f} cores)")
    if row["cut"][name]:
        parts.append(f"{row['cut'][name]} cut short, extrapolated")
    if row["joules_per_1000_examples"][name] is not None:
        parts.append(f"{row['joules_per_1000_examples'][name]:.2f} J per 1000 examples")
    return "; ".join(parts)
