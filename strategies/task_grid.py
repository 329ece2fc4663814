"""TaskGrid: what a stock strategy sees of the grid, namely the clients of its own task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid


class TaskGrid(Grid):
    """`grid`, with only `node_ids` in it. Everything else is passed on."""

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        self._grid = grid
        self._node_ids = tuple(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        return self._node_ids

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self._grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)
