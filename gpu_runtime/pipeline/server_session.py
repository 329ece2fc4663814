"""One session of the split service: a replica of the server stage, trained micro-batch by micro-batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_runtime.pipeline.crossing import gradients_wanted, unflatten
from gpu_runtime.pipeline.encoding import EncodedTensor, EncodingError, decode, encode
from gpu_runtime.pipeline.halves import ServerHalf
from gpu_runtime.pipeline.session import (
    Activation,
    Gradient,
    ProtocolError,
    SessionEnd,
    SessionSpec,
    SplitError,
    StageSession,
)
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.pipeline.stage_optimizer import StageOptimizer
from gpu_runtime.pipeline.stages import SeededForward, ServerStage, loaded_stage, stage_precision, to_stage
from gpu_runtime.randomness import seed_of
from gpu_runtime.state import StateError, dump_state
from gpu_runtime.work import one_line
from gpu_runtime.workload import Workload


@dataclass(kw_only=True)
class Position:
    """How far a session is: steps and examples done, and of the current step micro-batches, examples and `of` them."""

    steps: int = 0
    examples: int = 0
    index: int = 0
    within: int = 0
    of: tuple[int, int] = (0, 0)

    def check(self, activation: Activation, spec: SessionSpec) -> None:
        """Raises ProtocolError unless `activation` is the micro-batch that comes next."""
        got, want = (activation.step, activation.index), (self.steps, self.index)
        if got != want:
            raise ProtocolError(f"micro-batch {got[1]} of step {got[0]} came where {want[1]} of step {want[0]} is due")
        batch = min(spec.batch_size, spec.num_examples - self.examples)
        count, num_examples = activation.count, activation.num_examples
        if batch <= 0 or activation.batch_examples != batch:
            raise ProtocolError(f"a batch of {activation.batch_examples} examples came where {batch} are due")
        if not 1 <= count <= spec.micro_batches or (self.index and (count, batch) != self.of):
            raise ProtocolError(f"step {self.steps} has {count} micro-batches; {spec.micro_batches} is the most")
        left, after = batch - self.within, count - self.index - 1
        if after < 0 or num_examples < 1 or left - num_examples < after or (after == 0 and num_examples != left):
            raise ProtocolError(f"micro-batch {self.index} of {count} has {num_examples} examples, {left} are left")

    def advance(self, activation: Activation) -> bool:
        """Count a micro-batch that was trained; True after the last one of its step."""
        self.index, self.within = self.index + 1, self.within + activation.num_examples
        self.of = (activation.count, activation.batch_examples)
        if self.index < activation.count:
            return False
        self.steps, self.examples = self.steps + 1, self.examples + self.within
        self.index = self.within = 0
        return True


class ServerSession(StageSession):
    """Trains the blocks after the cut, for one client and task in one round.

    All computing happens in the lanes of `device`. The optimiser's step is taken after the gradient of the step's last
    micro-batch has been returned, while that is on its way; what goes wrong in it is raised by the next call.

    Args:
        spec: of the session, checked.
        workload: model, loss and optimiser.
        arrays: start weights of the whole model, or at least of the server stage.
        device: where to train.
        keep: called once with the trained half.
        ended: called at the end, whatever it is; may be called more than once.

    Raises:
        CutError, StateError, TrainingError: the model cannot be cut there, the arrays do not fit, unknown precision.
    """

    def __init__(
        self,
        *,
        spec: SessionSpec,
        workload: Workload,
        arrays: Mapping[str, np.ndarray],
        device: StageDevice,
        keep: Callable[[ServerHalf], None],
        ended: Callable[[], None],
    ) -> None:
        self._spec, self._workload, self._device = spec, workload, device
        self._keep, self._ended = keep, ended
        self._torch_device = device.device.torch_device
        self._position = Position()
        self._precision, _ = stage_precision(workload, self._torch_device)
        self._forward = SeededForward(self._torch_device, self._seed)
        self._optimizer: StageOptimizer | None = None
        self._stage: ServerStage | None = None
        self._signature: tuple[object, ...] = ()
        self._update_s = 0.0
        self._failure: BaseException | None = None
        self._end: SessionEnd | None = None
        device.join(self)
        try:
            device.run(self, lambda: self._prepare(arrays))
        except BaseException:
            device.leave(self)
            raise

    def train(self, activation: Activation) -> Gradient:
        try:
            done = self._device.run(self, lambda: self._train(activation), progress=self._progress, steady=True)
        except SplitError:
            self.abandon()
            raise
        except Exception as error:  # a user's model may raise anything; the device is told what
            self.abandon()
            where = f"step {activation.step + 1}, micro-batch {activation.index + 1}"
            raise SplitError(f"the server stage cannot train on {where}: {one_line(error)}") from error
        loss, tensors, last = done.result
        server_s, self._update_s = done.seconds + self._update_s, 0.0  # with the step that came before
        if last:
            self._device.post(self, self._update, progress=self._progress)
        return Gradient(step=activation.step, index=activation.index, loss=loss, server_s=server_s, tensors=tensors)

    def finish(self, end: SessionEnd) -> SessionEnd:
        if self._end is not None and end == self._end:
            return self._end
        position = self._position
        mine = SessionEnd(num_steps=position.steps, num_examples=position.examples)
        if position.index or end != mine or not end.num_steps:
            self.abandon()
            inside = f" and {position.index} micro-batches" if position.index else ""
            raise ProtocolError(
                f"the device has trained {end.num_steps} steps of {end.num_examples} examples in all, "
                f"the server stage {mine.num_steps} of {mine.num_examples}{inside}"
            )
        try:
            arrays = self._device.run(self, self._dump).result
            self._keep(ServerHalf(arrays=arrays, num_steps=mine.num_steps, num_examples=mine.num_examples))
        except SplitError:
            self.abandon()
            raise
        except StateError as error:
            self.abandon()
            raise SplitError(str(error)) from error
        self._end = mine
        self.abandon()
        return mine

    def abandon(self) -> None:
        # In the lane, behind what is running: tensors must not go while it computes with them.
        self._device.post(self, self._release)
        self._device.leave(self)
        self._ended()

    @property
    def _progress(self) -> float:
        return self._position.examples / self._spec.num_examples

    # --------------------------------------------------------------------------------- internals, all in the lane

    def _seed(self, purpose: str) -> int:
        key = self._spec.key
        return seed_of(self._spec.seed, key.server_round, key.client, key.task, purpose)

    def _prepare(self, arrays: Mapping[str, np.ndarray]) -> None:
        spec = self._spec
        stage = loaded_stage(
            ServerStage, self._workload, arrays, spec.split_point, self._torch_device, self._seed("model")
        )
        self._optimizer = StageOptimizer(
            stage,
            self._workload,
            learning_rate=spec.learning_rate,
            proximal_mu=spec.proximal_mu,
            precision=self._precision,
        )
        self._stage = stage

    def _train(self, activation: Activation) -> tuple[float, tuple[EncodedTensor | None, ...], bool]:
        stage = self._ready()
        self._position.check(activation, self._spec)
        where = f"step {activation.step + 1}"
        tensors, wanted = self._received(activation, stage)
        targets = unflatten(
            activation.target_structure,
            [_decoded(each, activation.num_examples, "target").to(self._torch_device) for each in activation.targets],
        )
        weight = activation.num_examples / activation.batch_examples
        with torch.enable_grad():
            loss = self._loss(activation, stage, tensors, targets)
            self._precision.backward(loss if weight == 1.0 else loss * weight)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise SplitError(f"loss is not finite at {where}")
        gradients = [tensor.grad if wants else None for tensor, wants in zip(tensors, wanted, strict=True)]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            raise SplitError(f"the gradient of the activation is not finite at {where}")
        rounding = torch.Generator().manual_seed(self._seed(f"rounding {activation.step} {activation.index}"))
        encoded = tuple(
            None if gradient is None else encode(gradient, self._spec.encoding, rounding) for gradient in gradients
        )
        return value, encoded, self._position.advance(activation)

    def _loss(
        self, activation: Activation, stage: ServerStage, tensors: Sequence[torch.Tensor], targets: Any
    ) -> torch.Tensor:
        def forward() -> torch.Tensor:
            return self._loss_of(stage, unflatten(activation.structure, self._own(stage, tensors)), targets)

        purpose = f"server step {activation.step} micro-batch {activation.index}"
        try:
            return self._forward(purpose, forward)
        except RuntimeError as error:
            # A block that works in place without an attribute that says so (`functional.relu_`).
            if stage.works_in_place or "leaf Variable" not in str(error):
                raise
            stage.works_in_place = True
            return self._forward(purpose, forward)

    def _received(self, activation: Activation, stage: ServerStage) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        """The activation's tensors, as leaves of a new graph where a gradient is to come back."""
        wanted = gradients_wanted(activation.structure)
        if len(wanted) != len(activation.tensors) or not wanted:
            raise ProtocolError(f"{len(activation.tensors)} tensors crossed, the structure names {len(wanted)}")
        decoded = [_decoded(each, activation.num_examples, "activation") for each in activation.tensors]
        signature = (activation.structure, *((each.dtype, each.ndim) for each in decoded))
        if self._signature and signature != self._signature:
            raise ProtocolError(f"micro-batch {activation.index} of step {activation.step} is not built as the others")
        self._signature = signature
        tensors = [to_stage(each, stage, self._torch_device) for each in decoded]
        for tensor, wants in zip(tensors, wanted, strict=True):
            if wants and not tensor.is_floating_point():
                raise ProtocolError(f"a gradient is wanted for a tensor of {tensor.dtype}")
            tensor.requires_grad_(wants)
        return tensors, wanted

    def _own(self, stage: ServerStage, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors] if stage.works_in_place else list(tensors)

    def _loss_of(self, stage: ServerStage, inputs: Any, targets: Any) -> torch.Tensor:
        with self._precision.forward():
            return self._workload.loss(stage(inputs), targets)

    def _update(self) -> None:
        started_s = time.perf_counter()
        try:
            self._ready()
            assert self._optimizer is not None
            self._optimizer.step()
        except Exception as error:  # nobody waits for it: the next call tells
            self._failure = error
        self._update_s = time.perf_counter() - started_s

    def _dump(self) -> dict[str, np.ndarray]:
        return dump_state(self._ready())

    def _ready(self) -> ServerStage:
        if self._failure is not None:
            raise SplitError(f"the server stage's optimiser failed: {one_line(self._failure)}")
        if self._stage is None:
            raise SplitError("the session has ended")
        return self._stage

    def _release(self) -> None:
        self._stage, self._optimizer = None, None


def _decoded(encoded: EncodedTensor, num_examples: int, what: str) -> torch.Tensor:
    try:
        tensor = decode(encoded)
    except EncodingError as error:
        raise ProtocolError(f"an {what} cannot be decoded: {error}") from None
    if tensor.ndim == 0 or len(tensor) != num_examples:
        raise ProtocolError(f"a tensor of shape {list(tensor.shape)} came with {num_examples} examples")
    return tensor
