"""Checks a client's reply to a plan, task by task: what may be aggregated, and in one line each what may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from gpu_runtime.contracts import (
    CANCELLED,
    FAILED,
    TRAINED,
    ContractError,
    Plan,
    Report,
    TaskPlan,
    TaskReport,
    array_key,
    from_json,
    one_line,
)
from strategies.error_reply import error_line
from strategies.records import LOST, PARTIAL, REFUSED, ClientRecord, ClientTaskRecord
from strategies.server_stages import ServerHalf, ServerStageSource, StageError

NDArray = npt.NDArray[np.generic]

# Of a round on the virtual clock: 30 years. On the measured one the server knows better.
MAX_SECONDS = 1e9
MAX_LOSS = 1e15
MAX_NOTES = 20
NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Update:
    """One task's weights from one client, checked. Keys as on the wire, in the order of the server's arrays."""

    client: str
    task: str
    arrays: Mapping[str, NDArray]
    num_examples: int
    num_steps: int
    num_held: int
    mean_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckedReply:
    """What one client's reply comes to. `report` is None when it cannot be trusted at all."""

    client: str
    record: ClientRecord
    report: Report | None = None
    updates: tuple[Update, ...] = ()
    refused: tuple[str, ...] = ()


class _RefusedError(Exception):
    """Why a reply or a task of it is not used; `outcome` is what the record says."""

    def __init__(self, text: str, outcome: str = REFUSED) -> None:
        super().__init__(one_line(text))
        self.outcome = outcome


def lost(plan: Plan, text: str = "no reply") -> CheckedReply:
    """A planned client that did not answer."""
    return _refuse(plan, text, LOST)


def check(
    reply: Message,
    plan: Plan,
    current: Mapping[str, NDArray],
    num_held: Mapping[str, int],
    *,
    clock: str,
    max_seconds: float = MAX_SECONDS,
    batch_sizes: Mapping[str, int] = NO_SIZES,
    needs_loss: bool = False,
    stages: ServerStageSource | None = None,
) -> CheckedReply:
    """Check `reply` against its plan and the arrays the server sent.

    Args:
        reply: the client's answer, or Flower's error in its place.
        plan: what the client was told to do.
        current: the server's arrays by key, whose keys, shapes and types a reply must have.
        num_held: examples of each task the client holds.
        clock: the clock that all reports of the round must use.
        max_seconds: what the round can have taken at most.
        batch_sizes: examples of a step of each task, where the plan does not say; a task in neither may take any.
        needs_loss: whether aggregation needs each task's training loss.
        stages: has the other halves of tasks that were split.

    Returns:
        The accepted updates, and one line for every task or reply refused. Never raises for a bad reply.
    """
    try:
        report = _report(reply, plan, clock, max_seconds)
        arrays = reply.content.get("arrays")
        if not isinstance(arrays, ArrayRecord):
            raise _RefusedError("reply without ArrayRecord 'arrays'")
    except _RefusedError as fault:
        return _refuse(plan, str(fault), fault.outcome)

    refused = [_stray(plan, arrays)] if _stray(plan, arrays) else []
    updates, tasks = [], {}
    for task_plan in plan.tasks:
        entry = None
        try:
            entry = _task_report(report, task_plan, max_seconds, batch_sizes)
            if needs_loss and not (entry.mean_loss is not None and 0 <= entry.mean_loss <= MAX_LOSS):
                raise _RefusedError(
                    f"the strategy needs its mean training loss, from 0 to {MAX_LOSS:g}, not {entry.mean_loss}"
                )
            update = Update(
                client=plan.client,
                task=task_plan.task,
                arrays=_task_arrays(arrays, task_plan.task, current, _server_half(entry, task_plan, plan, stages)),
                num_examples=entry.num_examples,
                num_steps=entry.num_steps,
                num_held=num_held[task_plan.task],
                mean_loss=entry.mean_loss,
            )
        except _RefusedError as fault:
            refused.append(f"client {plan.client!r}, task {task_plan.task!r}: {fault}")
            tasks[task_plan.task] = _task_record(task_plan, entry, fault.outcome, str(fault))
        else:
            updates.append(update)
            tasks[task_plan.task] = _task_record(task_plan, entry, entry.outcome, "")
    return CheckedReply(
        client=plan.client,
        record=ClientRecord(
            busy_s=report.seconds,
            outcome=_outcome(tasks),
            backend=one_line(report.backend),
            notes=tuple(one_line(note) for note in report.notes[:MAX_NOTES]),
            error="; ".join(refused),
            tasks=tasks,
        ),
        report=report,
        updates=tuple(updates),
        refused=tuple(refused),
    )


