"""A training that several processes take turns at: its tensors lie in shared memory, the rest crosses as numbers.

Each process builds the same model and optimiser and lets their tensors point into the same memory. Whoever takes the
next steps first resumes from the numbers (`Stage`) that the last one left. Nothing is copied when it changes hands.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_runtime.own_state import HiddenStateError, OwnState
from gpu_runtime.training import Progress, TaskTraining
from gpu_runtime.workers.shared_memory import Slot, slots_for, tensors_at

Simple = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class OptimizerLayout:
    """What an optimiser keeps, but for the values of its tensors.

    Tensor i belongs to parameter `parameters[i]` (counted over all groups) under the name `names[i]`, at `slots[i]`.
    `values` are what else it keeps, as (parameter, name, value); `groups` the simple settings of each group.
    """

    parameters: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    slots: tuple[Slot, ...] = ()
    values: tuple[tuple[int, str, Simple], ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """All that the next process needs to go on. `stuck` says why it cannot, empty where it can.

    `optimizer` None: as last told. It is long, and after the first steps it seldom changes.
    """

    progress: Progress
    optimizer: OptimizerLayout | None = None
    stuck: str = ""


class NotSharedError(RuntimeError):
    """State that cannot lie in shared memory; the text says what."""


def _stream_of(device: torch.device) -> Any:
    """None where there is no CUDA: `torch.cuda.stream(None)` does nothing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_plain(stage: Stage) -> dict[str, Any]:
    """A stage as JSON holds it."""
    return asdict(stage)


def from_plain(body: Mapping[str, Any]) -> Stage:
    """Inverse of `to_plain`, also after JSON has made lists of its tuples."""
    layout = body["optimizer"]
    progress = {**body["progress"]}
    progress["losses"], progress["notes"] = tuple(progress["losses"]), tuple(progress["notes"])
    if layout is not None:
        slots = (
            Slot(offset=each["offset"], dtype=each["dtype"], shape=tuple(each["shape"]), stride=tuple(each["stride"]))
            for each in layout["slots"]
        )
        layout = OptimizerLayout(
            parameters=tuple(layout["parameters"]),
            names=tuple(layout["names"]),
            slots=tuple(slots),
            values=tuple((index, name, value) for index, name, value in layout["values"]),
            groups=tuple(layout["groups"]),
        )
    return Stage(progress=Progress(**progress), optimizer=layout, stuck=body["stuck"])


class OwnTraining:
    """A training that stays in this process, with the interface of one that does not.

    Args:
        training: not yet begun.
        device: of the training. On CUDA each order ends with the device's work, so that its time is its own.
        synchronize: waits for the device.
    """

    def __init__(
        self,
        training: TaskTraining,
        device: torch.device,
        synchronize: Callable[[torch.device], None] = torch.cuda.synchronize,
    ) -> None:
        self.training, self._device, self._synchronize = training, device, synchronize
        # Not the default stream, from which no graph can be captured.
        self._stream = _stream_of(device)

    def advance(self, num_steps: int, stage: Stage | None) -> Stage:
        """Take steps; `stage` is what the training was told before its first."""
        self._begin(stage)
        with torch.cuda.stream(self._stream):
            self.training.advance(num_steps, lambda: False)
        if self._device.type == "cuda":
            self._synchronize(self._device)
        return Stage(progress=self.training.progress)

    def finish(self, stage: Stage | None) -> dict[str, np.ndarray]:
        """The trained weights. Raises as `TaskTraining.finish` does."""
        self._begin(stage)
        with torch.cuda.stream(self._stream):
            self.training.finish()
        return self.training.arrays

    def close(self) -> None:
        self.training.abandon()

    def _begin(self, stage: Stage | None) -> None:
        if stage is not None:
            assert stage.progress.steps_done == 0, "this training has taken steps elsewhere"
            self.training.resume(stage.progress)


