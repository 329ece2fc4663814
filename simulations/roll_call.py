"""Which partition of a simulation each node is: every node is asked once, since Flower's server does not know."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from simulations.fleet import FleetError

log = logging.getLogger("paceline.fleet")


class RollCall:
    """Node ids and their partitions.

    Args:
        grid: Flower's grid.
        timeout_s: real seconds that one call of `node_ids` may wait for answers.

    Attributes:
        partitions: partition of each node that has answered.
    """

    def __init__(self, grid: Grid, timeout_s: float) -> None:
        self._grid = grid
        self._timeout_s = timeout_s
        self.partitions: dict[int, int] = {}
        self._left_out: dict[int, str] = {}
        self._asked: dict[str, int] = {}
        self._num_partitions = 0
        self._closed_at: int | None = None

    def node_ids(self, poll_s: float) -> list[int]:
        """Nodes that are there and whose partition is known, in order of partition. Waits for those just asked.

        Raises:
            FleetError: no node could say who it is.
        """
        present = set(self._grid.get_node_ids())
        self._ask(sorted(present - set(self.partitions) - set(self._left_out) - set(self._asked.values())))
        deadline = time.monotonic() + self._timeout_s
        while self._asked and set(self._asked.values()) & present:
            self._hear()
            if not self._asked or time.monotonic() >= deadline:
                break
            time.sleep(poll_s)
        if self._left_out and not self.partitions:
            raise FleetError([f"no node could say who it is: {next(iter(self._left_out.values()))}"])
        return sorted(present & set(self.partitions), key=lambda node: self.partitions[node])

    def close(self) -> int:
        """Number of partitions from now on: nodes beyond it that come later take no part."""
        self._closed_at = max(self._num_partitions, *(partition + 1 for partition in self.partitions.values()))
        return self._closed_at

    def _ask(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            message = Message(RecordDict(), node, "query.identity")
            for message_id in self._grid.push_messages([message]):
                self._asked[message_id] = node

    def _hear(self) -> None:
        for reply in list(self._grid.pull_messages(sorted(self._asked))):
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            try:
                self.partitions[node] = self._partition(reply)
            except FleetError as error:
                self._left_out[node] = str(error)
                log.error("a node takes no part: %s", error)

    def _partition(self, reply: Message) -> int:
        """Partition of the node that sent this reply to query.identity.

        Raises:
            FleetError: an error, no partition, or one that cannot be used.
        """
        if reply.has_error():
            raise FleetError([" ".join((reply.error.reason or "no reason given").split())])
        record = reply.content.config_records.get("identity", ConfigRecord())
        partition, count = record.get("partition-id", -1), record.get("num-partitions", 0)
        if type(partition) is not int or partition < 0:
            raise FleetError([f"node {record.get('name')!r} has no partition-id; a fleet needs simulated nodes"])
        if partition in self.partitions.values():
            raise FleetError([f"partition {partition} is there twice"])
        if self._closed_at is not None and partition >= self._closed_at:
            raise FleetError([f"partition {partition} came after the fleet was dealt out to {self._closed_at} clients"])
        if type(count) is int:
            self._num_partitions = max(self._num_partitions, count)
        return partition
