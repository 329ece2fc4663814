"""A model cut in two: device stage and server stage, why a model cannot be cut, and what both do the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from gpu_runtime.pipeline.halves import PREFIX, block_of
from gpu_runtime.precision import Precision
from gpu_runtime.randomness import generator_state, seeded_draws
from gpu_runtime.state import StateError, load_state
from gpu_runtime.training import on_device
from gpu_runtime.workload import Workload

T = TypeVar("T")


class CutError(ValueError):
    """A model that cannot be cut, or not there; the text says why."""


class Stage(nn.Module):
    """Some blocks of a model, in order, under their names there: its state has the whole model's keys."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OrderedDict(blocks))

    def forward(self, value: Any) -> Any:
        return self.blocks(value)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its first floating-point parameter; None without one."""
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), None)


S = TypeVar("S", bound=Stage)


class DeviceStage(Stage):
    """The first `split_point` blocks of `model`, which share its memory."""

    def __init__(self, model: nn.Module, split_point: int) -> None:
        super().__init__(dict(list(_blocks(model).named_children())[:split_point]))


class ServerStage(Stage):
    """The blocks of `model` from `split_point` on, which share its memory.

    What arrives is a leaf of the graph and lies in memory that belongs to the channel: where a block may work in
    place, the stage works on a copy.
    """

    def __init__(self, model: nn.Module, split_point: int) -> None:
        super().__init__(dict(list(_blocks(model).named_children())[split_point:]))
        self.works_in_place = any(getattr(module, "inplace", False) for module in self.modules())


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the blocks of a model that can be cut, in order."""
    return tuple(name for name, _ in _blocks(model).named_children())


def unsplittable(model: nn.Module) -> str:
    """Why `model`, in training mode, cannot be cut; empty where it can, at every boundary between blocks."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential):
        return "the model has no attribute 'blocks' that is an nn.Sequential"
    names = [name for name, _ in blocks.named_children()]
    if len(names) < 2 or len(names) != len(blocks):
        return "the model has fewer than two different blocks"
    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    outside = [key for key in (*tensors, *model.state_dict()) if block_of(key) not in names]
    if outside:
        return f"{outside[0]!r} lies outside the blocks"
    owners: dict[int, str] = {}
    for key, tensor in tensors.items():
        owner = owners.setdefault(id(tensor), key)
        if block_of(owner) != block_of(key):
            return f"blocks {block_of(owner)!r} and {block_of(key)!r} share a tensor: {owner!r} and {key!r}"
    for key, module in blocks.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            return (
                f"{PREFIX + key!r} normalises by batch statistics: micro-batches and halves would change the result; "
                "use GroupNorm or frozen statistics"
            )
    return ""


def changing_state(model: nn.Module, inputs: Any) -> str:
    """Why `model` must not train by micro-batches: forward passes change its buffers; empty where they do not.

    Running statistics, counters and the iterations of spectral norm would advance once a micro-batch instead of once a
    step. What is made in the first pass and then kept (masks, tables) is no harm.

    Args:
        model: on the CPU; it is put into training mode, and its buffers may change.
        inputs: of a batch.
    """
    model.train()
    if not any(module._buffers for module in model.modules()):  # some are there from the first pass on only
        return ""
    with torch.no_grad(), seeded_draws(0, torch.device("cpu")):
        model(inputs)
        before = {key: (buffer, buffer._version, buffer.clone()) for key, buffer in model.named_buffers()}
        model(inputs)
    for key, buffer in model.named_buffers():
        was, version, value = before.get(key, (None, 0, buffer))
        # Written to counts, even if nothing came of it: iterations that have converged go on once weights move.
        if was is None or (buffer is was and buffer._version != version) or not torch.equal(value, buffer):
            return f"{key!r} changes with every forward pass: with micro-batches it would change more often"
    return ""


def loaded_stage(
    kind: Callable[[nn.Module, int], S],
    workload: Workload,
    arrays: Mapping[str, np.ndarray],
    split_point: int,
    device: torch.device,
    seed: int,
) -> S:
    """A new stage of the workload's model in training mode, on `device`, with its part of `arrays` as its state.

    Args:
        kind: `DeviceStage` or `ServerStage`.
        workload: whose model is cut.
        arrays: the whole model's state, or at least the stage's.
        split_point: blocks that stay on the device.
        device: where to.
        seed: of what a model draws when it is built.

    Raises:
        CutError: the model cannot be cut there.
        StateError: the arrays do not fit.
    """
    with seeded_draws(seed, torch.device("cpu")):
        model = workload.build_model()
    model.train()
    reason = unsplittable(model)
    if reason:
        raise CutError(f"the model cannot be cut: {reason}")
    num_blocks = len(block_names(model))
    if not 0 < split_point < num_blocks:
        raise CutError(f"a model of {num_blocks} blocks cannot be cut at {split_point}")
    unknown = sorted(set(arrays) - set(model.state_dict()))
    if unknown:
        raise StateError(f"arrays hold {unknown[0]!r}, which the model does not have")
    # The layout of convolutions is a property of the whole model, as in unsplit training.
    stage = kind(on_device(model, workload, torch.device("cpu")), split_point)
    load_state(stage, {key: arrays[key] for key in stage.state_dict() if key in arrays})
    return stage.to(device)


class SeededForward:
    """Runs forward passes; from the first one on that draws random numbers, each from generators of its own.

    As in unsplit training (`TaskTraining`): whether a stage draws (dropout) is seen in its first forward pass.

    Args:
        device: where the stage is.
        seed: a seed from the purpose of a pass.
    """

    def __init__(self, device: torch.device, seed: Callable[[str], int]) -> None:
        self._device, self._seed = device, seed
        self._draws: bool | None = None

    def __call__(self, purpose: str, forward: Callable[[], T]) -> T:
        if self._draws is False:
            return forward()
        with seeded_draws(self._seed(purpose), self._device):
            before = generator_state(self._device)
            result = forward()
            if self._draws is None:
                after = generator_state(self._device)
                self._draws = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
            return result


def stage_precision(workload: Workload, device: torch.device) -> tuple[Precision, tuple[str, ...]]:
    """Mixed precision of a stage, and what there is to say about it.

    float16 has to scale its losses and to skip steps that overflow, in both halves at once: such a task trains in full
    precision when it is split.

    Raises:
        TrainingError: an unknown precision.
    """
    precision = Precision(workload, device)
    if not precision.scales_losses:
        return precision, ()
    return Precision(_FullPrecision(), device), ("split training is in full precision instead of float16",)  # type: ignore[arg-type]


def to_stage(tensor: torch.Tensor, stage: Stage, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; where it is floating-point, with the stage's own precision."""
    dtype = stage.dtype if tensor.is_floating_point() and stage.dtype is not None else tensor.dtype
    return tensor.to(device, dtype)


def laid_out_as(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the memory format of `like`: a backward pass over two formats takes several times as long."""
    if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


class _FullPrecision:
    autocast_dtype = None


def _blocks(model: nn.Module) -> nn.Sequential:
    blocks = model.blocks
    assert isinstance(blocks, nn.Sequential), "ask `unsplittable` first"
    return blocks
