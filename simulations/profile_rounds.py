"""Profile-only rounds: a real strategy plans for a fleet of any size, clients answer in virtual seconds, nobody trains.

`python -m simulations.profile_rounds --fleet NAME --suite SUITE` shows how good a strategy's plans are at true costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from gpu_runtime.contracts import VIRTUAL, Plan, Profile, Report, TaskProfile, TaskReport, from_json, to_json
from server_app.history import round_entry
from simulations.fleet import Fleet, FleetError, load_fleet
from simulations.in_process_grid import NODE_UNAVAILABLE, InProcessGrid
from simulations.task_costs import load_costs
from simulations.true_bound import TrueBound, true_bound, true_load
from simulations.virtual_device import VirtualDevice
from strategies.base import MultiTaskStrategy, RoundRecord
from strategies.options import StrategyError, StrategyOptions
from strategies.registry import build
from tasks.errors import TaskError
from tasks.registry import task_name, task_refs

BATCH_SIZE = 32
EXAMPLES_PER_CLIENT = 400
SETTLED_FROM_ROUND = 3


class ProfileClient:
    """A client of a fleet that says when it would be done with its plan, and sends its arrays back as they came.

    Args:
        device: its clock.
        held: examples held of each task.
        batch_size: examples of a step.
    """

    def __init__(self, device: VirtualDevice, held: Mapping[str, int], batch_size: int = BATCH_SIZE) -> None:
        self.device = device
        self.held = held
        self.batch_size = batch_size
        self.num_bytes = 0
        self.finish_s = 0.0

    @property
    def profile(self) -> Profile:
        """What the planner is told."""
        tasks = tuple(
            TaskProfile(task=task, num_examples=number, batch_size=self.batch_size)
            for task, number in self.held.items()
        )
        answer = Profile(client=self.device.client.name, device="", num_cores=1, clock=VIRTUAL, tasks=tasks)
        return self.device.profile(answer)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer `query.profile` or a train message."""
        if message.metadata.message_type == "query.profile":
            return Message(RecordDict({"profile": ConfigRecord({"json": to_json(self.profile)})}), reply_to=message)
        plan = from_json(Plan, str(message.content.config_records["config"]["plan"]))
        arrays = message.content.array_records["arrays"]
        self.num_bytes = arrays.count_bytes()
        report = self.device.report(
            _as_planned(plan, self.batch_size), plan, bytes_down=self.num_bytes, bytes_up=self.num_bytes
        )
        self.finish_s = report.seconds
        if self.device.loses_reply(plan.server_round):
            return Message(Error(NODE_UNAVAILABLE, "reply lost (simulated dropout)"), reply_to=message)
        metrics = MetricRecord({"num-examples": sum(task.num_examples for task in plan.tasks)})
        content = RecordDict({"arrays": arrays, "metrics": metrics, "report": ConfigRecord({"json": to_json(report)})})
        return Message(content, reply_to=message)