def refuse_task(reply: CheckedReply, task: str, text: str) -> CheckedReply:
    """`reply` without its update of `task`, which its record then calls refused because of `text`."""
    line = f"client {reply.client!r}, task {task!r}: {text}"
    tasks = {**reply.record.tasks, task: replace(reply.record.tasks[task], examples=0, outcome=REFUSED, error=text)}
    refused = (*reply.refused, line)
    return replace(
        reply,
        record=replace(reply.record, outcome=_outcome(tasks), error="; ".join(refused), tasks=tasks),
        updates=tuple(update for update in reply.updates if update.task != task),
        refused=refused,
    )


def _outcome(tasks: Mapping[str, ClientTaskRecord]) -> str:
    outcomes = {task.outcome for task in tasks.values()}
    return outcomes.pop() if len(outcomes) == 1 else PARTIAL


def _refuse(plan: Plan, text: str, outcome: str) -> CheckedReply:
    tasks = {task.task: _task_record(task, None, outcome, text) for task in plan.tasks}
    return CheckedReply(
        client=plan.client,
        record=ClientRecord(outcome=outcome, error=text, tasks=tasks),
        refused=(f"client {plan.client!r}: {text}",),
    )


def _task_record(plan: TaskPlan, entry: TaskReport | None, outcome: str, error: str) -> ClientTaskRecord:
    if entry is None:
        return ClientTaskRecord(share=plan.share, outcome=outcome, error=error)
    return ClientTaskRecord(
        examples=entry.num_examples if outcome in (TRAINED, CANCELLED) and not error else 0,
        steps=entry.num_steps,
        share=entry.share if entry.share is not None else plan.share,
        seconds=entry.seconds,
        loss=entry.mean_loss,
        outcome=outcome,
        error=error,
        split=entry.split,
    )


def _report(reply: Message, plan: Plan, clock: str, max_seconds: float) -> Report:
    if reply.has_error():
        raise _RefusedError(f"error reply: {error_line(reply)}", FAILED)
    record = reply.content.get("report")
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise _RefusedError("reply without ConfigRecord 'report' {'json'}")
    try:
        report = from_json(Report, text)
    except ContractError as error:
        raise _RefusedError(f"report not understood: {error}") from None
    expected = (("client", plan.client), ("server_round", plan.server_round), ("attempt", plan.attempt))
    for name, value in expected:
        if getattr(report, name) != value:
            raise _RefusedError(f"report has {name} {getattr(report, name)!r} where {value!r} was asked")
    if report.clock != clock:
        raise _RefusedError(f"report is in {report.clock} seconds, others of this round in {clock} seconds")
    _check_seconds(report.seconds, max_seconds)
    return report


def _check_seconds(seconds: float, max_seconds: float) -> None:
    if not 0 <= seconds <= max_seconds:
        raise _RefusedError(f"reports {seconds:g} seconds where 0 to {max_seconds:g} can have passed")


