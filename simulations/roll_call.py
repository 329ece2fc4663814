"""Which partition of a simulation each node is: every node is asked once, since Flower's server does not know."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from simulations.fleet import FleetError
from strategies.error_reply import error_line

log = logging.getLogger("paceline.fleet")
# As many as one class of a fleet may have clients; a node that says more is not believed.
MAX_PARTITIONS = 100_000


class RollCall:
    """Node ids and their partitions.

    Args:
        grid: Flower's grid.
        timeout_s: real seconds that one call of `node_ids` may wait for answers.
        note: told of every node that takes no part, and why.

    Attributes:
        partitions: partition of each node that has answered.
    """

    def __init__(self, grid: Grid, timeout_s: float, note: Callable[[str], object]) -> None:
        self._grid = grid
        self._timeout_s = timeout_s
        self._note = note
        self.partitions: dict[int, int] = {}
        self._left_out: dict[int, str] = {}
        self._asked: dict[str, int] = {}
        self._counts: dict[int, int] = {}
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
        for node in sorted(set(self._asked.values()) & present):
            self._note(
                f"node {node} has not said who it is within {self._timeout_s:g} s; it takes no part until it does"
            )
        self._leave_out_the_odd()
        if self._left_out and not self.partitions:
            raise FleetError([f"no node could say who it is: {next(iter(self._left_out.values()))}"])
        return sorted(present & set(self.partitions), key=lambda node: self.partitions[node])

    def close(self) -> int:
        """Number of partitions from now on: nodes that come later and say another take no part."""
        self._closed_at = next(iter(self._counts.values()))
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
                self.partitions[node], self._counts[node] = self._identity(reply)
            except FleetError as error:
                self._leave_out(node, str(error))

    def _leave_out(self, node: int, reason: str) -> None:
        self._left_out[node] = reason
        self._note(f"node {node} takes no part: {reason}")
        log.error("node %d takes no part: %s", node, reason)

    def _leave_out_the_odd(self) -> None:
        """Nodes that say another number of partitions than most: believing them would cut the data differently."""
        if self._closed_at is not None or not self._counts:
            return
        votes = Counter(self._counts.values())
        usual = min(votes, key=lambda count: (-votes[count], count))
        for node in [node for node, count in self._counts.items() if count != usual]:
            self._leave_out(node, f"it says num-partitions {self._counts[node]}, most nodes {usual}")
            del self.partitions[node], self._counts[node]

    def _identity(self, reply: Message) -> tuple[int, int]:
        """Partition, and number of partitions, of the node that sent this reply to query.identity.

        Raises:
            FleetError: an error, no partition, or one that cannot be used.
        """
        if reply.has_error():
            raise FleetError([error_line(reply)])
        record = reply.content.config_records.get("identity", ConfigRecord())
        partition, count = record.get("partition-id", -1), record.get("num-partitions", 0)
        name = str(record.get("name"))[:80]
        if type(partition) is not int or partition < 0 or type(count) is not int or not 1 <= count <= MAX_PARTITIONS:
            raise FleetError(
                [
                    f"{name!r} says partition-id {partition!r:.40} and num-partitions {count!r:.40}; "
                    f"a fleet needs simulated nodes, with 1 to {MAX_PARTITIONS} partitions"
                ]
            )
        if self._closed_at is not None and (partition >= self._closed_at or count != self._closed_at):
            raise FleetError(
                [f"partition {partition} of {count} came after the fleet was dealt out to {self._closed_at} clients"]
            )
        if partition >= count:
            raise FleetError([f"{name!r} says partition-id {partition} of num-partitions {count}"])
        if any(self.partitions[node] == partition and self._counts[node] == count for node in self.partitions):
            raise FleetError([f"{name!r} says partition-id {partition}, which another node has"])
        return partition, count
