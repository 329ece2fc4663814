"""Plays rounds of a strategy over fake clients on an in-process grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from strategies.base import MultiTaskStrategy, RoundRecord, StrategyOptions
from strategies.registry import build
from tests.in_process_grid import InProcessGrid
from tests.strategies.fakes import TASKS, FakeClient, fake_fleet, initial_arrays, numpy_of


@dataclass
class Game:
    """A strategy, its clients and the weights so far."""

    strategy: MultiTaskStrategy
    grid: InProcessGrid
    fleet: Sequence[FakeClient]
    arrays: ArrayRecord
    records: list[RoundRecord] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)

    def play(self, server_round: int) -> RoundRecord:
        self.sent = list(self.strategy.configure_train(server_round, self.arrays, ConfigRecord(), self.grid))
        replies = list(self.grid.send_and_receive(self.sent))
        arrays, _ = self.strategy.aggregate_train(server_round, replies)
        self.arrays = arrays or self.arrays
        self.records.append(self.strategy.round_record())
        return self.records[-1]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return numpy_of(self.arrays)


def new_game(
    name: str = "arch-sync",
    fleet: Sequence[FakeClient] | None = None,
    *,
    seed: int = 0,
    shuffle: bool = False,
    tasks: tuple[str, ...] = TASKS,
    **options: Any,
) -> Game:
    """A game before its first round, profiles taken in."""
    fleet = fleet or fake_fleet()
    grid = InProcessGrid(list(fleet), seed=seed, shuffle=shuffle)
    strategy = build(StrategyOptions(name=name, **options), tasks)
    strategy.prepare(dict(zip(grid.node_ids, (client.profile for client in fleet), strict=True)))
    return Game(strategy=strategy, grid=grid, fleet=fleet, arrays=initial_arrays(tasks))
