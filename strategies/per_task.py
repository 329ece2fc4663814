"""PerTask: one stock Flower strategy per task, each handed only its own task's clients, arrays and replies.

Handed whole replies stock strategies fail: FedAvg refuses replies whose keys differ, and clients hold different tasks.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from gpu_runtime.contracts import Plan, Profile, TaskPlan, split_key
from strategies.aggregation import is_parameter, other_arrays, weight_of
from strategies.base import MultiTaskStrategy, TaskKeptError
from strategies.load_assignment import ASSIGNERS, LoadAssigner
from strategies.optimizer_state import is_finite, put_back, state_of
from strategies.options import StrategyError, StrategyOptions
from strategies.outliers import furthest
from strategies.replies import NDArray, Update
from strategies.stock import TRAIN_LOSS_KEY, StockRecipe
from strategies.task_grid import TaskGrid

log = logging.getLogger("paceline.strategies")

# The one value of a stock strategy's config that a plan has a place for.
PROXIMAL_MU_KEY = "proximal-mu"


class _OverflowError(TaskKeptError):
    """Numbers that ran out of range."""


class PerTask(MultiTaskStrategy):
    """Stock strategies keep their arithmetic and their state between rounds; loads and messages are ours."""

    def __init__(self, options: StrategyOptions, tasks: Sequence[str], recipe: StockRecipe) -> None:
        super().__init__(options, tasks)
        self._recipe = recipe
        self.needs_loss = recipe.needs_loss
        self._assigner = ASSIGNERS["proportional" if options.loads == "auto" else options.loads]()
        with _quiet_flower():
            self._strategies = {task: recipe.build(options) for task in self.tasks}
        self._asked: dict[tuple[str, str], Message] = {}
        self._told: set[str] = set()

    @property
    def assigner(self) -> LoadAssigner:
        return self._assigner

    def prepare(self, profiles: Mapping[int, Profile]) -> None:
        """As the base, and say which tasks have too few clients for the strategy.

        Raises:
            StrategyError: as the base, or every task has too few.
        """
        super().prepare(profiles)
        needed = self._recipe.min_replies(self.options)
        holders = {task: len(self.clients_of(task)) for task in self.tasks}
        short = [task for task, number in holders.items() if number < needed]
        text = ", ".join(f"{task} {holders[task]}" for task in short)
        if len(short) == len(self.tasks):
            raise StrategyError(f"{self._recipe.name} needs at least {needed} clients a task; clients: {text}")
        if short:
            log.warning(
                "%s needs at least %d clients a task; these keep their weights: %s", self._recipe.name, needed, text
            )

    def adjust_plans(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, plans: Mapping[str, Plan], grid: Grid
    ) -> Mapping[str, Plan]:
        """Let each task's strategy configure its round; take over whom it chose and what it tells them."""
        self._asked.clear()
        for task in self.tasks:
            clients = [client for client, plan in plans.items() if task in {entry.task for entry in plan.tasks}]
            if clients:
                self._configure(server_round, task, clients, arrays, config, grid)
        adjusted = {}
        for client, plan in plans.items():
            tasks = tuple(
                self._told_by_strategy(client, entry) for entry in plan.tasks if (client, entry.task) in self._asked
            )
            if tasks:
                adjusted[client] = replace(plan, tasks=tasks)
        return adjusted

    def aggregate_task(
        self, server_round: int, task: str, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        """The stock strategy's own arithmetic on parameters; other arrays as `aggregation.other_arrays` says."""
        needed = self._recipe.min_replies(self.options)
        if len(updates) < needed:
            raise TaskKeptError(f"{self._recipe.name} needs at least {needed} usable replies, there are {len(updates)}")
        strategy = self._strategies[task]
        before = state_of(strategy)
        joined = other_arrays(updates, current, self.options.weighting)
        try:
            with _quiet_flower(), np.errstate(over="ignore", invalid="ignore"):
                arrays, _ = strategy.aggregate_train(server_round, [self._slice(task, update) for update in updates])
            if arrays is None:
                raise TaskKeptError(f"{self._recipe.name} gave no arrays for {len(updates)} replies")
            for key, start in current.items():
                if key not in joined:
                    joined[key] = _checked(arrays, key, start)
            if not is_finite(state_of(strategy), unless=before):
                raise _OverflowError("the strategy's own state holds values that are not finite")
        except _OverflowError as fault:
            put_back(strategy, before)
            raise TaskKeptError(f"{fault}; {furthest(updates, current)}") from None
        except TaskKeptError:
            put_back(strategy, before)
            raise
        except Exception as error:  # whatever a strategy raises costs its task one round, not the run
            put_back(strategy, before)
            raise TaskKeptError(f"{self._recipe.name}: {type(error).__name__}: {error}") from error
        return {key: joined[key] for key in current}

    def _configure(
        self,
        server_round: int,
        task: str,
        clients: Sequence[str],
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> None:
        mine = {key: array for key, array in arrays.items() if split_key(key)[0] == task}
        parameters = ArrayRecord({key: array for key, array in mine.items() if is_parameter(key, array.numpy())})
        client_of = {self.node_of(client): client for client in clients}
        view = TaskGrid(grid, list(client_of))
        with _quiet_flower(), _own_random(f"{self.options.seed}/{server_round}/{task}"):
            messages = list(
                self._strategies[task].configure_train(server_round, parameters, ConfigRecord(dict(config)), view)
            )
        for message in messages:
            client = client_of.get(message.metadata.dst_node_id)
            if client is not None:
                self._asked[client, task] = message
                self._warn_unused(message, config)

    def _told_by_strategy(self, client: str, plan: TaskPlan) -> TaskPlan:
        told = self._asked[client, plan.task].content.config_records.get("config", ConfigRecord())
        return replace(plan, proximal_mu=_number(told.get(PROXIMAL_MU_KEY), plan.proximal_mu))

    def _warn_unused(self, message: Message, config: ConfigRecord) -> None:
        told = message.content.config_records.get("config", ConfigRecord())
        for key in sorted(set(told) - set(config) - {PROXIMAL_MU_KEY, "server-round"} - self._told):
            self._told.add(key)
            log.warning("%s sends config %r, which plans have no place for; it is not sent", self._recipe.name, key)

    def _slice(self, task: str, update: Update) -> Message:
        """One client's update of one task, as the reply that the task's strategy waits for."""
        weight = weight_of(update, self.options.weighting)
        metrics = MetricRecord({"num-examples": int(weight)})
        if self.needs_loss and update.mean_loss is not None:
            metrics[TRAIN_LOSS_KEY] = update.mean_loss
        parameters = {key: Array(value) for key, value in update.arrays.items() if is_parameter(key, value)}
        content = RecordDict({"arrays": ArrayRecord(parameters), "metrics": metrics})
        return Message(content, reply_to=self._asked[update.client, task])


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _checked(arrays: ArrayRecord, key: str, like: NDArray) -> NDArray:
    if key not in arrays:
        raise TaskKeptError(f"the strategy gave no array {key!r}")
    value = arrays[key].numpy()
    if value.shape != like.shape:
        raise TaskKeptError(f"the strategy gave array {key!r} shape {value.shape} instead of {like.shape}")
    if not np.isfinite(value).all():
        raise _OverflowError(f"the strategy gave array {key!r} values that are not finite")
    # Server arithmetic with numpy scalars widens float32.
    with np.errstate(over="ignore"):
        narrow = np.asarray(value.astype(like.dtype))
    if not np.isfinite(narrow).all():
        raise _OverflowError(f"the strategy gave array {key!r} values beyond {like.dtype}")
    return narrow


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """Flower logs several lines a task and round; the round's record says the same once."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _own_random(seed: str) -> Iterator[None]:
    """Flower samples nodes with Python's global generator: give it one of its own, so that runs repeat."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