class SharedTraining:
    """This process's copy of a training.

    Args:
        training: not yet begun; on the CPU.
        model_memory, optimizer_memory: descriptors of the shared memory, both closed by `close`.
    """

    def __init__(self, training: TaskTraining, model_memory: int, optimizer_memory: int) -> None:
        self.training = training
        self._descriptors = [model_memory, optimizer_memory]
        self._model_memory, self._optimizer_memory = model_memory, optimizer_memory
        self._layout = OptimizerLayout()
        self._told: OptimizerLayout | None = None
        self._shared: dict[tuple[int, str], torch.Tensor] = {}
        self._model_shared: list[torch.Tensor] = []
        self._attributes: OwnState | None = None
        self._stuck = ""

    def advance(self, num_steps: int, stage: Stage | None) -> Stage:
        """Take steps, from `stage` if another process took the last ones (None: this one did).

        Returns:
            How far it has come; the optimiser's layout only if it differs from what `stage` or the last answer said.
        """
        self._attach(stage)
        self.training.advance(num_steps, lambda: False)
        return self._leave()

    def finish(self, stage: Stage | None) -> dict[str, np.ndarray]:
        """The trained weights. Raises as `TaskTraining.finish` does."""
        self._attach(stage)
        self.training.finish()
        # Copies: shared memory may be written to by others.
        return {name: np.array(value) for name, value in self.training.arrays.items()}

    def close(self) -> None:
        self.training.abandon()
        self._shared.clear()
        self._model_shared.clear()
        self._attributes = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    # ------------------------------------------------------------------------------------------------------ internals

    def _attach(self, stage: Stage | None) -> None:
        begun = stage is not None and stage.progress.steps_done > 0
        model, optimizer = self.training.tensors(lambda model: self._share(model, copy=not begun))
        if self._attributes is None:
            self._attributes = OwnState(model, optimizer)
        if stage is None or not begun:
            return
        self.training.resume(stage.progress)
        if stage.optimizer is not None:
            self._take_over(optimizer, stage.optimizer)

    def _share(self, model: nn.Module, copy: bool) -> None:
        """Let parameters and buffers point into shared memory; `copy` their values there, or take what lies there."""
        own = _tensors_of(model)
        if len({tensor.untyped_storage().data_ptr() for tensor in own if tensor.numel()}) < sum(
            tensor.numel() > 0 for tensor in own
        ):
            self._stuck = "some of its parameters or buffers lie in one memory"
            return
        self._model_shared = list(tensors_at(self._model_memory, slots_for(own)))
        with torch.no_grad():
            for tensor, shared in zip(own, self._model_shared, strict=True):
                if copy:
                    shared.copy_(tensor)
                tensor.data = shared

    def _leave(self) -> Stage:
        """Make sure that all there is lies in shared memory, and say how far the training has come."""
        model, optimizer = self.training.tensors(_nothing)
        try:
            if not self._stuck:
                self._publish_model(model)
                assert self._attributes is not None
                self._attributes.check()
                self._publish(optimizer)
        except (NotSharedError, HiddenStateError) as error:
            # For good: what this process holds is now the only whole copy.
            self._stuck = str(error)
        if self._stuck:
            return Stage(progress=self.training.progress, stuck=self._stuck)
        told, self._told = self._told, self._layout
        return Stage(progress=self.training.progress, optimizer=None if self._layout is told else self._layout)

    @torch.no_grad()
    def _publish_model(self, model: nn.Module) -> None:
        """Steps may have put other tensors in the place of parameters and buffers."""
        own = _tensors_of(model)
        if len(own) != len(self._model_shared) or any(
            (tensor.shape, tensor.stride(), tensor.dtype) != (shared.shape, shared.stride(), shared.dtype)
            for tensor, shared in zip(own, self._model_shared, strict=True)
        ):
            raise NotSharedError("its parameters or buffers have changed in number, shape, layout or type")
        for tensor, shared in zip(own, self._model_shared, strict=True):
            if tensor.data_ptr() != shared.data_ptr():
                shared.copy_(tensor)
                tensor.data = shared

    def _publish(self, optimizer: torch.optim.Optimizer) -> None:
        order = _parameters(optimizer)
        tensors: dict[tuple[int, str], torch.Tensor] = {}
        values: list[tuple[int, str, Simple]] = []
        if len(optimizer.state) > sum(parameter in optimizer.state for parameter in order):
            raise NotSharedError("its optimiser keeps state that belongs to no parameter")
        for index, parameter in enumerate(order):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    tensors[index, str(name)] = value
                elif isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value)):
                    values.append((index, str(name), value))
                else:
                    raise NotSharedError(f"its optimiser keeps a {type(value).__name__} named {name!r}")
        if not _fit(tensors, self._shared):
            self._lay_out(tensors)
        for key, tensor in tensors.items():
            shared = self._shared[key]
            if tensor is not shared and tensor.data_ptr() != shared.data_ptr():
                shared.copy_(tensor)
                optimizer.state[order[key[0]]][key[1]] = shared
        groups = tuple(_settings(group) for group in optimizer.param_groups)
        if (tuple(values), groups) != (self._layout.values, self._layout.groups):
            self._layout = replace(self._layout, values=tuple(values), groups=groups)

    def _lay_out(self, tensors: Mapping[tuple[int, str], torch.Tensor]) -> None:
        """New places, behind all old ones: others may still look there."""
        slots = slots_for(list(tensors.values()), start=os.fstat(self._optimizer_memory).st_size)
        self._layout = OptimizerLayout(
            parameters=tuple(index for index, _ in tensors), names=tuple(name for _, name in tensors), slots=slots
        )
        self._shared = dict(zip(tensors, tensors_at(self._optimizer_memory, slots), strict=True))

    def _take_over(self, optimizer: torch.optim.Optimizer, layout: OptimizerLayout) -> None:
        order = _parameters(optimizer)
        self._told = layout
        if layout.slots != self._layout.slots or layout.names != self._layout.names:
            keys = zip(layout.parameters, layout.names, strict=True)
            self._shared = dict(zip(keys, tensors_at(self._optimizer_memory, layout.slots), strict=True))
            optimizer.state.clear()
            for (index, name), tensor in self._shared.items():
                optimizer.state[order[index]][name] = tensor
        self._layout = layout
        for index, name, value in layout.values:
            optimizer.state[order[index]][name] = value
        for group, settings in zip(optimizer.param_groups, layout.groups, strict=True):
            for key, value in settings.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fit(tensors: Mapping[Any, torch.Tensor], shared: Mapping[Any, torch.Tensor]) -> bool:
    return tensors.keys() == shared.keys() and all(
        tensor is shared[key] or (tensor.shape == shared[key].shape and tensor.dtype == shared[key].dtype)
        for key, tensor in tensors.items()
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter group is plain numbers and words. Raises NotSharedError on tensors."""
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            raise NotSharedError(f"its optimiser keeps its setting {key!r} in a tensor")
        if isinstance(value, float) and not math.isfinite(value):
            raise NotSharedError(f"its optimiser has the setting {key} = {value}")
        if isinstance(value, bool | int | float | str | None):
            settings[key] = value
        elif isinstance(value, tuple | list) and all(
            isinstance(item, bool | int | str | None) or (isinstance(item, float) and math.isfinite(item))
            for item in value
        ):
            settings[key] = list(value)
        else:
            raise NotSharedError(f"its optimiser has a setting {key!r} of type {type(value).__name__}")
    return settings


_nothing: Callable[[nn.Module], None] = lambda model: None  # noqa: E731
