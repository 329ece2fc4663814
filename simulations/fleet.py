"""Fleets of unequal simulated clients: read from TOML, checked, and dealt out to the nodes Flower gives.

A fleet says nothing of strategies or messages; `simulations.virtual_grid` brings it to life.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpu_runtime.contracts import Emulation, Holding, Partition
from gpu_runtime.settings import keys_of, nearest, parse, setting
from simulations.devices import device_classes, with_device
from simulations.links import LinkFileError, load_link
from simulations.task_costs import CostsError, load_costs

FLEETS_DIR = Path(__file__).parent / "fleets"
NAME_PATTERN = re.compile(r"[a-z][a-z0-9-]*")
BYTES_PER_MBIT = 125_000
BYTES_PER_GIB = 2**30


class FleetError(ValueError):
    """A fleet that cannot be used; `faults` has one line for each fault."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


@dataclass(frozen=True, kw_only=True)
class ClientClass:
    """One kind of machine in a fleet and how many of it there are.

    `skip_tasks` are tasks its clients do not hold: a position in the run's task list counted from 1 (beyond the end
    of a shorter list it means nothing), or a task's reference.
    """

    name: str = setting("name", "", "name of the client; further ones of a class are called name-2, name-3, ...")
    count: int = setting("count", 1, "clients of this class", minimum=1, maximum=100_000)
    speed: float = setting("speed", 1.0, "times as fast as the machine of the recorded costs", above=0.0, maximum=1e4)
    data_share: float = setting("data-share", 1.0, "relative part of each task's examples", minimum=0.0, maximum=1e9)
    fixed_s: float = setting("fixed-s", 0.0, "seconds a round costs whatever the load", minimum=0.0, maximum=1e6)
    link: str = setting("link", "", "a named link, or its TOML file, instead of the keys below")
    uplink_mbit_per_s: float = setting("uplink-mbit-per-s", 0.0, "0: not modelled", minimum=0.0, maximum=1e7)
    downlink_mbit_per_s: float = setting("downlink-mbit-per-s", 0.0, "0: not modelled", minimum=0.0, maximum=1e7)
    latency_ms: float = setting("latency-ms", 0.0, "one way", minimum=0.0, maximum=1e6)
    message_ms: float = setting(
        "message-ms",
        0.5,
        "what a split task's messages occupy the link for, whatever their size",
        minimum=0.0,
        maximum=1e6,
    )
    memory_gib: float = setting("memory-gib", 0.0, "device memory; 0: not modelled", minimum=0.0, maximum=1e6)
    capacity: float = setting("capacity", 1.0, "demand served per second by a competing mix", above=0.0, maximum=100.0)
    dropout: float = setting("dropout", -1.0, "probability that a reply is lost; default: the fleet's", maximum=1.0)
    skip_tasks: tuple[int | str, ...] = field(default=())

    @property
    def uplink_bytes_per_s(self) -> float | None:
        """None where the link is not modelled."""
        return self._link.uplink_bytes_per_s

    @property
    def downlink_bytes_per_s(self) -> float | None:
        """None where the link is not modelled."""
        return self._link.downlink_bytes_per_s

    @property
    def latency_s(self) -> float:
        """One way."""
        return self._link.latency_s

    @property
    def message_s(self) -> float:
        """What a message of a split task occupies the link for, on the virtual clock."""
        return self._link.message_s or self.message_ms / 1000

    @property
    def emulation(self) -> Emulation | None:
        """The link, to be acted out where seconds are measured; None where it is not modelled.

        Devices are not slowed down: tasks that train whole could not be.
        """
        return None if self._link == Emulation() else self._link

    @cached_property
    def _link(self) -> Emulation:
        if self.link:
            return load_link(self.link)
        return Emulation(
            uplink_bytes_per_s=self.uplink_mbit_per_s * BYTES_PER_MBIT or None,
            downlink_bytes_per_s=self.downlink_mbit_per_s * BYTES_PER_MBIT or None,
            latency_s=self.latency_ms / 1000,
        )

    @property
    def memory_bytes(self) -> int:
        """0 where memory is not modelled."""
        return int(self.memory_gib * BYTES_PER_GIB)

    def holds(self, position: int, ref: str) -> bool:
        """Whether clients of this class hold the task at `position` (from 1) of the run's list."""
        return position not in self.skip_tasks and ref not in self.skip_tasks


