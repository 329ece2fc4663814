"""Send messages and collect the replies, each wait with a deadline. Replies are used as soon as all are in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.error_reply import WORKER_DIED, worker_died

POLL_S = 0.1
SETTLE_S = 1.0


class NoClientsError(RuntimeError):
    """Fewer clients joined than the run needs."""


class WorkersDiedError(RuntimeError):
    """The processes that simulate clients have died: no later message would be answered either."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What came back. `missing` are the nodes that had not answered when the deadline passed."""

    replies: tuple[Message, ...]
    missing: tuple[int, ...]
    seconds: float
    bytes_down: int
    bytes_up: int


def wait_for_nodes(grid: Grid, min_clients: int, timeout_s: float) -> list[int]:
    """Node ids once at least `min_clients` are there and their number has stood still for a moment.

    Raises:
        NoClientsError: fewer than `min_clients` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    nodes: list[int] = []
    settled_at = time.monotonic() + SETTLE_S
    while True:
        found = list(grid.get_node_ids())
        now = time.monotonic()
        if len(found) != len(nodes):
            settled_at = now + SETTLE_S
        nodes = found
        if len(nodes) >= min_clients and now >= settled_at:
            return nodes
        if now >= deadline:
            if len(nodes) >= min_clients:
                return nodes
            raise NoClientsError(
                f"{len(nodes)} of at least {min_clients} clients joined within {timeout_s:g} s; "
                "start more SuperNodes, or lower min-clients or raise join-timeout-s"
            )
        time.sleep(POLL_S)


def exchange(grid: Grid, messages: Sequence[Message], timeout_s: float) -> Exchange:
    """Push the messages and pull replies until all are in or `timeout_s` seconds have passed.

    Flower makes up the sender of some error replies (node 1): they are given the id of the node that was asked.

    Raises:
        WorkersDiedError: simulated clients were asked, none could answer, and some because their process has died.
            Not for evaluation, which a run can do without.
    """
    start = time.monotonic()
    waiting = dict(zip(grid.push_messages(messages), messages, strict=True)) if messages else {}
    replies: list[Message] = []
    while waiting:
        for reply in list(grid.pull_messages(list(waiting))):
            sent = waiting.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            if reply.has_error() and reply.metadata.src_node_id != sent.metadata.dst_node_id:
                reply = Message(reply.error, reply_to=sent)
            replies.append(reply)
        if not waiting or time.monotonic() - start >= timeout_s:
            break
        time.sleep(POLL_S)
    if not waiting and _workers_died(replies) and not messages[0].metadata.message_type.startswith("evaluate"):
        raise WorkersDiedError(
            f"{WORKER_DIED}; with less memory in use the run may come through: fewer tasks at a time"
        )
    return Exchange(
        replies=tuple(replies),
        missing=tuple(sent.metadata.dst_node_id for sent in waiting.values()),
        seconds=time.monotonic() - start,
        bytes_down=_num_bytes(messages),
        bytes_up=_num_bytes(reply for reply in replies if reply.has_content()),
    )


def _workers_died(replies: Sequence[Message]) -> bool:
    return any(map(worker_died, replies)) and all(reply.has_error() for reply in replies)


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(record.count_bytes() for message in messages for record in message.content.array_records.values())
