"""What is sent to clients in a round: plans, messages, and the seconds their arrays take."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from gpu_runtime.contracts import Plan, Profile, SplitAccess, TaskPlan, split_key
from gpu_runtime.pipeline.planner import Choice
from strategies.load_assignment import Assignment
from strategies.options import StrategyOptions
from strategies.replies import NDArray
from strategies.split_plan import Choices


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Seconds a client's arrays take to it and back, as far as its link is known."""

    download_s: float
    upload_s: float


@dataclass(frozen=True, kw_only=True)
class SentRound:
    """What was sent to whom. `messages` by client name; `started_s` is what `clocks_s` said when it was sent."""

    server_round: int
    attempt: int
    plans: Mapping[str, Plan]
    messages: Mapping[str, Message]
    arrays: Mapping[str, NDArray]
    transfers: Mapping[str, Transfer]
    assignment: Assignment
    choices: Choices
    notes: tuple[str, ...]
    started_s: tuple[float, float]

    def seconds_since(self) -> float:
        """No client's clock can have counted more since the round was sent.

        The monotonic clock stands still while this machine sleeps, the other may be set; with room for drift.
        """
        passed_s = max(now_s - then_s for now_s, then_s in zip(clocks_s(), self.started_s, strict=True))
        return 1.01 * passed_s + 1.0


def clocks_s() -> tuple[float, float]:
    """The monotonic clock and Unix time."""
    return time.monotonic(), time.time()


def transfer(profile: Profile, bytes_down: int, bytes_up: int) -> Transfer:
    """Over the link of `profile`; what is not known of it counts as nothing."""
    latency_s = profile.latency_s or 0.0

    def seconds(num_bytes: int, rate: float | None) -> float:
        return latency_s + (num_bytes / rate if rate else 0.0)

    return Transfer(
        download_s=seconds(bytes_down, profile.downlink_bytes_per_s),
        upload_s=seconds(bytes_up, profile.uplink_bytes_per_s),
    )


def plan_of(
    options: StrategyOptions,
    tasks: Sequence[str],
    *,
    server_round: int,
    attempt: int,
    client: str,
    loads: Mapping[str, int],
    choices: Mapping[str, Choice],
    access: SplitAccess | None,
) -> Plan:
    """One client's plan: its loads by task, those of `choices` split, in the order of the run's `tasks`."""
    return Plan(
        client=client,
        server_round=server_round,
        seed=options.seed,
        tasks=tuple(_task_plan(options, task, loads[task], choices.get(task)) for task in tasks if task in loads),
        sharing_mode=options.sharing_mode,
        deterministic=options.deterministic,
        deadline_s=options.round_deadline_s or None,
        attempt=attempt,
        trace=options.trace,
        split=access if choices.keys() & loads.keys() else None,
    )


def content_of(
    tasks: Collection[str],
    arrays: ArrayRecord,
    config: ConfigRecord,
    server_round: int,
    leave_out: Collection[str] = (),
) -> RecordDict:
    """The arrays of `tasks`, but those to `leave_out`, and the config.

    Records of their own for each client: Flower's messages that share one would all change with it.
    """
    mine = ArrayRecord(
        {key: array for key, array in arrays.items() if split_key(key)[0] in tasks and key not in leave_out}
    )
    return RecordDict({"arrays": mine, "config": ConfigRecord({**config, "server-round": server_round})})


def _task_plan(options: StrategyOptions, task: str, num_examples: int, choice: Choice | None) -> TaskPlan:
    plan = TaskPlan(
        task=task,
        num_examples=num_examples,
        learning_rate=options.learning_rates.get(task),
        batch_size=options.batch_sizes.get(task),
    )
    if choice is None:
        return plan
    return replace(plan, split_point=choice.split_point, micro_batches=choice.micro_batches, encoding=choice.encoding)
