"""Model state as numpy arrays: checked on the way in, contiguous on the way out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn


class StateError(ValueError):
    """Arrays that do not fit a model; the text names the first faulty ones."""


def load_state(model: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Copy `arrays` into the model's parameters and buffers.

    Raises:
        StateError: a name missing or unknown, or an array of the wrong shape or dtype.
    """
    state = model.state_dict()
    missing, unknown = sorted(set(state) - set(arrays)), sorted(set(arrays) - set(state))
    if missing:
        raise StateError(f"arrays lack {_some(missing)}")
    if unknown:
        raise StateError(f"arrays hold {_some(unknown)}, which the model does not have")
    with torch.no_grad():
        for name, target in state.items():
            array = np.asarray(arrays[name])
            if array.shape != tuple(target.shape):
                raise StateError(f"array {name!r} has shape {list(array.shape)}, the model wants {list(target.shape)}")
            expected = numpy_dtype(target.dtype)
            if array.dtype != expected:
                raise StateError(f"array {name!r} has dtype {array.dtype}, the model wants {expected}")
            # An own copy: arrays off the wire may be read-only, and torch must not write into the caller's memory.
            target.copy_(torch.from_numpy(np.array(array, order="C", copy=True)))


def dump_state(model: nn.Module) -> dict[str, np.ndarray]:
    """The model's state as C-contiguous arrays. On the CPU they may share the model's memory: drop the model.

    Raises:
        StateError: a floating-point array that is not finite.
    """
    arrays = {}
    for name, value in model.state_dict().items():
        host = value.detach().to("cpu").contiguous()
        if host.is_floating_point() and not bool(torch.isfinite(host).all()):
            raise StateError(f"weights {name!r} are not finite after training")
        arrays[name] = host.numpy()
    return arrays


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype of a torch dtype. Raises TypeError where numpy has none (bfloat16)."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
