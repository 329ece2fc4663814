"""What crosses the cut, as a list of tensors and a JSON text that says how they nest: flatten and unflatten.

A node of the text is an object of one key: {"tensor": flags}, {"again": i}, {"tuple": [...]}, {"list": [...]},
{"dict": {...}} or {"value": x} with a plain JSON value. Tensors are counted in the order of the text; "again" is the
i-th of them (from 0) in another place. Flags: "g" needs a gradient, "c" is laid out channels-last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpu_runtime.pipeline.session import ProtocolError, SplitError

MAX_DEPTH = 16
MAX_TENSORS = 256
MAX_TEXT = 16_384
FLAGS = ("", "g", "c", "gc")


def flatten(value: Any) -> tuple[str, tuple[torch.Tensor, ...]]:
    """How the tensors in `value` nest, and the tensors.

    Args:
        value: a tensor, or tuples, lists and dicts (by text) of tensors and plain values, nested.

    Raises:
        SplitError: something else in it, or more of it than `unflatten` takes.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_node_of(value, tensors, 0), separators=(",", ":"), allow_nan=False)
    if len(tensors) > MAX_TENSORS or len(text) > MAX_TEXT:
        raise SplitError(f"{len(tensors)} tensors cross the cut, nested in {len(text)} characters: too many")
    return text, tuple(tensors)


def unflatten(structure: str, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that `flatten` has taken apart, with `tensors` in it, those laid out channels-last so again.

    Raises:
        ProtocolError: `structure` is not of the known form or does not go with `tensors`.
    """
    left = iter(tensors)

    def place(flags: str) -> torch.Tensor:
        tensor = next(left, None)
        if tensor is None:
            raise ProtocolError(f"the structure of a micro-batch names more than its {len(tensors)} tensors")
        if "c" in flags and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    value = _value_of(_parsed(structure), place, [], 0)
    if next(left, None) is not None:
        raise ProtocolError(f"the structure of a micro-batch names fewer than its {len(tensors)} tensors")
    return value


def gradients_wanted(structure: str) -> tuple[bool, ...]:
    """For each tensor of `structure`, whether its gradient is to come back. Raises as `unflatten`."""
    wanted: list[bool] = []
    _value_of(_parsed(structure), lambda flags: wanted.append("g" in flags), [], 0)
    return tuple(wanted)


# ---------------------------------------------------------------------------------------------------------- internals


def _node_of(value: Any, tensors: list[torch.Tensor], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise SplitError(f"what crosses the cut nests deeper than {MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        for index, before in enumerate(tensors):
            if before is value:
                return {"again": index}
        tensors.append(value)
        channels_last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        laid_out = channels_last and not value.is_contiguous()
        return {"tensor": ("g" if value.requires_grad else "") + ("c" if laid_out else "")}
    for kind in (tuple, list):
        if type(value) is kind:
            return {kind.__name__: [_node_of(item, tensors, depth + 1) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _node_of(item, tensors, depth + 1) for key, item in value.items()}}
    if _plain(value):
        return {"value": value}
    raise SplitError(f"a {type(value).__name__} cannot cross the cut")


def _plain(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _parsed(structure: str) -> Any:
    if len(structure) > MAX_TEXT:
        raise ProtocolError(f"the structure of a micro-batch has {len(structure)} characters, more than {MAX_TEXT}")
    try:
        return json.loads(structure)
    except (ValueError, RecursionError):
        raise ProtocolError("the structure of a micro-batch is not JSON") from None


def _value_of(node: Any, place: Callable[[str], Any], placed: list[Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"the structure of a micro-batch nests deeper than {MAX_DEPTH}")
    if type(node) is not dict or len(node) != 1:
        raise ProtocolError("a node in the structure of a micro-batch is not an object of one key")
    ((kind, inner),) = node.items()
    if kind == "tensor" and type(inner) is str and inner in FLAGS:
        placed.append(place(inner))
        return placed[-1]
    if kind == "again" and type(inner) is int and 0 <= inner < len(placed):
        return placed[inner]
    if kind in ("tuple", "list") and type(inner) is list:
        items: Iterator[Any] = (_value_of(item, place, placed, depth + 1) for item in inner)
        return tuple(items) if kind == "tuple" else list(items)
    if kind == "dict" and type(inner) is dict:
        return {key: _value_of(item, place, placed, depth + 1) for key, item in inner.items()}
    if kind == "value" and _plain(inner):
        return inner
    raise ProtocolError(f"a node in the structure of a micro-batch is of no known kind: {kind[:40]!r}")
