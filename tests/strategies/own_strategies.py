"""Strategies such as a user would bring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedMedian

from strategies.base import MultiTaskStrategy
from strategies.load_assignment import EqualAssigner, LoadAssigner
from strategies.options import StrategyOptions
from strategies.replies import NDArray, Update


class MyMedian(FedMedian):
    """A stock strategy under another name."""


class HalfOfThem(FedAvg):
    """Samples half of the clients."""

    def __init__(self, **arguments: float) -> None:
        super().__init__(**{**arguments, "fraction_train": 0.5})  # type: ignore[arg-type]


class Raises(FedAvg):
    """Fails when it aggregates."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        raise ZeroDivisionError("no luck")


class Overflows(FedAvg):
    """Keeps a state that overflows in round 2, also in an attribute that is not there before."""

    def __init__(self, **arguments: float) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.velocity: dict[str, np.ndarray] = {}
        self.rounds_aggregated = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.rounds_aggregated += 1
        self.velocity["w"] = np.full(3, np.inf if server_round == 2 else 1.0, dtype=np.float32)
        if server_round == 2:
            self.late = [np.nan]
        return super().aggregate_train(server_round, replies)


class LastByName(MultiTaskStrategy):
    """Takes the weights of the last client."""

    @property
    def assigner(self) -> LoadAssigner:
        return EqualAssigner()

    def aggregate_task(
        self, server_round: int, task: str, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        return updates[-1].arrays


class NeedsMore(FedAvg):
    """Cannot be made without an argument."""

    def __init__(self, *, flavour: str, **arguments: float) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]


class OwnNeedsMore(LastByName):
    """Likewise."""

    def __init__(self, options: StrategyOptions, tasks: Sequence[str], flavour: str) -> None:
        super().__init__(options, tasks)


class NoStrategy:
    """Something else."""
