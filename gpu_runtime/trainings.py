"""The trainings that a plan asks for: whole ones here or in a worker, and split ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gpu_runtime.contracts import FAILED, Emulation, HeldTask, Plan, SplitAccess, TaskPlan, TaskReport, split_key
from gpu_runtime.device import Device
from gpu_runtime.pipeline.session import Channel
from gpu_runtime.pipeline.split_training import SplitTraining
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.work import one_line
from gpu_runtime.workers.remote_training import RemoteTraining
from gpu_runtime.workload import Workload
from gpu_runtime.workload_cache import WorkloadCache

Training = TaskTraining | RemoteTraining | SplitTraining


def trainings_of(
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    held: Sequence[HeldTask],
    workloads: WorkloadCache,
    device: Device,
    *,
    remote: bool,
    emulation: Emulation | None,
    channel: Callable[[SplitAccess], Channel],
) -> tuple[list[Training], list[TaskReport]]:
    """A training for each task of the plan that can start, a failed report for each that cannot.

    Args:
        plan: what to train.
        arrays: start weights by `<task>/<parameter>`.
        held: the tasks of this client.
        workloads: makes them.
        device: where to train.
        remote: whether whole trainings run in workers.
        emulation: a slower device for split tasks to act out.
        channel: makes the channel of a split task.
    """
    found: dict[str, Workload] = {}
    held_as: dict[str, HeldTask] = {}
    unbuilt: list[str] = []
    for each in held:
        try:
            workload = workloads.get(each)
            found[workload.name], held_as[workload.name] = workload, each
        except Exception as error:  # a user's task may raise anything; the others go on
            unbuilt.append(f"{each.ref}: {one_line(error)}")
    by_task = arrays_by_task(arrays)
    origin = Origin(client=plan.client, server_round=plan.server_round, seed=plan.seed)
    torch_device = device.torch_device
    trainings: dict[str, Training] = {}
    refused: list[TaskReport] = []
    for task in plan.tasks:
        try:
            if task.task in trainings:
                raise ValueError("the plan names this task twice")
            if task.task not in found:
                holds = ", ".join(found) or "none"
                raise ValueError("; ".join([f"this client does not hold the task (it holds: {holds})", *unbuilt]))
            if task.task not in by_task and task.split_point is None:  # a device stage may have no parameters
                raise ValueError("the message has no arrays for this task")
            workload, mine = found[task.task], by_task.get(task.task, {})
            if task.split_point is not None:
                if plan.split is None:
                    where = f"block {task.split_point}"
                    raise ValueError(f"the plan splits the model at {where} and names no split service")
                trainings[task.task] = SplitTraining(
                    workload=workload,
                    plan=task,
                    arrays=mine,
                    origin=origin,
                    device=torch_device,
                    access=plan.split,
                    channel=functools.partial(channel, plan.split),
                    attempt=plan.attempt,
                    emulation=emulation or Emulation(),
                    noise_seed=plan.seed if plan.deterministic else None,
                )
            elif remote:
                trainings[task.task] = RemoteTraining(
                    held=held_as[task.task],
                    workload=workload,
                    plan=task,
                    arrays=mine,
                    origin=origin,
                    device=torch_device,
                )
            else:
                trainings[task.task] = TaskTraining(
                    workload=workload, plan=task, arrays=mine, origin=origin, device=torch_device
                )
        except Exception as error:  # a user's task may raise anything; the others go on
            refused.append(_refused(task, error))
    return list(trainings.values()), refused


def arrays_by_task(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Arrays by `<task>/<parameter>` as arrays by parameter of each task.

    Raises:
        ContractError: a key without a task.
    """
    by_task: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        task, parameter = split_key(key)
        by_task.setdefault(task, {})[parameter] = array
    return by_task


def _refused(task: TaskPlan, error: Exception) -> TaskReport:
    text = str(error) if type(error) is ValueError else one_line(error)
    return TaskReport(task=task.task, num_examples=0, num_steps=0, seconds=0.0, outcome=FAILED, error=text)
