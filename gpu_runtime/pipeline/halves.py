"""Which keys of a model's state belong to which half of a cut, and whole models out of halves. Names only: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

PREFIX = "blocks."

T = TypeVar("T")


class HalvesError(ValueError):
    """Halves that do not make a whole model; the text names the first faulty keys."""


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """What a split service has trained for one client and task: arrays by the whole model's keys, and how far."""

    arrays: Mapping[str, np.ndarray]
    num_steps: int
    num_examples: int


def device_keys(keys: Iterable[str], block_names: Sequence[str], split_point: int) -> tuple[str, ...]:
    """Those of the model's state `keys` that lie in its first `split_point` blocks, in their order.

    Args:
        keys: as in the model's `state_dict`, e.g. "blocks.conv1.0.weight".
        block_names: of all blocks, in order.
        split_point: blocks that stay on the device.

    Raises:
        HalvesError: a key that is in no block, or a cut that leaves one side without a block.
    """
    if not 0 < split_point < len(block_names):
        raise HalvesError(f"a model of {len(block_names)} blocks cannot be cut at {split_point}")
    return _in_blocks(keys, block_names, frozenset(block_names[:split_point]))


def server_keys(keys: Iterable[str], block_names: Sequence[str], split_point: int) -> tuple[str, ...]:
    """The other keys: those of the blocks from `split_point` on. Raises as `device_keys`."""
    keys = tuple(keys)
    mine = frozenset(device_keys(keys, block_names, split_point))
    return tuple(key for key in keys if key not in mine)


def join_halves(device: Mapping[str, T], server: Mapping[str, T], keys: Sequence[str]) -> dict[str, T]:
    """The whole model's state, in the order of `keys`.

    Raises:
        HalvesError: a key in both halves, in neither, or in one of them and not in `keys`.
    """
    both = sorted(set(device) & set(server))
    if both:
        raise HalvesError(f"both halves hold {_some(both)}")
    joined = {**device, **server}
    missing, unknown = sorted(set(keys) - set(joined)), sorted(set(joined) - set(keys))
    if missing:
        raise HalvesError(f"the halves lack {_some(missing)}")
    if unknown:
        raise HalvesError(f"the halves hold {_some(unknown)}, which the model does not have")
    return {key: joined[key] for key in keys}


def block_of(key: str) -> str:
    """Name of the block that a key of a model's state lies in; empty where it lies in none."""
    return key.removeprefix(PREFIX).partition(".")[0] if key.startswith(PREFIX) else ""


def _in_blocks(keys: Iterable[str], block_names: Sequence[str], wanted: frozenset[str]) -> tuple[str, ...]:
    keys, known = tuple(keys), frozenset(block_names)
    outside = [key for key in keys if block_of(key) not in known]
    if outside:
        raise HalvesError(f"{_some(outside)} lies in none of the blocks {', '.join(block_names)}")
    return tuple(key for key in keys if block_of(key) in wanted)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
