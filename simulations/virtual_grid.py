"""A Grid around Flower's Grid that gives every node the name, tasks, speed and link of a client of a simulated fleet.

Training is real; seconds are those of `simulations.virtual_clock`. Strategies and clients know nothing of it: the grid
tells nodes their holdings, answers for costs from recorded ones, rewrites reports, and delivers replies in virtual
order. What happens follows from the seed and the clients' names, never from node ids or the order of arrival.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from gpu_runtime.contracts import (
    MEASURED,
    VIRTUAL,
    ContractError,
    NodeHoldings,
    Plan,
    Profile,
    Report,
    TaskCost,
    from_json,
    to_json,
)
from simulations.fleet import Fleet, FleetClient, FleetError
from simulations.roll_call import RollCall
from simulations.task_costs import RecordedCosts, load_costs
from simulations.virtual_device import VirtualDevice
from tasks.registry import task_name

log = logging.getLogger("paceline.fleet")

# Flower's error codes.
REPLY_UNAVAILABLE = 4
NODE_UNAVAILABLE = 5

PROFILE = "query.profile"
POLL_S = 0.1
HOLD_FRACTION = 0.95

T = TypeVar("T", Profile, Report)


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """A reply and when it arrives on the virtual clock."""

    finish_s: float
    client: str
    message_id: str
    reply: Message


@dataclass(kw_only=True)
class _Batch:
    """Train messages pushed together: their replies are held back until all are in."""

    expires_at: float
    waiting: set[str] = field(default_factory=set)
    arrivals: list[_Arrival] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A message on its way, as it was stamped."""

    message: Message
    client: FleetClient
    batch: _Batch | None
    plan: Plan | None
    server_round: int
    bytes_down: int


