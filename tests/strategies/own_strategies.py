"""Strategies such as a user would bring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedMedian

from strategies.base import MultiTaskStrategy
from strategies.load_assignment import EqualAssigner, LoadAssigner
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


class LastByName(MultiTaskStrategy):
    """Takes the weights of the last client."""

    @property
    def assigner(self) -> LoadAssigner:
        return EqualAssigner()

    def aggregate_task(
        self, server_round: int, task: str, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        return updates[-1].arrays


class NoStrategy:
    """Something else."""
