"""Checks profiles before anything is planned with them: a client with a bad one is left out, the others go on.

Used by `strategies.inventory` and by the server's run loop.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message

from gpu_runtime.contracts import MEASURED, VIRTUAL, ContractError, Profile, TaskProfile, from_json, one_line

MAX_NAME = 200
# Far beyond any machine or data set, near enough that sums and the solvers of load assignment stay exact.
MAX_EXAMPLES = 10**12
MAX_SECONDS = 1e6
MAX_BYTES_PER_S = 1e15
# Of what one example sends over a link, and blocks of a model.
MAX_EXAMPLE_BYTES = 10**12
MAX_BLOCKS = 4096


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`, both allowed."""

    low: float
    high: float

    def check(self, name: str, value: float) -> None:
        if not self.low <= value <= self.high:
            raise ContractError(f"{name} must be from {self.low:g} to {self.high:g}, not {value:g}")


_SECONDS = _Range(0.0, MAX_SECONDS)
_RATE = _Range(1.0, MAX_BYTES_PER_S)
_COUNT = _Range(0, MAX_EXAMPLES)
_BYTES = _Range(0, MAX_EXAMPLE_BYTES)
_PROFILE = {
    "num_cores": _COUNT,
    "capacity": _Range(1e-6, 1e6),
    "memory_bytes": _Range(0, 1e18),
    "fixed_s": _SECONDS,
    "latency_s": _SECONDS,
    "message_s": _SECONDS,
    "uplink_bytes_per_s": _RATE,
    "downlink_bytes_per_s": _RATE,
}
_TASK = {"num_examples": _COUNT, "batch_size": _Range(1, MAX_EXAMPLES)}
_COST = {
    "demand": _Range(1e-6, 1.0),
    "solo_cost_s": _Range(1e-12, MAX_SECONDS),
    "peak_memory_bytes": _Range(0, 1e18),
    "update_s": _SECONDS,
    "target_bytes": _BYTES,
}
_BLOCK = {
    "forward_s": _SECONDS,
    "backward_s": _SECONDS,
    "forward_call_s": _SECONDS,
    "backward_call_s": _SECONDS,
    "boundary_bytes": _BYTES,
}
_ENCODING = {"encode_s": _SECONDS, "decode_s": _SECONDS}


def read_profile(reply: Message) -> Profile:
    """The profile in a reply that is no error.

    Raises:
        ContractError: it cannot be read, or a value is out of range; the text names the client where it is known.
    """
    record = reply.content.get("profile")
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise ContractError("no profile: reply without ConfigRecord 'profile' {'json'}")
    try:
        profile = from_json(Profile, text)
        check_profile(profile)
    except ContractError as error:
        name = _claimed_name(text)
        raise ContractError(f"client {name!r} has a bad profile: {error}" if name else f"no profile: {error}") from None
    return profile


def _claimed_name(text: str) -> str:
    """Who a profile that cannot be used is from, by its own word; empty where it does not say."""
    try:
        return one_line(json.loads(text)["client"], MAX_NAME)
    except (ValueError, TypeError, LookupError, RecursionError):
        return ""


def check_profile(profile: Profile) -> None:
    """Raises ContractError, naming the field, on a profile that nothing can be planned with."""
    _check_name("client", profile.client)
    if profile.clock not in (VIRTUAL, MEASURED):
        raise ContractError(f"clock must be {VIRTUAL} or {MEASURED}, not {profile.clock!r}")
    _check_ranges("", profile, _PROFILE)
    for encoding in profile.encodings:
        _check_ranges(f"encoding {one_line(ascii(encoding.encoding), 60)}: ", encoding, _ENCODING)
    for task, count in Counter(task.task for task in profile.tasks).items():
        _check_name("a task's name", task)
        if count > 1:
            raise ContractError(f"tasks name {task!r} {count} times")
    for entry in profile.tasks:
        _check_task(entry)


def _check_task(entry: TaskProfile) -> None:
    prefix = f"task {entry.task!r}: "
    _check_ranges(prefix, entry, _TASK)
    if entry.cost is not None:
        _check_ranges(prefix, entry.cost, _COST)
        if len(entry.cost.blocks) > MAX_BLOCKS:
            raise ContractError(f"{prefix}blocks must be at most {MAX_BLOCKS}, not {len(entry.cost.blocks)}")
        for index, block in enumerate(entry.cost.blocks):
            _check_ranges(f"{prefix}block {index}: ", block, _BLOCK)


def without_namesakes(profiles: Mapping[int, Profile]) -> tuple[dict[int, Profile], list[str]]:
    """`profiles` by node id without those that share their client's name, and a line on each such name.

    None of them stays: nothing tells who of them is meant, and node ids, which are random, must not decide.
    """
    counts = Counter(profile.client for profile in profiles.values())
    notes = [
        f"client {name!r}: {count} nodes call themselves so and none of them takes part; give each its own "
        "partition-id or name"
        for name, count in sorted(counts.items())
        if count > 1
    ]
    return {node: profile for node, profile in profiles.items() if counts[profile.client] == 1}, notes


def _check_ranges(prefix: str, value: object, ranges: Mapping[str, _Range]) -> None:
    for name, allowed in ranges.items():
        found = getattr(value, name)
        if found is not None:
            allowed.check(prefix + name, found)


def _check_name(what: str, name: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
        raise ContractError(f"{what} must be 1 to {MAX_NAME} printable characters, not {one_line(ascii(name), 60)}")
