"""Fake clients: they hold tasks, tell a profile, and "train" with a little numpy; what a test wants bent is bent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from gpu_runtime.contracts import Plan, Profile, Report, TaskCost, TaskPlan, TaskProfile, TaskReport, from_json, to_json

TASKS = ("blue", "green", "red")
# Four clients that hold different tasks: examples held and seconds per example.
HOLDINGS: Mapping[str, Mapping[str, tuple[int, float]]] = {
    "ada": {"blue": (100, 0.01), "green": (50, 0.02), "red": (40, 0.02)},
    "bob": {"blue": (60, 0.04), "red": (80, 0.05)},
    "cyd": {"green": (90, 0.01), "red": (30, 0.03)},
    "dan": {"blue": (40, 0.02), "green": (20, 0.10), "red": (0, 0.01)},
}


def cost(solo_cost_s: float, demand: float = 1.0) -> TaskCost:
    return TaskCost(demand=demand, solo_cost_s=solo_cost_s, speed_curve=((1.0, 1.0),))


def profile_of(client: str, tasks: Mapping[str, tuple[int, float]], **more: Any) -> Profile:
    """A profile from examples held and seconds per example."""
    return Profile(
        client=client,
        device="cpu",
        num_cores=2,
        clock="virtual",
        tasks=tuple(
            TaskProfile(task=task, num_examples=number, batch_size=8, cost=cost(seconds) if seconds else None)
            for task, (number, seconds) in tasks.items()
        ),
        **more,
    )


def initial_arrays(tasks: tuple[str, ...] = TASKS) -> ArrayRecord:
    """A matrix, a scalar, an integer counter and a running statistic for each task."""
    arrays: dict[str, np.ndarray] = {}
    for index, task in enumerate(tasks):
        rng = np.random.default_rng(index)
        arrays[f"{task}/w"] = rng.normal(size=(3, 2)).astype(np.float32)
        arrays[f"{task}/scale"] = np.asarray(1.0, dtype=np.float32)
        arrays[f"{task}/num_batches"] = np.asarray(0, dtype=np.int64)
        arrays[f"{task}/bn.running_var"] = np.ones(2, dtype=np.float32)
    return ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()})


def numpy_of(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    return {key: array.numpy() for key, array in arrays.items()}


@dataclass
class FakeClient:
    """Answers query and train. `bend` may change the arrays and the report of a train reply before it is sent."""

    profile: Profile
    bend: Callable[[Plan, dict[str, np.ndarray], Report], tuple[dict[str, np.ndarray], Report]] | None = None
    wrap: Callable[[RecordDict], RecordDict] | None = None
    plans: list[Plan] = field(default_factory=list)

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.profile":
            return Message(RecordDict({"profile": ConfigRecord({"json": to_json(self.profile)})}), reply_to=message)
        if message.metadata.message_type == "evaluate":
            return self._evaluate(message)
        plan = from_json(Plan, str(message.content.config_records["config"]["plan"]))
        self.plans.append(plan)
        arrays = numpy_of(message.content.array_records["arrays"])
        report = self._train(plan, arrays)
        if self.bend:
            arrays, report = self.bend(plan, arrays, report)
        content = RecordDict(
            {
                "arrays": ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()}),
                "metrics": MetricRecord({"num-examples": sum(task.num_examples for task in report.tasks)}),
                "report": ConfigRecord({"json": to_json(report)}),
            }
        )
        return Message(self.wrap(content) if self.wrap else content, reply_to=message)

    def _train(self, plan: Plan, arrays: dict[str, np.ndarray]) -> Report:
        tasks = []
        costs = {task.task: task.cost for task in self.profile.tasks}
        end_s = 0.0
        for entry in plan.tasks:
            steps = -(-entry.num_examples // (entry.batch_size or 8))
            self._steps(plan, entry, steps, arrays)
            known = costs[entry.task]
            end_s += (known.solo_cost_s if known else 0.01) * entry.num_examples
            tasks.append(
                TaskReport(
                    task=entry.task,
                    num_examples=entry.num_examples,
                    num_steps=steps,
                    seconds=end_s,
                    mean_loss=1.0 / (1 + plan.server_round),
                )
            )
        return Report(
            client=plan.client,
            server_round=plan.server_round,
            attempt=plan.attempt,
            seconds=end_s,
            clock=self.profile.clock,
            tasks=tuple(tasks),
        )

    def _steps(self, plan: Plan, entry: TaskPlan, steps: int, arrays: dict[str, np.ndarray]) -> None:
        text = f"{plan.seed}/{plan.server_round}/{plan.client}/{entry.task}"
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        for name in ("w", "scale"):
            key = f"{entry.task}/{name}"
            for _ in range(steps):
                noise = rng.normal(size=arrays[key].shape)
                arrays[key] = (arrays[key] - 0.01 * (arrays[key] + noise)).astype(np.float32)
        arrays[f"{entry.task}/num_batches"] = arrays[f"{entry.task}/num_batches"] + np.int64(steps)
        arrays[f"{entry.task}/bn.running_var"] = (arrays[f"{entry.task}/bn.running_var"] * 0.5).astype(np.float32)

    def _evaluate(self, message: Message) -> Message:
        tasks = sorted({key.partition("/")[0] for key in message.content.array_records["arrays"]})
        metrics: dict[str, Any] = {"num-examples": 10 * len(tasks)}
        for task in tasks:
            metrics |= {f"{task}/num-examples": 10, f"{task}/loss": 0.5, f"{task}/accuracy": 0.9}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def fake_fleet(holdings: Mapping[str, Mapping[str, tuple[int, float]]] = HOLDINGS) -> list[FakeClient]:
    return [FakeClient(profile_of(client, tasks)) for client, tasks in holdings.items()]


def bent_task(report: Report, task: str, /, **changes: Any) -> Report:
    """`report` with the entry of one task changed."""
    return replace(
        report, tasks=tuple(replace(entry, **changes) if entry.task == task else entry for entry in report.tasks)
    )
