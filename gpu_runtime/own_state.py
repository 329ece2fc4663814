"""Notices state that models and optimisers keep in Python attributes: neither processes nor graphs carry it on."""

from __future__ import annotations

import random
import types
from collections import deque
from typing import Any

import torch
from torch import nn

# Attributes that torch itself changes, or that are moved on their own.
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "_zero_grad_profile_name", "_step_count", "_opt_called"}
_OF_MODULES = set(nn.Module().__dict__)
_NUMBERS_AND_WORDS: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH: tuple[type, ...] = (torch.dtype, torch.device, torch.Size)
_CODE: tuple[type, ...] = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_CONSTANT = (*_NUMBERS_AND_WORDS, *_OF_TORCH, *_CODE)
MAX_DEPTH = 4
MAX_ITEMS = 256


class HiddenStateError(RuntimeError):
    """A model or optimiser keeps state where it is not looked for; the text says how."""


class OwnState:
    """What the attributes of a model and its optimiser were when it was made, or at the last `check`.

    Compared are numbers and words, tensors that are no parameters or buffers, random generators, and containers and
    objects of these. What hides deeper, or in closures, is not seen: a workload that has it says `movable = False`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._owners: list[tuple[Any, set[str]]] = [(module, _OF_MODULES) for module in model.modules()]
        self._owners.append((optimizer, _OF_OPTIMIZERS))
        self._optimizer = optimizer
        self._moving = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._ids = self._values()
        self._deep = self._fingerprints()

    def check(self) -> None:
        """Raises HiddenStateError if any of it has changed since, or could change unseen."""
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if getattr(self._optimizer, hooks, None):
                raise HiddenStateError("its optimiser has hooks, which may keep state")
        if "step" in vars(self._optimizer):
            raise HiddenStateError("something wraps its optimiser's steps, as schedulers do")
        values = self._values()
        same = len(values) == len(self._ids) and all(a is b for a, b in zip(values, self._ids, strict=True))
        if not same or self._fingerprints() != self._deep:
            raise HiddenStateError("its model or optimiser keeps state in attributes of its own")

    def _values(self) -> list[Any]:
        return [
            value
            for owner, known in self._owners
            for name, value in vars(owner).items()
            if name not in known and not name.startswith("_optimizer_")
        ]

    def _fingerprints(self) -> list[Any]:
        """Of attributes that can change without being replaced."""
        return [self._fingerprint(value, MAX_DEPTH) for value in self._values() if not _is_constant(value)]

    def _fingerprint(self, value: Any, depth: int) -> Any:
        """Equal for equal state, as far as one can see."""
        if isinstance(value, _CONSTANT):
            return value
        if isinstance(value, torch.Tensor):
            return id(value) if id(value) in self._moving else (id(value), value._version)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        if hasattr(value, "bit_generator"):
            return repr(value.bit_generator.state)
        if depth == 0 or isinstance(value, nn.Module):
            return id(value)
        if isinstance(value, list | tuple | set | frozenset | deque):
            items = zip(value, range(MAX_ITEMS), strict=False)
            return len(value), tuple(self._fingerprint(item, depth - 1) for item, _ in items)
        if isinstance(value, dict):
            pairs = zip(value.items(), range(MAX_ITEMS), strict=False)
            return len(value), tuple((id(key), self._fingerprint(item, depth - 1)) for (key, item), _ in pairs)
        if hasattr(value, "__dict__"):
            known = ((name, self._fingerprint(item, depth - 1)) for name, item in vars(value).items())
            return id(value), tuple(known)
        return id(value)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(item) for item in value)
    return isinstance(value, _CONSTANT)
