"""One simulated client's device: what planners are told of its costs, and what its rounds truly take.

The difference between the two, a hidden factor on each task's cost, is what a good plan has to cope with.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from gpu_runtime.contracts import TRAINED, VIRTUAL, Plan, Profile, Report, TaskCost, TaskPlan, TaskReport
from gpu_runtime.pipeline.cut_costs import Link
from simulations.fleet import Fleet, FleetClient
from simulations.task_costs import RecordedCosts
from simulations.virtual_clock import Timeline, Work, run_device, transfer_s
from simulations.virtual_split import VirtualPipeline, pipeline


class VirtualDevice:
    """A client of a fleet on the virtual clock. All randomness follows from the seed and names.

    Attributes:
        unrecorded: tasks whose cost is not on record and comes from real seconds.
    """

    def __init__(self, client: FleetClient, fleet: Fleet, recorded: RecordedCosts, seed: int) -> None:
        self._client = client
        self._fleet = fleet
        self._recorded = recorded
        self._seed = seed
        self.unrecorded: set[str] = set()
        self._batch_sizes: dict[str, int] = {}
        self._costs: dict[str, TaskCost] = {
            task: cost.scaled(1 / client.kind.speed) for task, cost in recorded.tasks.items()
        }

    @property
    def client(self) -> FleetClient:
        """Whose device it is."""
        return self._client

    def knows_all_costs(self) -> bool:
        """Whether the cost of every task of the client is on record."""
        return all(holding.ref in self._costs for holding in self._client.holdings)

    def profile(self, answer: Profile) -> Profile:
        """The client's answer with the fleet's device in place of the machine that runs the simulation.

        A task without recorded cost takes its measured one, divided by the client's speed.
        """
        kind = self._client.kind
        for task in answer.tasks:
            self._batch_sizes[task.task] = task.batch_size
            if task.task not in self._costs and task.cost is not None:
                self._costs[task.task] = task.cost.scaled(1 / kind.speed)
                self.unrecorded.add(task.task)
        return replace(
            answer,
            client=self._client.name,
            device=f"{kind.name} ({kind.speed:g} x {self._recorded.device}, {self._recorded.num_cores} cores)",
            clock=VIRTUAL,
            tasks=tuple(replace(task, cost=self._costs.get(task.task)) for task in answer.tasks),
            capacity=kind.capacity,
            memory_bytes=kind.memory_bytes or answer.memory_bytes,
            fixed_s=kind.fixed_s,
            uplink_bytes_per_s=kind.uplink_bytes_per_s,
            downlink_bytes_per_s=kind.downlink_bytes_per_s,
            latency_s=kind.latency_s,
            message_s=kind.message_s,
        )

    def report(self, report: Report, plan: Plan | None, *, bytes_down: int, bytes_up: int) -> Report:
        """The client's report in virtual seconds; spans stay measured.

        A task that failed is charged the examples of the steps it made.
        """
        planned = {task.task: task for task in plan.tasks} if plan else {}
        examples: dict[str, float] = {}
        for task in report.tasks:
            examples[task.task] = _examples_worked(task, planned.get(task.task))
            if task.task not in self._costs and task.num_examples > 0 and task.seconds > 0:
                seconds = task.seconds / task.num_examples / self._client.kind.speed
                self._costs[task.task] = TaskCost(demand=1.0, solo_cost_s=seconds, speed_curve=((1.0, 1.0),))
                self.unrecorded.add(task.task)
        pipelines = self._pipelines({task.task for task in report.tasks if task.split is not None}, planned, report)
        timeline = self._run(examples, plan, report.server_round, bytes_down, bytes_up, pipelines)
        tasks = tuple(
            self._in_virtual_seconds(task, timeline, pipelines) if task.task in timeline.finish_s else task
            for task in report.tasks
        )
        return replace(report, tasks=tasks, seconds=timeline.makespan_s, clock=VIRTUAL)

    def planned_s(self, plan: Plan | None, server_round: int, *, bytes_down: int) -> float:
        """When a client that gave no report would have been back, had it done all it was told."""
        examples = {task.task: float(task.num_examples) for task in plan.tasks} if plan else {}
        return self._run(examples, plan, server_round, bytes_down, bytes_down).makespan_s

    def loses_reply(self, server_round: int) -> bool:
        """Whether the fleet's dropout takes this client's reply of this round."""
        return self._random("dropout", server_round).random() < self._client.dropout

    def true_cost(self, task: str, server_round: int) -> TaskCost:
        """The cost that the virtual clock runs with: the planner's, times the hidden factors."""
        sigma, drift = self._fleet.cost_error, self._fleet.drift
        exponent = sigma * self._random("cost", task).gauss(0, 1) if sigma else 0.0
        if drift:
            steps = (self._random("drift", past).gauss(0, 1) for past in range(1, server_round + 1))
            exponent += drift * math.fsum(steps)
        return self._costs[task].scaled(math.exp(exponent))

    @property
    def _link(self) -> Link:
        kind = self._client.kind
        return Link(
            uplink_bytes_per_s=kind.uplink_bytes_per_s,
            downlink_bytes_per_s=kind.downlink_bytes_per_s,
            latency_s=kind.latency_s,
            message_s=kind.message_s,
        )

    def _pipelines(
        self, split: Iterable[str], planned: Mapping[str, TaskPlan], report: Report
    ) -> dict[str, VirtualPipeline]:
        """Of the tasks that were split, as far as the costs of their blocks are known."""
        found = {}
        for task in split:
            plan, recorded = planned.get(task), self._recorded.tasks.get(task)
            if plan is None or recorded is None or task not in self._costs:
                continue
            batch_size = plan.batch_size or self._batch_sizes.get(task, 1)
            server = recorded.scaled(1 / self._fleet.server_speed)
            pipe = pipeline(plan, batch_size, self.true_cost(task, report.server_round), server, self._link)
            if pipe is not None:
                found[task] = pipe
        return found

    def _in_virtual_seconds(
        self, task: TaskReport, timeline: Timeline, pipelines: Mapping[str, VirtualPipeline]
    ) -> TaskReport:
        task = replace(task, seconds=timeline.finish_s[task.task])
        if task.split is None or task.task not in pipelines:
            return task
        return replace(task, split=pipelines[task.task].report(task.split, task.num_steps, self._link))

    def _run(
        self,
        examples: Mapping[str, float],
        plan: Plan | None,
        server_round: int,
        bytes_down: int,
        bytes_up: int,
        pipelines: Mapping[str, VirtualPipeline] = MappingProxyType({}),
    ) -> Timeline:
        kind = self._client.kind
        shares = {task.task: task.share for task in plan.tasks} if plan else {}
        work = []
        for task, count in examples.items():
            if task not in self._costs:
                continue
            cost, expected_s = self.true_cost(task, server_round), self._costs[task].solo_cost_s
            if task in pipelines:
                cost = pipelines[task].cost(cost)
                expected_s = cost.solo_cost_s
            work.append(
                Work(task=task, num_examples=count, cost=cost, expected_cost_s=expected_s, share=shares.get(task))
            )
        latency_s = kind.latency_s
        return run_device(
            work,
            mode=plan.sharing_mode if plan else "competitive",
            capacity=kind.capacity,
            fixed_s=kind.fixed_s,
            download_s=transfer_s(bytes_down, kind.downlink_bytes_per_s, latency_s),
            upload_s=transfer_s(bytes_up, kind.uplink_bytes_per_s, latency_s),
        )

    def _random(self, *what: object) -> random.Random:
        words: list[object] = [self._seed, self._fleet.name, self._client.name, *what]
        return random.Random(hashlib.sha256("\0".join(map(str, words)).encode()).digest())


def _examples_worked(task: TaskReport, planned: TaskPlan | None) -> float:
    """Examples that a task spent time on: of one that failed or was cancelled, those of the steps it made."""
    if task.outcome == TRAINED or planned is None:
        return task.num_examples
    per_step = planned.batch_size or planned.num_examples
    return min(planned.num_examples, task.num_steps * per_step)