@dataclass(frozen=True, kw_only=True)
class FleetClient:
    """One simulated client of a run: its name, its class, and its part of each task it holds."""

    name: str
    kind: ClientClass
    dropout: float
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Client classes and what is common to them.

    `cost_error` is the sigma of the hidden log-normal factor on each client's true cost of each task; `drift` the
    sigma of a further log-normal factor that a client's costs are multiplied by every round.
    """

    costs: str = setting("costs", "cpu-2-cores", "recorded task costs: a file of simulations/costs, without .json")
    cost_error: float = setting("cost-error", 0.15, "hidden error of the costs planners see", minimum=0.0, maximum=2.0)
    drift: float = setting("drift", 0.0, "random walk of a client's costs, per round", minimum=0.0, maximum=2.0)
    dropout: float = setting("dropout", 0.0, "probability that a reply is lost", minimum=0.0, maximum=1.0)
    server_speed: float = setting(
        "server-speed", 8.0, "the split service's device, in the unit of the clients' speed", above=0.0, maximum=1e4
    )
    name: str = field(default="")
    classes: tuple[ClientClass, ...] = field(default=())

    @property
    def num_clients(self) -> int:
        """Clients the fleet names; a run may have fewer or more."""
        return sum(kind.count for kind in self.classes)

    def deal(self, num_clients: int, task_refs: Sequence[str]) -> tuple[FleetClient, ...]:
        """The clients of a run, in order of partition: the classes in order, from the start again where they run out.

        Raises:
            FleetError: a task that nobody holds, a client without tasks, or a skipped task that the run does not have.
        """
        kinds = [kind for kind in self.classes for _ in range(kind.count)]
        kinds = [kinds[i % len(kinds)] for i in range(num_clients)]
        names = _unique_names([kind.name for kind in kinds])
        faults = _unknown_skips(self, task_refs)
        holdings: list[list[Holding]] = [[] for _ in kinds]
        for position, ref in enumerate(task_refs, start=1):
            holders = [i for i, kind in enumerate(kinds) if kind.holds(position, ref)]
            shares = tuple(kinds[i].data_share for i in holders)
            if not sum(shares):
                faults.append(f"fleet {self.name!r} with {num_clients} clients: nobody holds data of task {ref!r}")
                continue
            for index, i in enumerate(holders):
                partition = Partition(index=index, count=len(holders), shares=shares)
                holdings[i].append(Holding(ref=ref, partition=partition))
        if not faults:
            faults += [
                f"fleet {self.name!r}: client {name!r} holds no task of this run"
                for name, held in zip(names, holdings, strict=True)
                if not held
            ]
        if faults:
            raise FleetError(faults)
        return tuple(
            FleetClient(
                name=name,
                kind=kind,
                dropout=self.dropout if kind.dropout < 0 else kind.dropout,
                holdings=tuple(held),
            )
            for name, kind, held in zip(names, kinds, holdings, strict=True)
        )


def fleet_names() -> tuple[str, ...]:
    """Fleets that come with Paceline."""
    return tuple(sorted(path.stem for path in FLEETS_DIR.glob("*.toml")))


def load_fleet(name_or_path: str) -> Fleet:
    """A fleet by its name, or from a TOML file.

    Raises:
        FleetError: no such fleet, or a file with faults, all of them reported.
    """
    is_path = name_or_path.endswith(".toml") or "/" in name_or_path
    try:
        path = Path(name_or_path).expanduser() if is_path else FLEETS_DIR / f"{name_or_path}.toml"
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        if is_path:
            raise FleetError([f"fleet file {name_or_path!r} cannot be read: {_reason(error)}"]) from None
        known = fleet_names()
        raise FleetError(
            [f"no fleet {name_or_path!r}{nearest(name_or_path, known)}; there are: {', '.join(known)}"]
        ) from None
    return parse_fleet(path.stem, text)


def parse_fleet(name: str, text: str) -> Fleet:
    """A fleet from TOML text.

    Raises:
        FleetError: with one line for every fault.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FleetError([f"fleet {name!r} is not TOML: {error}; strings need quotes"]) from None
    faults: list[str] = []
    clients: Any = table.pop("client", [])
    faults += _unknown(table, Fleet, extra=("client",))
    fleet: Fleet = parse(table, [Fleet], faults)[0]
    classes = []
    if not isinstance(clients, list) or not all(isinstance(client, Mapping) for client in clients):
        faults.append("clients are written as [[client]] tables")
    else:
        for position, client in enumerate(clients, start=1):
            classes.append(_parse_class(position, dict(client), faults))
        if not clients:
            faults.append("no clients; write at least one [[client]] table")
        elif not sum(kind.data_share * kind.count for kind in classes):
            faults.append("data-share is 0 for all clients; give at least one of them data")
        faults += _repeated([kind.name for kind in classes])
    try:
        load_costs(fleet.costs)
    except CostsError as error:
        faults.append(f"costs: {error}")
    if faults:
        raise FleetError([f"fleet {name!r}: {fault}" for fault in faults])
    return replace(fleet, name=name, classes=tuple(classes))