def _as_planned(plan: Plan, batch_size: int) -> Report:
    tasks = tuple(
        TaskReport(
            task=task.task,
            num_examples=task.num_examples,
            num_steps=-(-task.num_examples // (task.batch_size or batch_size)),
            seconds=0.0,
            share=task.share,
            mean_loss=1.0,
        )
        for task in plan.tasks
    )
    return Report(
        client=plan.client,
        server_round=plan.server_round,
        attempt=plan.attempt,
        seconds=0.0,
        clock=VIRTUAL,
        tasks=tasks,
    )


@dataclass(frozen=True, kw_only=True)
class ProfileRound:
    """A round's record, the optimum by true costs (None where it was not asked for), and what planning took."""

    record: RoundRecord
    optimum: TrueBound | None
    planning_s: float

    @property
    def busy_idle_fraction(self) -> float:
        """How idle those that worked were: lost clients, of which no seconds are known, are left out."""
        busy = [client.busy_s for client in self.record.clients.values() if client.busy_s > 0]
        return 1.0 - sum(busy) / (len(busy) * self.record.makespan_s) if busy else 0.0


class ProfileGame:
    """A strategy over a fleet's profile-only clients.

    Args:
        fleet: who takes part; all of its clients.
        refs: tasks of the run.
        options: of the strategy.
        seed: of hidden cost errors, drift and dropout.
        examples_per_client: mean examples of a task that a holder has; a client's own follow its data share.
        batch_size: examples of a step.

    Raises:
        FleetError: a fleet that cannot be dealt out for these tasks, or whose costs lack one of them.
    """

    def __init__(
        self,
        fleet: Fleet,
        refs: Sequence[str],
        options: StrategyOptions,
        *,
        seed: int = 1,
        examples_per_client: int = EXAMPLES_PER_CLIENT,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        recorded = load_costs(fleet.costs)
        unknown = [ref for ref in refs if task_name(ref) not in recorded.tasks]
        if unknown:
            raise FleetError([f"costs {fleet.costs!r} have no task {ref!r}; record it first" for ref in unknown])
        self.clients: dict[str, ProfileClient] = {}
        means: dict[str, float] = {}
        for client in fleet.deal(fleet.num_clients, refs):
            held = {}
            for holding in client.holdings:
                shares = holding.partition.shares
                if holding.ref not in means:
                    means[holding.ref] = fmean(shares)
                share = shares[holding.partition.index] / means[holding.ref]
                held[task_name(holding.ref)] = round(examples_per_client * share)
            device = VirtualDevice(client, fleet, recorded, seed)
            self.clients[client.name] = ProfileClient(device, held, batch_size)
        self.tasks = tuple(task_name(ref) for ref in refs)
        self.options = options
        self.grid = InProcessGrid(list(self.clients.values()), seed=seed, keep_sent=False)
        self.strategy: MultiTaskStrategy = build(options, self.tasks)
        self.arrays = ArrayRecord({f"{task}/weight": Array(np.zeros(1, dtype=np.float32)) for task in self.tasks})
        self.strategy.prepare(
            dict(zip(self.grid.node_ids, (client.profile for client in self.clients.values()), strict=True))
        )

    def play(self, server_round: int, *, with_bound: bool = True) -> ProfileRound:
        """Plan, answer and learn once.

        Raises:
            StrategyError: loads that cannot be met.
        """
        started = time.perf_counter()
        messages = list(self.strategy.configure_train(server_round, self.arrays, ConfigRecord(), self.grid))
        planning_s = time.perf_counter() - started
        plans = [from_json(Plan, str(message.content.config_records["config"]["plan"])) for message in messages]
        replies = list(self.grid.send_and_receive(messages))
        arrays, _ = self.strategy.aggregate_train(server_round, replies)
        self.arrays = arrays or self.arrays
        return ProfileRound(
            record=self.strategy.round_record(),
            optimum=self._optimum(server_round, plans) if with_bound else None,
            planning_s=planning_s,
        )

    def _optimum(self, server_round: int, plans: Sequence[Plan]) -> TrueBound:
        """For the totals of these plans over the clients that got one."""
        totals: dict[str, int] = {}
        for plan in plans:
            for task in plan.tasks:
                totals[task.task] = totals.get(task.task, 0) + task.num_examples
        loads = []
        for plan in plans:
            client = self.clients[plan.client]
            held = {task: number for task, number in client.held.items() if number > 0 and task in totals}
            moved = client.num_bytes
            loads.append(true_load(client.device, held, server_round, num_bytes_down=moved, num_bytes_up=moved))
        return true_bound(
            tuple(loads),
            totals,
            min_load=self.options.min_load,
            max_load=self.options.max_load,
            sharing_mode=self.options.sharing_mode,
        )


def summary_of(
    rounds: Sequence[ProfileRound], *, fleet: str, suite: str, seed: int, options: StrategyOptions
) -> dict[str, Any]:
    """The fields that a run's summary.json has, as far as they mean something without training, and the true bound's.

    `makespan_over_bound` and `idle_over_optimum` are means over the rounds from the third on.
    """
    entries = []
    for played in rounds:
        entry = {**round_entry(played.record, {}), "planning_s": played.planning_s}
        if played.optimum is not None:
            entry["true_bound_s"] = played.optimum.bound_s
            entry["true_idle_fraction"] = played.optimum.idle_fraction
        entries.append(entry)
    seconds = sum(played.record.makespan_s for played in rounds)
    examples = sum(
        task.examples
        for played in rounds
        for client in played.record.clients.values()
        for task in client.tasks.values()
    )
    settled = [one for one in rounds if one.record.server_round >= SETTLED_FROM_ROUND and one.optimum is not None]
    return {
        "status": "completed",
        "cause": None,
        "strategy": options.name,
        "fleet": fleet,
        "suite": suite,
        "seed": seed,
        "clock": VIRTUAL,
        "trained": False,
        "rounds": entries,
        "mean_makespan_s": seconds / len(rounds),
        "mean_idle_fraction": fmean(played.record.idle_fraction for played in rounds),
        "examples_per_s": examples / seconds if seconds > 0 else 0.0,
        "makespan_over_bound": fmean(one.record.makespan_s / one.optimum.bound_s for one in settled if one.optimum)
        if settled
        else None,
        "idle_over_optimum": fmean(one.busy_idle_fraction - one.optimum.idle_fraction for one in settled if one.optimum)
        if settled
        else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Play rounds, print a line for each; the exit code is 1 for a fleet or strategy that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m simulations.profile_rounds", description=__doc__)
    parser.add_argument("--fleet", default="garage", help="a fleet's name, or a TOML file")
    parser.add_argument("--suite", default="driving")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", default="arch-sync")
    parser.add_argument("--examples-per-client", type=int, default=EXAMPLES_PER_CLIENT)
    parser.add_argument("--no-bound", action="store_true", help="skip the optimum by true costs, slow for many clients")
    parser.add_argument("--json", metavar="FILE", help="write a summary")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.examples_per_client < 1:
        parser.error("--rounds and --examples-per-client must be at least 1")
    options = StrategyOptions(name=given.strategy, seed=given.seed)
    try:
        refs = task_refs(given.suite)
        game = ProfileGame(
            load_fleet(given.fleet), refs, options, seed=given.seed, examples_per_client=given.examples_per_client
        )
        rounds = []
        for server_round in range(1, given.rounds + 1):
            rounds.append(game.play(server_round, with_bound=not given.no_bound))
            print(_line(rounds[-1]))
    except (FleetError, StrategyError, TaskError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = summary_of(rounds, fleet=given.fleet, suite=given.suite, seed=given.seed, options=options)
    if summary["makespan_over_bound"] is not None:
        print(
            f"from round {SETTLED_FROM_ROUND} on: makespan {summary['makespan_over_bound']:.3f} of the bound, "
            f"idle {100 * summary['idle_over_optimum']:+.1f} points over the optimum's"
        )
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, allow_nan=False)
    return 0


def _line(played: ProfileRound) -> str:
    record, optimum = played.record, played.optimum
    idle = f"idle {100 * played.busy_idle_fraction:.1f}%"
    text = f"round {record.server_round}: makespan {record.makespan_s:.4g} s, {idle}"
    if optimum is not None:
        ratio = record.makespan_s / optimum.bound_s if optimum.bound_s > 0 else 1.0
        text += f", {ratio:.3f} of the true bound (idle there {100 * optimum.idle_fraction:.1f}%)"
    return f"{text}, planned in {played.planning_s:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
