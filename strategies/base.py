"""MultiTaskStrategy: the round that arch-sync and the stock strategies share. Options and records are re-exported.

Subclasses say how loads are assigned and how one task's updates are aggregated.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gpu_runtime.contracts import (
    MEASURED,
    VIRTUAL,
    Plan,
    Profile,
    Report,
    SplitAccess,
    one_line,
    split_key,
    to_json,
)
from gpu_runtime.pipeline.planner import Choice
from strategies import replies as checks
from strategies.aggregation import TaskModel, mean_loss
from strategies.dispatch import SentRound, Transfer, clocks_s, content_of, plan_of, transfer
from strategies.evaluation import average_metrics
from strategies.inventory import query_profiles
from strategies.load_assignment import LoadAssigner, LoadProblem
from strategies.options import StrategyError, StrategyOptions
from strategies.outliers import without_outliers
from strategies.profiles import ProfileBook
from strategies.records import ClientRecord, ClientTaskRecord, RoundRecord, idle_fraction
from strategies.replies import CheckedReply, NDArray, Update
from strategies.split_plan import SplitPlanner, SplitService
from strategies.split_settings import SplitSettings
from strategies.task_kept import TaskKeptError

__all__ = [
    "ClientRecord",
    "ClientTaskRecord",
    "MultiTaskStrategy",
    "RoundRecord",
    "StrategyError",
    "StrategyOptions",
    "TaskKeptError",
]

log = logging.getLogger("paceline.strategies")


# How many clients' own words go into the cause of a run that cannot start.
MAX_REASONS = 3


class MultiTaskStrategy(Strategy):
    """Sends each client one message with the arrays of its tasks and its plan; aggregates each task by itself.

    Call `prepare` with the clients' profiles before round 1 and whenever nodes join. Used through Flower's own `start`
    without it, the first round asks the nodes for their profiles.

    Args:
        options: of the run.
        tasks: names of its tasks, which are the prefixes of array keys.

    Attributes:
        book: what is known of the clients.
        needs_loss: whether updates without a training loss are refused.
        models: what the server knows of the tasks' models, by task name; see `use_models`.
        compared: tasks whose aggregation copes with odd updates itself, and so gets to see them.
        evaluation_notes: what of the clients' evaluation asked for last was not used, a line each.
    """

    def __init__(self, options: StrategyOptions, tasks: Sequence[str]) -> None:
        self.options = options
        self.tasks = tuple(tasks)
        self.needs_loss = False
        self.models: Mapping[str, TaskModel] = {}
        self.compared: frozenset[str] = frozenset()
        self.evaluation_notes: tuple[str, ...] = ()
        self.book = ProfileBook(sharing_mode=options.sharing_mode)
        self._node_of: dict[str, int] = {}
        self._round: SentRound | None = None
        self._record: RoundRecord | None = None
        self._split: SplitPlanner | None = None

    def use_split(self, service: SplitService, settings: SplitSettings) -> None:
        """Split tasks over this service from the next round on."""
        self._split = SplitPlanner(service, settings)

    def use_models(self, models: Mapping[str, TaskModel]) -> None:
        """Take in what the server knows of the tasks' models, by task name, before round 1.

        Raises:
            StrategyError: a model that the strategy cannot aggregate as asked.
        """
        self.models = dict(models)

    @property
    def split_access(self) -> SplitAccess | None:
        """How clients reach the split service; None where nothing is split."""
        return self._split.service.access if self._split is not None else None

    # ------------------------------------------------------------------------------------------ for subclasses

    @property
    @abstractmethod
    def assigner(self) -> LoadAssigner:
        """How loads are assigned."""

    @abstractmethod
    def aggregate_task(
        self, server_round: int, task: str, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        """New arrays of `task` from at least one update, in the order of client names.

        Raises:
            TaskKeptError: they cannot be aggregated.
        """

    def adjust_plans(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, plans: Mapping[str, Plan], grid: Grid
    ) -> Mapping[str, Plan]:
        """A last word on the plans before they are sent."""
        return plans

    def node_of(self, client: str) -> int:
        """The node id of a prepared client."""
        return self._node_of[client]

    def clients_of(self, task: str) -> list[str]:
        """Names of the prepared clients that hold examples of `task`, in order."""
        return [client for client in self.book.clients if task in self._tasks_of(client)]

    # ------------------------------------------------------------------------------------------- before round 1

    def prepare(self, profiles: Mapping[int, Profile]) -> None:
        """Take in profiles by node id. The same client under a new node id replaces the old one.

        Raises:
            StrategyError: two nodes of one name, or a task of which no client holds an example.
        """
        by_name: dict[str, int] = {}
        for node, profile in profiles.items():
            if profile.client in by_name:
                raise StrategyError(
                    f"two nodes call themselves {profile.client!r}; give each its own partition-id or name"
                )
            by_name[profile.client] = node
        self._node_of.update(by_name)
        self.book.enter(profiles.values())
        held = self._num_held(self.book.clients)
        if not held:
            text = f"no client holds an example of any task ({', '.join(self.tasks)})"
            raise StrategyError("; ".join([text, *self._reasons()]))
        for task in self.tasks:
            if task not in held:
                text = f"task {task!r}: no client holds an example of it"
                raise StrategyError("; ".join([text, *self._reasons(task)]))

    def at_their_limit(self) -> list[str]:
        """Clients of the last plan that can be given no more: all they hold is at `max_load` already."""
        if self._round is None:
            return []
        return [
            client
            for client, plan in sorted(self._round.plans.items())
            if {entry.task for entry in plan.tasks} == self._tasks_of(client).keys()
            and all(
                entry.num_examples >= int(self.options.max_load * self._tasks_of(client)[entry.task] + 1e-9)
                for entry in plan.tasks
            )
        ]

    def summary(self) -> None:
        """Log what the strategy is made of."""
        log.info("strategy %s for tasks %s", self.options.name, ", ".join(self.tasks))
        log.info("loads by %s", type(self.assigner).__name__)

    # ---------------------------------------------------------------------------------------------------- train

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each client that is there and holds examples: arrays of its tasks, and its plan."""
        if not self._node_of:
            self.prepare(query_profiles(grid))
        present = self._present(grid)
        held = self._num_held(present)
        notes = tuple(
            f"task {task!r}: no client that is here holds it; its weights stay"
            for task in self.tasks
            if task not in held
        )
        attempt = self._round.attempt + 1 if self._round and self._round.server_round == server_round else 0
        choices, split_notes = (
            self._split.begin_round(
                self.book, present, self.tasks, self.options.batch_sizes, server_round, attempt, arrays
            )
            if self._split is not None
            else ({}, ())
        )
        transfers = {client: self._transfer(client, arrays, choices.get(client, {})) for client in present}
        problem = self._problem(transfers, held)
        if self._split is not None and choices:
            assignment, choices = self._split.assign(
                self.assigner, problem, self.book, choices, self.options.batch_sizes, server_round
            )
        else:
            assignment = self.assigner.assign(problem)
        plans = {
            client: plan_of(
                self.options,
                self.tasks,
                server_round=server_round,
                attempt=attempt,
                client=client,
                loads=loads,
                choices=choices.get(client, {}),
                access=self.split_access,
            )
            for client, loads in sorted(assignment.loads.items())
        }
        plans = dict(self.adjust_plans(server_round, arrays, config, plans, grid))
        messages = {client: self._message(plan, arrays, config) for client, plan in plans.items()}
        self._round = SentRound(
            server_round=server_round,
            attempt=attempt,
            plans=plans,
            messages=messages,
            arrays={key: array.numpy() for key, array in arrays.items()},
            transfers=transfers,
            assignment=assignment,
            choices=choices,
            notes=(*notes, *split_notes),
            started_s=clocks_s(),
        )
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check, aggregate task by task, learn from the reports, record.

        Returns:
            All arrays, those of tasks without a usable update unchanged; None where nothing was aggregated. And
            `<task>/num-examples` and `<task>/loss` of what was.
        """
        current = self._round
        if current is None or current.server_round != server_round:
            raise StrategyError(f"round {server_round} was not configured")
        checked, strays = self._check_replies(current, replies)
        new, metrics, kept = dict(current.arrays), MetricRecord(), []
        trained = set()
        for task in self.tasks:
            updates = [update for reply in checked for update in reply.updates if update.task == task]
            if not updates:
                continue
            start = {key: value for key, value in current.arrays.items() if split_key(key)[0] == task}
            try:
                new.update(self.aggregate_task(server_round, task, updates, start))
            except TaskKeptError as fault:
                kept.append(f"task {task!r}: weights stay: {one_line(fault)}")
                continue
            trained.add(task)
            metrics[f"{task}/num-examples"] = sum(update.num_examples for update in updates)
            loss = mean_loss(updates)
            if loss is not None:
                metrics[f"{task}/loss"] = loss
        for reply in checked:
            if reply.report is not None:
                self._learn(current, reply.client, reply.report)
        self._record = self._round_record(current, checked, [*strays, *kept])
        if not trained:
            return None, None
        return ArrayRecord({key: Array(np.asarray(value)) for key, value in new.items()}), metrics

    def round_record(self) -> RoundRecord:
        """What happened in the round aggregated last."""
        if self._record is None:
            raise StrategyError("no round was aggregated yet")
        return self._record

    # ------------------------------------------------------------------------------------------------- evaluate

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each client that is there, with the arrays of its tasks; none unless asked for."""
        self.evaluation_notes = ()
        if not self.options.client_evaluation:
            return []
        messages = []
        for client in self._present(grid):
            content = content_of(self._tasks_of(client), arrays, config, server_round)
            messages.append(Message(content, dst_node_id=self._node_of[client], message_type="evaluate"))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means over clients of `<task>/<metric>`, weighted by `<task>/num-examples`; see `evaluation_notes`."""
        name_of = {node: client for client, node in self._node_of.items()}
        known: dict[str, Message] = {}
        for reply in replies:
            client = name_of.get(reply.metadata.src_node_id)
            if client is not None:
                known.setdefault(client, reply)
        held = {client: self._tasks_of(client) for client in known}
        metrics, self.evaluation_notes = average_metrics(known, self.tasks, held)
        return metrics

    # ------------------------------------------------------------------------------------------------- private

    def _tasks_of(self, client: str) -> dict[str, int]:
        """Examples held of each task of the run, without those of which there are none."""
        held = {task.task: task.num_examples for task in self.book.profile(client).tasks if task.num_examples > 0}
        return {task: held[task] for task in self.tasks if task in held}

    def _num_held(self, clients: Iterable[str]) -> dict[str, int]:
        """Examples held of each task by all `clients` together, without those of which there are none."""
        total: dict[str, int] = {}
        for client in clients:
            for task, number in self._tasks_of(client).items():
                total[task] = total.get(task, 0) + number
        return total

    def _reasons(self, about: str = "") -> list[str]:
        """What the first clients say went wrong with their tasks, what mentions the task `about` first."""
        said = [
            f"client {client!r} says: {one_line(error)}"
            for client in self.book.clients
            for error in self.book.profile(client).errors
        ]
        return sorted(said, key=lambda line: about not in line)[:MAX_REASONS]

    def _present(self, grid: Grid) -> list[str]:
        """Names of the prepared clients that are connected and hold examples, in order."""
        nodes = set(grid.get_node_ids())
        return sorted(client for client, node in self._node_of.items() if node in nodes and self._tasks_of(client))

    def _learn(self, current: SentRound, client: str, report: Report) -> None:
        """Correct what is known of a client by what it reports."""
        link, mine = current.transfers[client], current.choices.get(client, {})
        self.book.learn(report, download_s=link.download_s, upload_s=link.upload_s, planned_split=mine.keys())
        if self._split is not None and mine:
            self._split.learn(self.book, report, mine)

    def _transfer(self, client: str, arrays: ArrayRecord, choices: Mapping[str, Choice]) -> Transfer:
        mine = self._tasks_of(client)
        whole = sum(len(array.data) for key, array in arrays.items() if split_key(key)[0] in mine)
        points = {task: choice.split_point for task, choice in choices.items() if choice.split_point is not None}
        halves = sum(len(arrays[key].data) for key in self._server_keys(points, arrays))
        fallback = self.split_access is None or self.split_access.fallback
        return transfer(self.book.profile(client), whole if fallback else whole - halves, whole - halves)

    def _server_keys(self, split_points: Mapping[str, int], keys: Iterable[str]) -> frozenset[str]:
        """Those of the arrays' `keys` that the split service has when tasks are split at these points."""
        keys = tuple(keys)
        return frozenset(
            key
            for task, point in split_points.items()
            if self._split is not None
            for key in self._split.server_keys(task, point, keys)
        )

    def _problem(self, transfers: Mapping[str, Transfer], held: Mapping[str, int]) -> LoadProblem:
        return LoadProblem(
            clients=tuple(
                self.book.load_of(client, link_s=transfer.download_s + transfer.upload_s)
                for client, transfer in transfers.items()
            ),
            totals={task: max(1, round(self.options.examples_per_round * number)) for task, number in held.items()},
            min_load=self.options.min_load,
            max_load=self.options.max_load,
            sharing_mode=self.options.sharing_mode,
        )

    def _message(self, plan: Plan, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        points = {task.task: task.split_point for task in plan.tasks if task.split_point is not None}
        left_out = self._server_keys(points, arrays) if plan.split is not None and not plan.split.fallback else ()
        content = content_of({task.task for task in plan.tasks}, arrays, config, plan.server_round, left_out)
        content.config_records["config"]["plan"] = to_json(plan)
        return Message(content, dst_node_id=self._node_of[plan.client], message_type="train")

    def _check_replies(self, current: SentRound, replies: Iterable[Message]) -> tuple[list[CheckedReply], list[str]]:
        """Every planned client's reply, checked, in the order of names; and a line for each reply nobody asked for."""
        by_message = {message.metadata.message_id: client for client, message in current.messages.items()}
        by_node = {self._node_of[client]: client for client in current.messages}
        found: dict[str, Message] = {}
        strays = []
        for reply in replies:
            # Flower makes up the sender of some error replies; the message replied to is right.
            client = by_message.get(reply.metadata.reply_to_message_id or "-") or by_node.get(
                reply.metadata.src_node_id
            )
            if client is None:
                strays.append(f"node {reply.metadata.src_node_id}: reply to no message of this round; ignored")
            elif client in found:
                strays.append(f"client {client!r}: second reply in one round; ignored")
            else:
                found[client] = reply
        checked: list[CheckedReply] = []
        clock = self._clock(current.plans)
        max_seconds = current.seconds_since() if clock == MEASURED else checks.MAX_SECONDS
        for client, plan in sorted(current.plans.items()):
            if client not in found:
                checked.append(checks.lost(plan))
                continue
            result = checks.check(
                found[client],
                plan,
                current.arrays,
                self._tasks_of(client),
                clock=clock,
                max_seconds=max_seconds,
                batch_sizes={task.task: task.batch_size for task in self.book.profile(client).tasks},
                needs_loss=self.needs_loss,
                stages=self._split.service.stages if self._split is not None else None,
            )
            checked.append(result)
        return without_outliers(checked, current.arrays, self.compared), strays

    def _clock(self, clients: Iterable[str]) -> str:
        """The clock of most of these clients' profiles, so that no single one decides; measured among equals."""
        clocks = [self.book.profile(client).clock for client in clients]
        return VIRTUAL if 2 * clocks.count(VIRTUAL) > len(clocks) else MEASURED

    def _round_record(self, current: SentRound, checked: Sequence[CheckedReply], more: Iterable[str]) -> RoundRecord:
        clients = {reply.client: reply.record for reply in checked}
        makespan_s = max((client.busy_s for client in clients.values()), default=0.0)
        costed = self.book.is_costed()
        return RoundRecord(
            server_round=current.server_round,
            makespan_s=makespan_s,
            plan_s=current.assignment.plan_s if costed else None,
            bound_s=current.assignment.bound_s if costed else None,
            idle_fraction=idle_fraction(clients, makespan_s),
            clients=clients,
            refused=(*current.notes, *(line for reply in checked for line in reply.refused), *more),
            clock=self._clock(current.plans),
        )