def _parse_class(position: int, table: dict[str, Any], faults: list[str]) -> ClientClass:
    own: list[str] = []
    try:
        table = with_device(table)
    except KeyError:
        device, known = str(table.pop("device")), list(device_classes())
        own.append(f"no device {device!r}{nearest(device, known)}; there are: {', '.join(known)}")
    skips = table.pop("skip-tasks", [])
    own += _unknown(table, ClientClass, extra=("skip-tasks", "device"))
    kind: ClientClass = parse(table, [ClientClass], own)[0]
    if kind.link:
        own += _link_faults(kind, table)
    if "dropout" in table and kind.dropout < 0:
        own.append(f"dropout must be at least 0 and at most 1, not {kind.dropout!r}")
    if not NAME_PATTERN.fullmatch(kind.name):
        own.append(f"name must be lower-case letters, digits and hyphens, not {kind.name!r}")
    if not isinstance(skips, list) or not all(type(skip) is str or (type(skip) is int and skip >= 1) for skip in skips):
        own.append(f"skip-tasks must be a list of task names or positions from 1, not {skips!r}")
        skips = []
    label = repr(kind.name) if NAME_PATTERN.fullmatch(kind.name) else str(position)
    faults += [f"client {label}: {fault}" for fault in own]
    return replace(kind, skip_tasks=tuple(skips))


def _link_faults(kind: ClientClass, table: Mapping[str, Any]) -> list[str]:
    both = [key for key in ("uplink-mbit-per-s", "downlink-mbit-per-s", "latency-ms") if key in table]
    if both:
        return [f"link {kind.link!r} says what {', '.join(both)} say; give one or the other"]
    try:
        load_link(kind.link)
    except LinkFileError as error:
        return [f"link: {fault}" for fault in error.faults]
    return []


def _unknown(table: Mapping[str, Any], section: type, extra: Sequence[str]) -> list[str]:
    known = [*keys_of(section), *extra]
    return [f"unknown key {key!r}{nearest(key, known)}" for key in table if key not in known]


def _repeated(names: Sequence[str]) -> list[str]:
    twice = sorted({name for name in names if name and names.count(name) > 1})
    return [f"client {name!r} is there twice; use count, or another name" for name in twice]


def _unique_names(names: Sequence[str]) -> list[str]:
    """Each name as it is the first time, then with -2, -3, ... behind it, never one that is taken already."""
    taken = set(names)
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        candidate = name
        while seen[name] > 1 and (candidate := f"{name}-{seen[name]}") in taken:
            seen[name] += 1
        taken.add(candidate)
        unique.append(candidate)
    return unique


def _unknown_skips(fleet: Fleet, task_refs: Sequence[str]) -> list[str]:
    return [
        f"fleet {fleet.name!r}: client {kind.name!r} skips task {skip!r}, which this run does not have"
        + nearest(skip, task_refs)
        for kind in fleet.classes
        for skip in kind.skip_tasks
        if isinstance(skip, str) and skip not in task_refs
    ]


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
