"""The result of the pipeline benchmark as text, and as a table for docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulations.bench.pipelines.variants import GRID, OURS, OURS_ANY


def table(result: Mapping[str, Any]) -> str:
    """A line for each variant of each setting, then clients, validation, channel, accuracy and targets."""
    settings = result["settings"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    device = f"device {settings['slowdown']:g} times slower than a core"
    lines = [f"{result['device']}, server on {settings['server_cores']} cores, {device}, {versions}", ""]
    for row in result["rows"]:
        exchange = f"a model there and back takes {row['exchange']['seconds']:.1f} s a round, not counted"
        lines += [
            f"{row['setting']} ({row['clock']} time; {exchange})",
            f"  {'variant':<10}{'choice':<16}{'s':>8}{'pred.':>8}  {'idle: device':<13}{'server':<8}{'up':<6}"
            f"{'down':<6}{'MB up':>7}{'down':>7}  {'over fl':<22}{'over splitfed':<22}",
        ]
        lines += [f"  {name:<10}{_cells(variant)}".rstrip() for name, variant in row["variants"].items()]
        lines.append("")
    for setting, reason in result["not_measured"].items():
        lines.append(f"{setting}: {reason}")
    lines += [_clients_line(each) for each in result["clients"]]
    for each in result["validation"]:
        lines.append(f"real over virtual {each['setting']:<28}{each['variant']:<10}{_interval(each)}")
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in result["channel"].items())
    lines += [f"channel on loopback, MB/s: {rates}"] if rates else []
    for each in result["accuracy"]:
        lines.append(
            f"accuracy {each['task']} {each['encoding']}: {each['points_lost']:+.2f} points lost of {each['fp32']:.4f}"
        )
    lines.append("")
    for target in result["targets"]:
        remark = (" (virtual)" if target["clock"] == "virtual" else "") + (
            " (disturbed)" if target["disturbed"] else ""
        )
        lines.append(
            f"target {target['state']:<8}{target['setting']:<28}{target['what']} {target['median']:.3f}, "
            f"wanted {_wanted(target)}{remark}"
        )
    return "\n".join(lines)


def markdown(result: Mapping[str, Any]) -> str:
    """The results table of docs/benchmarks.md."""
    head = (
        "setting", "clock", "fl s", "splitfed s", "pipar s", "grid s", "ours s", "P, N", "measured / predicted",
        "ours / grid", "over fl", "over splitfed", "any encoding", "over fl",
    )  # fmt: skip
    lines = [_markdown_line(head), _markdown_line(["---"] * len(head))]
    for row in result["rows"]:
        ours, lossy = row["variants"][OURS], row["variants"][OURS_ANY]
        seconds = [
            f"{row['variants'][name]['iteration_s']:.2f}" for name in ("fl", "splitfed", "pipar", "grid", "ours")
        ]
        measured = _interval(ours["measured_over_predicted"]) if row["clock"] == "real" else "-"
        lines.append(
            _markdown_line(
                [
                    row["setting"],
                    row["clock"],
                    *seconds,
                    f"{ours['split_point']}, {ours['micro_batches']}",
                    measured,
                    _interval(row["ours_over"][GRID]),
                    f"{1 / ours['over_fl']['median']:.1f}",
                    f"{1 / ours['over_splitfed']['median']:.2f}",
                    _choice(lossy),
                    f"{1 / lossy['over_fl']['median']:.1f}",
                ]
            )
        )
    return "\n".join(lines)


def _cells(variant: Mapping[str, Any]) -> str:
    idle = variant["idle_fraction"]
    text = f"{_choice(variant):<16}{variant['iteration_s']:>8.3f}{variant['predicted_s']:>8.3f}  "
    text += f"{idle['device']:<13.2f}{idle['server']:<8.2f}{idle['uplink']:<6.2f}{idle['downlink']:<6.2f}"
    text += f"{variant['bytes_up'] / 1e6:>7.2f}{variant['bytes_down'] / 1e6:>7.2f}  "
    text += f"{_interval(variant['over_fl']):<22}{_interval(variant['over_splitfed']):<22}"
    return text + (f"{variant['disturbed']} disturbed" if variant["disturbed"] else "")


def _choice(variant: Mapping[str, Any]) -> str:
    if variant["split_point"] is None:
        return "whole"
    return f"P={variant['split_point']} N={variant['micro_batches']} {variant['encoding']}"


def _clients_line(each: Mapping[str, Any]) -> str:
    return (
        f"{each['setting']}: {each['iteration_s']:.3f} s an iteration (predicted {each['predicted_s']:.3f}), server "
        f"idle {each['server_idle_s']:.3f} s, floor {each['server_idle_floor_s']:.3f} s, "
        f"{each['speedup_over_fl']:.1f} times as fast as fl, {each['speedup_over_splitfed']:.2f} as splitfed"
        f"{' (disturbed)' if each['disturbed'] else ''}"
    )


def _interval(ratio: Mapping[str, Any]) -> str:
    if ratio["num_pairs"] == 0:
        return f"{ratio['median']:.3f}"
    return f"{ratio['median']:.3f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _wanted(target: Mapping[str, Any]) -> str:
    at_least = target["what"].startswith(("part of", "number of"))
    return f"{'at least' if at_least else 'at most'} {target['limit']:.3f}"


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the markdown table of a JSON file that the benchmark has written."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path)
    print(markdown(json.loads(parser.parse_args().file.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