def _task_report(report: Report, plan: TaskPlan, max_seconds: float, batch_sizes: Mapping[str, int]) -> TaskReport:
    entries = [entry for entry in report.tasks if entry.task == plan.task]
    if len(entries) != 1:
        raise _RefusedError(f"report has {len(entries)} entries for it instead of one")
    (entry,) = entries
    if entry.outcome == FAILED:
        raise _RefusedError(f"failed: {entry.error or 'no reason given'}", FAILED)
    if entry.outcome == CANCELLED and entry.num_examples <= 0:
        raise _RefusedError(f"cancelled before anything was trained: {entry.error or 'deadline'}", CANCELLED)
    if entry.outcome not in (TRAINED, CANCELLED):
        raise _RefusedError(f"unknown outcome {entry.outcome!r}")
    if not 0 < entry.num_examples <= plan.num_examples:
        raise _RefusedError(f"reports {entry.num_examples} examples where 1 to {plan.num_examples} were planned")
    batch_size = plan.batch_size or batch_sizes.get(plan.task, entry.num_examples)
    least = -(-entry.num_examples // batch_size)
    if not least <= entry.num_steps <= entry.num_examples:
        raise _RefusedError(
            f"reports {entry.num_steps} steps where {least} to {entry.num_examples} train {entry.num_examples} examples"
        )
    _check_seconds(entry.seconds, max_seconds)
    return entry


def _server_half(
    entry: TaskReport, task: TaskPlan, plan: Plan, stages: ServerStageSource | None
) -> Mapping[str, NDArray]:
    """The service's half of a task that was split, by key; empty for one that trained whole."""
    if entry.split is None:
        return {}
    if task.split_point is None or stages is None:
        raise _RefusedError("reports half of a model where a whole one was asked")
    if entry.split.split_point != task.split_point:
        raise _RefusedError(f"split its model at {entry.split.split_point}, not at {task.split_point} as asked")
    try:
        half: ServerHalf = stages.collect(plan.server_round, plan.client, task.task, plan.attempt)
    except StageError as error:
        raise _RefusedError(f"the split service has no other half: {error}") from None
    for what, own, other in (
        ("steps", entry.num_steps, half.num_steps),
        ("examples", entry.num_examples, half.num_examples),
    ):
        if own != other:
            raise _RefusedError(f"its half was trained for {own} {what}, the split service's for {other}")
    return {array_key(task.task, name): array for name, array in half.arrays.items()}


def _task_arrays(
    arrays: ArrayRecord, task: str, current: Mapping[str, NDArray], half: Mapping[str, NDArray]
) -> dict[str, NDArray]:
    """The arrays of a task, joined from the reply and the split service's half."""
    prefix = array_key(task, "x")[:-1]
    expected = [key for key in current if key.startswith(prefix)]
    found = {key for key in arrays if key.startswith(prefix)}
    twice = found & set(half)
    if twice:
        raise _RefusedError(f"array {min(twice)!r} came from the client and from the split service")
    found |= set(half)
    for what, keys in (("missing", set(expected) - found), ("unknown", found - set(expected))):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise _RefusedError(f"{what} array {min(keys)!r}{more}")
    return {
        key: _array(half[key] if key in half else _decoded(arrays[key], key), key, current[key]) for key in expected
    }


def _decoded(array: Array, key: str) -> NDArray:
    try:
        return array.numpy()
    except Exception as error:  # bytes from outside: decoding may fail in any way
        raise _RefusedError(f"array {key!r} cannot be decoded: {error}") from None


def _array(value: NDArray, key: str, like: NDArray) -> NDArray:
    if value.shape != like.shape:
        raise _RefusedError(f"array {key!r} has shape {value.shape} instead of {like.shape}")
    if value.dtype != like.dtype:
        raise _RefusedError(f"array {key!r} has dtype {value.dtype} instead of {like.dtype}")
    if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
        raise _RefusedError(f"array {key!r} holds {int((~np.isfinite(value)).sum())} values that are not finite")
    return value


def _stray(plan: Plan, arrays: ArrayRecord) -> str:
    planned = {task.task for task in plan.tasks}
    strays = sorted(key for key in arrays if key.partition("/")[0] not in planned)
    if not strays:
        return ""
    return one_line(f"client {plan.client!r}: array {strays[0]!r} belongs to no planned task; ignored")
