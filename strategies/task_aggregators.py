"""TaskAggregator: new arrays of one task from its updates. The plain ones; `strategies.robust` has those for liars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from strategies.aggregation import TaskModel, normalised_average
from strategies.replies import NDArray, Update


class TaskAggregator(ABC):
    """Aggregates one task, in the order of client names. One instance a task: it may keep state between rounds.

    Attributes:
        compares_updates: whether it bounds or compares updates itself, and so gets to see odd ones.
        model: what the server knows of the task's model; None where it was not told.
    """

    compares_updates = False

    def __init__(self, weighting: str = "used") -> None:
        self.weighting = weighting
        self.model: TaskModel | None = None

    @abstractmethod
    def aggregate(
        self, server_round: int, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        """New arrays from at least one update.

        Raises:
            TaskKeptError: they cannot be aggregated; nothing of the aggregator has changed.
        """


class NormalisedAverage(TaskAggregator):
    """FedNova's average; see `aggregation.normalised_average`."""

    def aggregate(
        self, server_round: int, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        return normalised_average(updates, current, self.weighting, self.model)