class VirtualGrid(Grid):
    """Flower's Grid as a fleet of unequal machines.

    Args:
        grid: Flower's grid.
        fleet: who takes part.
        task_refs: tasks of the run, in order.
        seed: of hidden cost errors, drift and dropout.
        clock: "virtual", or "measured" to keep real seconds (then only holdings and dropout are simulated).
        costs: recorded task costs; by default those the fleet names.
        identity_timeout_s: real seconds a node may take to say which partition it is.
        hold_s: real seconds that the run waits for a round's replies. Shortly before they are over the missing ones
            are given up, so that the others are delivered in time.

    Attributes:
        notes: what a reader of the run's results should know, each once.
    """

    def __init__(
        self,
        grid: Grid,
        fleet: Fleet,
        task_refs: Sequence[str],
        *,
        seed: int = 1,
        clock: str = VIRTUAL,
        costs: RecordedCosts | None = None,
        identity_timeout_s: float = 120.0,
        hold_s: float = 3000.0,
    ) -> None:
        if clock not in (VIRTUAL, MEASURED):
            raise ValueError(f"clock must be {VIRTUAL!r} or {MEASURED!r}, not {clock!r}")
        self._grid = grid
        self._fleet = fleet
        self._task_refs = tuple(task_refs)
        self._seed = seed
        self._clock = clock
        self._costs = costs or load_costs(fleet.costs)
        self._roll = RollCall(grid, identity_timeout_s, self._note)
        self._hold_s = HOLD_FRACTION * hold_s
        self.notes: list[str] = []
        self._clients: tuple[FleetClient, ...] = ()
        self._devices: dict[str, VirtualDevice] = {}
        self._sent: dict[str, _Sent] = {}
        self._ready: dict[str, Message] = {}

    def server_costs(self) -> Mapping[str, TaskCost] | None:
        """Of each task on the split service's device, as planners see them; None where seconds are measured."""
        if self._clock != VIRTUAL:
            return None
        return {task: cost.scaled(1 / self._fleet.server_speed) for task, cost in self._costs.tasks.items()}

    # ------------------------------------------------------------------------------------------------ Flower's Grid

    def set_run(self, run: Any) -> None:
        """As Flower's grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As Flower's grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As Flower's grid, which has given it up for the constructor of Message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Nodes whose partition is known, in order of partition. Asks new nodes and waits for their answer.

        Raises:
            FleetError: no node could say who it is.
        """
        return self._roll.node_ids(POLL_S)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send each message with its node's holdings. A message that cannot be sent is answered with an error."""
        batch = _Batch(expires_at=time.monotonic() + self._hold_s)
        ids = []
        undeliverable = []
        for message in messages:
            sent = self._stamp(message, batch)
            pushed = list(self._grid.push_messages([sent.message]))
            message_id = pushed[0] if pushed else sent.message.metadata.message_id
            self._sent[message_id] = sent
            if sent.batch is not None:
                batch.waiting.add(message_id)
            if not pushed:
                undeliverable.append(message_id)
            ids.append(message_id)
        for message_id in undeliverable:
            self._fail(message_id, NODE_UNAVAILABLE, "its node is gone")
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to `message_ids`. Train messages pushed together are answered together, in virtual order."""
        wanted = set(message_ids)
        batches = self._batches_of(wanted)
        pending = (wanted & set(self._sent)).union(*(batch.waiting for batch in batches))
        if pending:
            for reply in list(self._grid.pull_messages(sorted(pending))):
                self._take_in(reply.metadata.reply_to_message_id, reply)
        for batch in batches:
            if time.monotonic() >= batch.expires_at:
                self._give_up(batch)
        return [self._ready.pop(message_id) for message_id in list(self._ready) if message_id in wanted]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push, then pull until all replies are in or `timeout` seconds have passed; missing ones are left out."""
        waiting = set(self.push_messages(messages))
        end = math.inf if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while True:
            replies += self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            if not waiting or time.monotonic() >= end:
                break
            time.sleep(POLL_S)
        for batch in self._batches_of(waiting):
            self._release(batch)
        return replies + [self._ready.pop(message_id) for message_id in list(self._ready) if message_id in waiting]

    # ------------------------------------------------------------------------------------------------- on the way

    def _client_of(self, node: int) -> FleetClient:
        """The fleet's client that this node plays. The fleet is dealt out when it is first asked for."""
        partition = self._roll.partitions.get(node)
        if partition is None:
            raise FleetError([f"node {node} is not known to the fleet; take nodes from get_node_ids"])
        if not self._clients:
            self._clients = self._fleet.deal(self._roll.close(), self._task_refs)
            self._devices = {
                client.name: VirtualDevice(client, self._fleet, self._costs, self._seed) for client in self._clients
            }
        return self._clients[partition]

    def _stamp(self, message: Message, batch: _Batch) -> _Sent:
        """A copy of the message with the node's holdings. Arrays are shared with the original, records are not."""
        metadata = message.metadata
        client = self._client_of(metadata.dst_node_id)
        content = RecordDict(dict(message.content.items()))
        config = message.content.config_records.get("config", ConfigRecord())
        virtual = self._clock == VIRTUAL
        if virtual and metadata.message_type == PROFILE and self._devices[client.name].knows_all_costs():
            content["config"] = ConfigRecord({**config, "measure": False})
        holdings = NodeHoldings(
            client=client.name, holdings=client.holdings, emulation=None if virtual else client.kind.emulation
        )
        content["holdings"] = ConfigRecord({"json": to_json(holdings)})
        stamped = Message(
            content, metadata.dst_node_id, metadata.message_type, ttl=metadata.ttl, group_id=metadata.group_id
        )
        held_back = virtual and _is_train(message)
        return _Sent(
            message=stamped,
            client=client,
            batch=batch if held_back else None,
            plan=from_json(Plan, str(config["plan"])) if "plan" in config else None,
            server_round=int(str(config.get("server-round", 0))),
            bytes_down=_num_bytes(content),
        )

    def _take_in(self, message_id: str, reply: Message) -> None:
        """Make a node's reply what a client of the fleet would have answered."""
        sent = self._sent.pop(message_id, None)
        if sent is None:
            return
        if reply.has_error():
            # The sender of some of Flower's errors is not the node that was asked.
            reply = Message(reply.error, reply_to=sent.message)
        device = self._devices[sent.client.name]
        if self._clock == VIRTUAL and sent.message.metadata.message_type == PROFILE and reply.has_content():
            self._rewrite(reply, "profile", Profile, device.profile)
        if sent.batch is not None:
            finish_s = self._virtual_finish_s(sent, device, reply)
        self._note_unrecorded(device)
        if _is_train(sent.message) and device.loses_reply(sent.server_round):
            error = Error(
                code=NODE_UNAVAILABLE, reason=f"reply of client {sent.client.name!r} lost (simulated dropout)"
            )
            reply = Message(error, reply_to=sent.message)
        if sent.batch is None:
            self._ready[message_id] = reply
            return
        arrival = _Arrival(finish_s=finish_s, client=sent.client.name, message_id=message_id, reply=reply)
        sent.batch.arrivals.append(arrival)
        sent.batch.waiting.discard(message_id)
        if not sent.batch.waiting:
            self._release(sent.batch)

    def _virtual_finish_s(self, sent: _Sent, device: VirtualDevice, reply: Message) -> float:
        """Put virtual seconds into the reply's report. A reply without one comes when its plan would have been done."""
        finish_s = device.planned_s(sent.plan, sent.server_round, bytes_down=sent.bytes_down)
        if reply.has_content():
            bytes_up = _num_bytes(reply.content)
            report = self._rewrite(
                reply,
                "report",
                Report,
                lambda found: device.report(found, sent.plan, bytes_down=sent.bytes_down, bytes_up=bytes_up),
            )
            if report is not None:
                finish_s = report.seconds
        return finish_s

    def _note_unrecorded(self, device: VirtualDevice) -> None:
        for task in device.unrecorded:
            ref = next((ref for ref in self._task_refs if task_name(ref) == task), task)
            text = (
                f"no recorded cost of task {task!r}: measured ones are used, so virtual seconds differ from run to "
                f"run; record it in simulations/costs with: python -m simulations.record_costs --tasks {ref}"
            )
            if self._note(text):
                log.warning("%s", text)

    def _note(self, text: str) -> bool:
        """Add to the notes what is not there yet; whether it was new."""
        new = text not in self.notes
        if new:
            self.notes.append(text)
        return new

    def _rewrite(self, reply: Message, name: str, kind: type[T], change: Callable[[T], T]) -> T | None:
        """Replace a JSON value of the reply. One that cannot be read stays, for the strategy to refuse."""
        record = reply.content.config_records.get(name, ConfigRecord())
        try:
            found = from_json(kind, str(record.get("json", "")))
        except ContractError as error:
            log.warning("a reply's %s cannot be read: %s", name, error)
            return None
        value = change(found)
        reply.content[name] = ConfigRecord({**record, "json": to_json(value)})
        return value

    def _release(self, batch: _Batch) -> None:
        """Hand over what is in, in virtual order. Ties go by name."""
        for arrival in sorted(batch.arrivals, key=lambda arrival: (arrival.finish_s, arrival.client)):
            self._ready[arrival.message_id] = arrival.reply
        batch.arrivals.clear()

    def _give_up(self, batch: _Batch) -> None:
        for message_id in sorted(batch.waiting):
            self._fail(message_id, REPLY_UNAVAILABLE, f"no reply within {self._hold_s:g} real seconds")

    def _fail(self, message_id: str, code: int, reason: str) -> None:
        sent = self._sent[message_id]
        error = Error(code=code, reason=f"client {sent.client.name!r}: {reason}")
        self._take_in(message_id, Message(error, reply_to=sent.message))

    def _batches_of(self, message_ids: Iterable[str]) -> list[_Batch]:
        sent = [self._sent[message_id] for message_id in message_ids if message_id in self._sent]
        return list({id(one.batch): one.batch for one in sent if one.batch is not None}.values())


def _is_train(message: Message) -> bool:
    return message.metadata.message_type.split(".")[0] == "train"


def _num_bytes(content: RecordDict) -> int:
    return sum(record.count_bytes() for record in content.array_records.values())
