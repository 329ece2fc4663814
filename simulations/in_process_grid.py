"""InProcessGrid: Flower's Grid without its processes. The only file to touch flwr's private parts.

Nodes are ClientApps or plain callables; messages are answered when they are pushed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Node = ClientApp | Callable[[Message, Context], Message]

CLIENT_RAISED = 2
NODE_UNAVAILABLE = 5
SERVER_NODE = 1


def set_task_identity(run_id: int = 1) -> None:
    """Let this process make messages, which Flower allows only inside a run."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE
    TaskIdentity.task_id = 1


class InProcessGrid(Grid):
    """A grid over `nodes`, one for each client.

    Args:
        nodes: what answers, in the order of partition ids; a single node with `num_nodes` serves all.
        num_nodes: how many nodes share a single `nodes`.
        seed: makes node ids and, with `shuffle`, the order of replies.
        shuffle: replies come in random order.
        node_configs: node config of each node; `partition-id` and `num-partitions` unless given.
        run_config: run config of every node's context.
        keep_sent: whether `sent` keeps every message, which in a long run of many nodes is much memory.
    """

    def __init__(
        self,
        nodes: Node | Sequence[Node],
        num_nodes: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = False,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        run_config: Mapping[str, Any] | None = None,
        keep_sent: bool = True,
    ) -> None:
        set_task_identity()
        apps: list[Node] = list(nodes) if isinstance(nodes, Sequence) else [nodes] * (num_nodes or 1)
        self._random = random.Random(seed)
        self._shuffle = shuffle
        ids = [self._random.getrandbits(63) for _ in apps]
        self._apps = dict(zip(ids, apps, strict=True))
        configs = node_configs or [{"partition-id": index, "num-partitions": len(apps)} for index in range(len(apps))]
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node, config in zip(ids, configs, strict=True)
        }
        self.sent: list[Message] = []
        self._keep_sent = keep_sent
        self._num_sent = 0
        self._replies: dict[str, Message] = {}
        self._failures: dict[tuple[int, int], str] = {}
        self._gone: set[int] = set()

    # -------------------------------------------------------------------------------------------------- failures

    def fail_at(self, server_round: int, client: int, how: str = "raise") -> None:
        """In `server_round` the train message to the client of index `client` fails.

        `how` is "raise" (the ClientApp raises), "unavailable" (Flower's own error, from node 1) or "silent" (no reply).
        """
        assert how in ("raise", "unavailable", "silent")
        self._failures[server_round, self.node_ids[client]] = how

    def remove(self, client: int) -> None:
        """The client of index `client` disconnects for good."""
        self._gone.add(self.node_ids[client])

    # ------------------------------------------------------------------------------------------------------ Grid

    @property
    def node_ids(self) -> list[int]:
        """Node ids in the order of `nodes`, also of those that have gone."""
        return list(self._apps)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        here = [node for node in self._apps if node not in self._gone]
        return self._random.sample(here, len(here)) if self._shuffle else here

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            identifier = f"message-{self._num_sent}"
            self._num_sent += 1
            message.metadata.__dict__["_message_id"] = identifier
            if self._keep_sent:
                self.sent.append(message)
            ids.append(identifier)
            reply = self._answer(message)
            if reply is not None:
                self._replies[identifier] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [self._replies.pop(identifier) for identifier in message_ids if identifier in self._replies]
        if self._shuffle:
            self._random.shuffle(found)
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(list(self.push_messages(messages)))

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        config = message.content.config_records.get("config", ConfigRecord())
        failure = None
        if message.metadata.message_type.startswith("train"):
            failure = self._failures.get((int(str(config.get("server-round", 0))), node))
        if failure == "silent":
            return None
        if node in self._gone or failure == "unavailable":
            reply = Message(Error(NODE_UNAVAILABLE, "Node unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = SERVER_NODE
            return reply
        try:
            if failure == "raise":
                raise RuntimeError("injected failure")
            return self._apps[node](message, self.contexts[node])
        except Exception as error:
            return Message(Error(CLIENT_RAISED, repr(error)), reply_to=message)
