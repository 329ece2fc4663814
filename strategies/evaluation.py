"""Averages what clients measured on their own data: metrics `<task>/<metric>`, weighted by `<task>/num-examples`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flwr.app import Message, MetricRecord


def average_metrics(replies: Mapping[str, Message], tasks: Sequence[str]) -> MetricRecord | None:
    """Weighted means over clients, in the order of their names; values that are not finite numbers are left out.

    Returns:
        `<task>/<metric>` and `<task>/num-examples`, or None when no reply has anything usable.
    """
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    for _, reply in sorted(replies.items()):
        if reply.has_error():
            continue
        for record in reply.content.metric_records.values():
            for task in tasks:
                weight = _number(record.get(f"{task}/num-examples"))
                if weight is None or weight <= 0:
                    continue
                for key, found in record.items():
                    value = _number(found)
                    if key.startswith(f"{task}/") and key != f"{task}/num-examples" and value is not None:
                        totals[key] = totals.get(key, 0.0) + weight * value
                        weights[key] = weights.get(key, 0.0) + weight
                weights[f"{task}/num-examples"] = weights.get(f"{task}/num-examples", 0.0) + weight
    if not weights:
        return None
    means = {key: total / weights[key] for key, total in totals.items()}
    counts = {key: int(weight) for key, weight in weights.items() if key not in totals}
    return MetricRecord({**means, **counts})


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
