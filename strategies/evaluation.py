"""Averages what clients measured on their own data: metrics `<task>/<metric>`, weighted by `<task>/num-examples`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flwr.app import Message, MetricRecord

from gpu_runtime.contracts import one_line

COUNT = "num-examples"


class _UnusableError(Exception):
    """Why a client's numbers on one task are left out."""


def average_metrics(
    replies: Mapping[str, Message], tasks: Sequence[str], held: Mapping[str, Mapping[str, int]]
) -> tuple[MetricRecord | None, tuple[str, ...]]:
    """Weighted means over clients, in the order of their names.

    A client any of whose numbers on a task is no finite number, or whose count is none of examples it holds, is left
    out of that task's means and count.

    Args:
        replies: to `evaluate`, by client.
        tasks: of the run.
        held: examples of each task by client.

    Returns:
        `<task>/<metric>` and `<task>/num-examples`, or None when no reply has anything usable; and a line for each
        client and task left out.
    """
    used: dict[str, list[tuple[int, dict[str, float]]]] = {}
    notes: list[str] = []
    for client, reply in sorted(replies.items()):
        if reply.has_error():
            notes.append(f"client {client!r}: no evaluation: error {reply.error.code}")
            continue
        record = {key: value for part in reply.content.metric_records.values() for key, value in part.items()}
        for task in tasks:
            try:
                count, metrics = _of_task(record, task, held[client].get(task, 0))
            except _UnusableError as fault:
                notes.append(one_line(f"client {client!r}, task {task!r}: evaluation left out: {fault}"))
                continue
            if count and metrics:
                used.setdefault(task, []).append((count, metrics))
    found = MetricRecord()
    for task, entries in used.items():
        for name in dict.fromkeys(name for _, metrics in entries for name in metrics):
            having = [(count, metrics[name]) for count, metrics in entries if name in metrics]
            total = sum(count for count, _ in having)
            found[f"{task}/{name}"] = sum(count / total * value for count, value in having)
        found[f"{task}/{COUNT}"] = sum(count for count, _ in entries)
    return (found if used else None), tuple(notes)


def _of_task(record: Mapping[str, object], task: str, num_held: int) -> tuple[int, dict[str, float]]:
    """Examples and metrics of one task as a client gave them; 0 examples where it says nothing of the task.

    Raises:
        _UnusableError: they cannot be meant.
    """
    prefix = f"{task}/"
    mine = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
    if not mine:
        return 0, {}
    count = _number(COUNT, mine.pop(COUNT, None))
    if count != int(count) or not 0 <= count <= num_held:
        raise _UnusableError(f"{COUNT} is {count:g} where it holds {num_held}")
    return int(count), {name: _number(name, value) for name, value in mine.items()} if count else {}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _UnusableError(f"{name} is {value!r}, no finite number")
    return float(value)
