"""Architecture-aware synchronisation: loads that make every client finish at the same moment, learnt from its reports.

One round, in the order of `docs/architecture.md`: the profiles of the book, corrected by what clients reported so far,
pose the load problem; the linear programme solves it; each client gets its tasks' arrays and its plan; replies are
checked and each task is aggregated with uneven local steps normalised; reported seconds go back into the book.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategies.aggregation import TaskModel
from strategies.base import MultiTaskStrategy
from strategies.load_assignment import ASSIGNERS, LinearProgramAssigner, LoadAssigner
from strategies.options import StrategyOptions
from strategies.replies import NDArray, Update
from strategies.robust import aggregator_of


class ArchSync(MultiTaskStrategy):
    """Plans loads by the clients' speed, averages by normalised steps."""

    def __init__(self, options: StrategyOptions, tasks: Sequence[str]) -> None:
        super().__init__(options, tasks)
        self._assigner = LinearProgramAssigner() if options.loads == "auto" else ASSIGNERS[options.loads]()
        self._aggregators = {task: aggregator_of(options) for task in self.tasks}
        self.compared = frozenset(task for task, how in self._aggregators.items() if how.compares_updates)

    def use_models(self, models: Mapping[str, TaskModel]) -> None:
        super().use_models(models)
        for task, model in models.items():
            self._aggregators[task].model = model

    @property
    def assigner(self) -> LoadAssigner:
        return self._assigner

    def aggregate_task(
        self, server_round: int, task: str, updates: Sequence[Update], current: Mapping[str, NDArray]
    ) -> Mapping[str, NDArray]:
        return self._aggregators[task].aggregate(server_round, updates, current)
