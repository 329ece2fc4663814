"""SplitPlanner: which clients' tasks are split this round, where and how, and what that makes of the loads.

The choice of cut, micro-batches and encoding is `gpu_runtime.pipeline.planner`'s; here profiles become its numbers, and
its choices become costs of `load_assignment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Array

from gpu_runtime.contracts import TRAINED, EncodingCost, Report, SplitAccess, TaskCost, one_line, split_key
from gpu_runtime.pipeline.cut_costs import SplitOptions, SplitTask
from gpu_runtime.pipeline.halves import block_of, device_keys
from gpu_runtime.pipeline.joint import Request, choose_jointly
from gpu_runtime.pipeline.planner import Choice, choose
from strategies.load_assignment import Assignment, LoadAssigner, LoadProblem, TaskLoad
from strategies.profiles import ProfileBook
from strategies.server_stages import ServerStageSource, StageError
from strategies.split_settings import SplitSettings

# A client whose link failed trains whole for 1 round, then 2, 4, ... at most so many.
MAX_PAUSE_ROUNDS = 16
MAX_MICRO_BATCHES = 256
# Nobody waits that long, and numbers far beyond all others are too much for the solvers of load assignment.
MAX_STEP_S = 1e6

Choices = Mapping[str, Mapping[str, Choice]]


@dataclass(frozen=True, kw_only=True)
class SplitService:
    """What a run gives its strategy of the split service.

    Attributes:
        access: how clients reach it.
        stages: where start weights go and halves come from.
        costs: of each task on the service's device.
        block_names: of each task's model, in order.
        encodings: seconds to encode and decode there.
        capacity: demand that its device serves per second.
    """

    access: SplitAccess
    stages: ServerStageSource
    costs: Mapping[str, TaskCost]
    block_names: Mapping[str, tuple[str, ...]]
    encodings: tuple[EncodingCost, ...] = ()
    capacity: float = 1.0


@dataclass(kw_only=True)
class _Pause:
    """A client whose link has failed: it trains whole up to and with round `until`."""

    until: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class _Cuttable:
    """A task of a client that can be split."""

    client: str
    task: str
    split: SplitTask = field(repr=False)


class SplitPlanner:
    """Chooses anew for each round, from the profiles and rates that the book knows by then.

    Args:
        service: where the other halves train.
        settings: of the run.
    """

    def __init__(self, service: SplitService, settings: SplitSettings) -> None:
        self.service, self.settings = service, settings
        self._pauses: dict[str, _Pause] = {}
        self._parameter_bytes: dict[str, tuple[int, ...]] = {}
        self._options = SplitOptions(
            encodings=settings.encodings,
            min_depth=settings.point or settings.min_depth,
            max_depth=settings.point or None,
            min_micro_batches=settings.micro_batches or 1,
            max_micro_batches=settings.micro_batches or MAX_MICRO_BATCHES,
            mode=settings.mode,
        )

    def begin_round(
        self,
        book: ProfileBook,
        clients: Sequence[str],
        tasks: Sequence[str],
        sizes: Mapping[str, int],
        server_round: int,
        attempt: int,
        arrays: Mapping[str, Array],
    ) -> tuple[Choices, tuple[str, ...]]:
        """Choose for the round to come, and have the service ready for what is split.

        Args:
            book: what is known of the clients.
            clients, tasks: those of the round.
            sizes: batch sizes by task that differ from the clients' own.
            server_round, attempt: which round.
            arrays: its start weights by key.

        Returns:
            The fastest way of each client's tasks, each as if alone on the service, without those that train whole;
            and in a line each what cannot be split, and why. Nothing is split where the service cannot be had.
        """
        self._parameter_bytes = {task: self._bytes_of_blocks(task, arrays) for task in tasks}
        choices, notes = self._choose(book, clients, tasks, sizes, server_round)
        split = {task for mine in choices.values() for task in mine}
        if not split:
            return {}, notes
        mine = {key: array.numpy() for key, array in arrays.items() if split_key(key)[0] in split}
        try:
            self.service.stages.open_round(server_round, attempt, mine)
        except StageError as error:
            return {}, (*notes, one_line(f"nothing is split this round: {error}"))
        return choices, notes

    def _choose(
        self,
        book: ProfileBook,
        clients: Sequence[str],
        tasks: Sequence[str],
        sizes: Mapping[str, int],
        server_round: int,
    ) -> tuple[Choices, tuple[str, ...]]:
        found: dict[str, dict[str, Choice]] = {}
        notes: list[str] = []
        for each in self._cuttable(book, clients, tasks, sizes, server_round, notes):
            choice = choose(each.split, book.link_of(each.client), self._options)
            if choice.split_point is not None and choice.step_s > MAX_STEP_S:
                whose = f"task {each.task!r} of client {each.client!r}"
                notes.append(f"{whose} is not split: a step would take {choice.step_s:.3g} s")
            elif choice.split_point is not None:
                found.setdefault(each.client, {})[each.task] = choice
        return found, tuple(dict.fromkeys(map(one_line, notes)))

    def assign(
        self,
        assigner: LoadAssigner,
        problem: LoadProblem,
        book: ProfileBook,
        choices: Choices,
        sizes: Mapping[str, int],
        server_round: int,
    ) -> tuple[Assignment, Choices]:
        """Loads with the costs of split tasks, and choices that fit the service when it serves all of these loads."""
        assignment = assigner.assign(self.with_choices(problem, choices))
        if not choices:
            return assignment, choices
        requests: dict[tuple[str, str], Request] = {}
        for client, mine in sorted(choices.items()):
            for each in self._cuttable(book, [client], sorted(mine), sizes, server_round, []):
                load = assignment.loads.get(client, {}).get(each.task, 0)
                if load:
                    requests[client, each.task] = Request(
                        client=client,
                        split=each.split,
                        link=book.link_of(client),
                        num_steps=-(-load // each.split.batch_size),
                    )
        joint = choose_jointly(list(requests.values()), server_capacity=self.service.capacity, options=self._options)
        agreed: dict[str, dict[str, Choice]] = {}
        for (client, task), choice in zip(requests, joint.choices, strict=True):
            if choice.split_point is not None:
                agreed.setdefault(client, {})[task] = choice
        return assigner.assign(self.with_choices(problem, agreed)), agreed

    def with_choices(self, problem: LoadProblem, choices: Choices) -> LoadProblem:
        """`problem` with the costs of the tasks that are split."""
        clients = tuple(
            replace(
                client,
                tasks={
                    task: self._split_load(load, choices[client.client][task])
                    if task in choices.get(client.client, {})
                    else load
                    for task, load in client.tasks.items()
                },
            )
            for client in problem.clients
        )
        return replace(problem, clients=clients, server_capacity=self.service.capacity)

    def learn(self, book: ProfileBook, report: Report, choices: Mapping[str, Choice]) -> None:
        """Correct what `book` knows of a client by how its split tasks went.

        A client that had to train one whole after all is left whole for a while: its link has failed.
        """
        done = {entry.task: entry for entry in report.tasks if entry.outcome == TRAINED and entry.num_examples > 0}
        for task, choice in choices.items():
            entry = done.get(task)
            if entry is not None and entry.split is not None:
                book.learn_split(report.client, task, entry.split, choice.device_step_s * entry.num_steps)
        if any(done[task].split is None for task in choices if task in done):
            before = self._pauses.get(report.client)
            rounds = min(MAX_PAUSE_ROUNDS, 2 * before.rounds) if before is not None else 1
            self._pauses[report.client] = _Pause(until=report.server_round + rounds, rounds=rounds)
        elif choices.keys() <= done.keys():
            self._pauses.pop(report.client, None)

    def server_keys(self, task: str, split_point: int, keys: Iterable[str]) -> list[str]:
        """Those of the arrays' `keys` that the service has when `task` is split."""
        names = {split_key(key)[1]: key for key in keys if split_key(key)[0] == task}
        mine = set(device_keys(names, self.service.block_names[task], split_point))
        return [key for name, key in names.items() if name not in mine]

    # ------------------------------------------------------------------------------------------------- private

    def _cuttable(
        self,
        book: ProfileBook,
        clients: Sequence[str],
        tasks: Sequence[str],
        sizes: Mapping[str, int],
        server_round: int,
        notes: list[str],
    ) -> list[_Cuttable]:
        found = []
        for client in clients:
            pause = self._pauses.get(client)
            if pause is not None and server_round <= pause.until:
                notes.append(f"client {client!r} trains whole: its link to the split service failed")
                continue
            profile = book.profile(client)
            for held in profile.tasks:
                if held.task not in tasks or held.num_examples <= 0:
                    continue
                cost, served = book.cost_of(client, held.task), self.service.costs.get(held.task)
                if held.unsplittable:
                    notes.append(f"task {held.task!r} is not split: {held.unsplittable}")
                elif cost is None or served is None or not cost.blocks or len(cost.blocks) != len(served.blocks):
                    who = "the split service" if served is None or not served.blocks else f"client {client!r}"
                    notes.append(
                        f"task {held.task!r} of client {client!r} is not split: {who} has no costs of its blocks"
                    )
                elif len(cost.blocks) <= (least := self.settings.point or self.settings.min_depth):
                    blocks = len(cost.blocks)
                    notes.append(f"task {held.task!r} is not split: {least} of its {blocks} blocks would leave none")
                else:
                    batch_size = sizes.get(held.task, held.batch_size)
                    split = self._split_task(held.task, batch_size, cost, served, profile.encodings)
                    found.append(_Cuttable(client=client, task=held.task, split=split))
        return found

    def _split_task(
        self, task: str, batch_size: int, cost: TaskCost, served: TaskCost, encodings: tuple[EncodingCost, ...]
    ) -> SplitTask:
        return SplitTask(
            task=task,
            batch_size=batch_size,
            blocks=cost.blocks,
            server_blocks=served.blocks,
            unsplit_step_s=cost.solo_cost_s * batch_size,
            target_bytes=cost.target_bytes or served.target_bytes,
            update_s=cost.update_s,
            server_update_s=served.update_s,
            parameter_bytes=self._parameter_bytes.get(task, ()),
            device_encodings=encodings,
            server_encodings=self.service.encodings,
        )

    def _bytes_of_blocks(self, task: str, arrays: Mapping[str, Array]) -> tuple[int, ...]:
        """Bytes of the parameters of each block of a task's model."""
        blocks = dict.fromkeys(self.service.block_names.get(task, ()), 0)
        for key, array in arrays.items():
            name, parameter = split_key(key)
            block = block_of(parameter)
            if name == task and block in blocks:
                blocks[block] += len(array.data)
        return tuple(blocks.values())

    def _split_load(self, load: TaskLoad, choice: Choice) -> TaskLoad:
        """A task's load with the pipeline's makespan as cost, and its part of that as demand of the device."""
        assert choice.cut is not None, "a task that is not split keeps its load"
        per_step = load.solo_cost_s / choice.unsplit_step_s
        demand = self.service.costs[choice.task].demand
        return replace(
            load,
            solo_cost_s=choice.step_s * per_step,
            demand=min(1.0, load.demand * choice.device_step_s / choice.step_s),
            uplink_s=choice.uplink_step_s * per_step,
            downlink_s=choice.downlink_step_s * per_step,
            server_s=choice.server_step_s * per_step * demand,
        )
