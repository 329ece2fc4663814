"""Local training of one task with its model cut in two: the device stage here, the server stage behind a channel."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from gpu_runtime.contracts import Emulation, SplitAccess, SplitReport, TaskPlan, one_line
from gpu_runtime.losses import LossRecord, LossStatistics
from gpu_runtime.micro_batches import cut
from gpu_runtime.pipeline.crossing import flatten
from gpu_runtime.pipeline.device_clock import DeviceClock
from gpu_runtime.pipeline.encoding import EncodingError, decode, encode
from gpu_runtime.pipeline.makespan import micro_batch_sizes
from gpu_runtime.pipeline.privacy import PrivacyLayer
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionKey,
    SessionSpec,
    SplitError,
)
from gpu_runtime.pipeline.stage_optimizer import StageOptimizer
from gpu_runtime.pipeline.stages import (
    CutError,
    DeviceStage,
    SeededForward,
    laid_out_as,
    loaded_stage,
    stage_precision,
)
from gpu_runtime.randomness import sample_batches, seed_of
from gpu_runtime.state import dump_state
from gpu_runtime.training import Origin, TaskTraining, check_plan
from gpu_runtime.transfer import Batch, batches_on, num_examples_in
from gpu_runtime.work import TrainingError, Work
from gpu_runtime.workload import Workload

NO_EMULATION = Emulation()


class SplitTraining(Work):
    """One task's local training for one round, split. Same batches, same steps as `TaskTraining` of the same origin.

    Of each batch, micro-batches go forward through the device stage back to back, each sent as soon as it is there;
    their gradients come back in the same order and go backward; one optimiser step follows. Each side weights a
    micro-batch by its examples, so that the step is that of the whole batch.

    Whatever makes the split impossible (a SplitError: a service out of reach, full or confused, a link that is cut, a
    model that cannot be cut), `access.fallback` has the task train whole on the device from the start weights, with
    the very result of unsplit training, and a note says why. Without fallback the task fails with that text. It does
    not fall back when it was cut short by a deadline and only its last word to the service is lost: time is up.

    Optimisers have to treat parameters one by one (SGD, Adam, ...), not by a norm over all of them.

    Args:
        workload: model, loss, optimiser and this client's examples.
        plan: with `split_point`, `micro_batches` and `encoding`.
        arrays: start weights, without the task's name in front: of the whole model, or without fallback at least of
            the device stage.
        origin: seed, round and client.
        device: where the device stage trains.
        access: the service, and what it may be told.
        channel: makes the channel of the session.
        attempt: of the plan.
        emulation: a slower device to act out; its link is the channel's business.
        noise_seed: of `activation_noise` (see `PrivacyLayer`).

    Raises:
        TrainingError: no examples held, or a plan that cannot be followed.
    """

    own_lane = True

    def __init__(
        self,
        *,
        workload: Workload,
        plan: TaskPlan,
        arrays: Mapping[str, np.ndarray],
        origin: Origin,
        device: torch.device,
        access: SplitAccess,
        channel: Callable[[], Channel],
        attempt: int = 0,
        emulation: Emulation = NO_EMULATION,
        noise_seed: int | None = None,
    ) -> None:
        self.task = plan.task
        self.num_examples = plan.num_examples
        self.batch_size = workload.batch_size if plan.batch_size is None else plan.batch_size
        self._unsplit_plan = dataclasses.replace(plan, split_point=None, micro_batches=1, encoding="fp32")
        check_plan(self._unsplit_plan, self.batch_size)
        if plan.split_point is None or plan.micro_batches < 1:
            raise TrainingError(f"plan splits at block {plan.split_point} with {plan.micro_batches} micro-batches")
        examples = workload.train_examples()
        if len(examples) == 0:
            raise TrainingError("this client holds no training examples of the task")
        self._workload, self._plan, self._origin, self._device = workload, plan, origin, device
        self._access, self._make_channel = access, channel
        self._start_arrays: Mapping[str, np.ndarray] = arrays
        self._spec = SessionSpec(
            key=SessionKey(
                run=access.run,
                server_round=origin.server_round,
                attempt=attempt,
                client=origin.client,
                task=plan.task,
            ),
            split_point=plan.split_point,
            micro_batches=min(plan.micro_batches, self.batch_size),
            encoding=plan.encoding,
            num_examples=plan.num_examples,
            batch_size=self.batch_size,
            seed=origin.seed,
            learning_rate=plan.learning_rate,
            proximal_mu=plan.proximal_mu,
        )
        indices = sample_batches(len(examples), self.num_examples, self.batch_size, self._seed("examples"))
        self._batches: Iterator[Batch] = batches_on(device, (examples.batch(each) for each in indices))
        self._privacy = PrivacyLayer(access.activation_clip, access.activation_noise, noise_seed)
        self._precision, self._precision_notes = stage_precision(workload, device)
        self._forward = SeededForward(device, self._seed)
        self._clock = DeviceClock(device, emulation.slowdown)
        self._losses = LossRecord(stride=1)
        self._stage: DeviceStage | None = None
        self._optimizer: StageOptimizer | None = None
        self._channel: Channel | None = None
        self._closing = False
        self._agreed = False
        self._whole: TaskTraining | None = None
        self._fallback_note = ""
        self._server_s = self._wait_s = 0.0
        self.arrays: dict[str, np.ndarray] = {}

    @property
    def losses(self) -> LossStatistics:
        return self._losses.statistics() if self._whole is None else self._whole.losses

    @property
    def notes(self) -> tuple[str, ...]:
        if self._whole is None:
            return self._precision_notes
        return (self._fallback_note, *self._whole.notes)

    @property
    def micro_batch(self) -> int | None:
        """As of `TaskTraining`; None while split: the plan has cut the batch, not memory."""
        return None if self._whole is None else self._whole.micro_batch

    @property
    def report(self) -> SplitReport | None:
        """How it was split and what that took; None where it trained whole."""
        if self._whole is not None:
            return None
        spec = self._spec
        report = SplitReport(
            split_point=spec.split_point,
            micro_batches=spec.micro_batches,
            encoding=spec.encoding,
            device_s=self._clock.busy_s,
            server_s=self._server_s,
            wait_s=self._wait_s,
        )
        if self._channel is None:
            return report
        return dataclasses.replace(report, **dataclasses.asdict(self._channel.statistics))

    def step(self) -> None:
        """Advance by one optimiser step of both halves, and after the last one have the service keep its half.

        A step that falls back takes none: the work starts over, whole.

        Raises:
            SplitError: the split has failed and there is no fallback.
            StateError: in the first step, when the arrays do not fit the model.
            TrainingError: the loss is not finite.
        """
        if self._whole is not None:
            self._whole_step(self._whole)
            return
        try:
            self._split_step()
            if self.finished:
                self._agree()
        except SplitError as error:
            if self._closing or not self._access.fallback:
                raise
            self._fall_back(error)

    def finish(self) -> None:
        """Set `arrays` to the trained weights: of the device stage, or of the whole model after a fallback.

        Raises:
            SplitError: the service cannot be told that this is the end.
            TrainingError, StateError: the losses or the weights are not finite.
        """
        if self._whole is not None:
            self._whole.finish()
            self.arrays = self._whole.arrays
            return
        self._agree()
        self._losses.check()
        assert self._stage is not None, "finish before the first step"
        self.arrays = dump_state(self._stage)
        self._release()

    def abandon(self) -> None:
        if self._whole is not None:
            self._whole.abandon()
        self._release()

    def interrupt(self) -> None:
        self._closing = True
        channel = self._channel
        if channel is not None:
            channel.close()

    # --------------------------------------------------------------------------------------------------------- split

    def _split_step(self) -> None:
        channel, stage, optimizer = self._prepared()
        batch = next(self._batches)
        num_examples = num_examples_in(batch)
        sizes = micro_batch_sizes(num_examples, self._spec.micro_batches)
        crossed: list[tuple[torch.Tensor, ...]] = []
        before = 0
        for index, size in enumerate(sizes):
            with self._clock.working():
                part = batch if len(sizes) == 1 else cut(batch, before, before + size, num_examples)
                tensors, activation = self._activation(stage, part, index, len(sizes), size, num_examples)
            channel.send(activation)
            crossed.append(tensors)
            before += size
        loss = 0.0
        crossed.reverse()  # popped from the end, so that each graph goes with its backward pass
        for index, size in enumerate(sizes):
            waiting_s = time.perf_counter()
            gradient = channel.receive()
            self._wait_s += time.perf_counter() - waiting_s
            loss += gradient.loss * size / num_examples
            self._server_s += gradient.server_s
            with self._clock.working():
                self._backward(crossed.pop(), gradient, index)
                if not crossed:
                    optimizer.step()
        self.steps_done += 1
        self.examples_done += num_examples
        self._losses.add(torch.tensor(loss, dtype=torch.double), num_examples)

    def _activation(
        self, stage: DeviceStage, part: Batch, index: int, count: int, size: int, batch_examples: int
    ) -> tuple[tuple[torch.Tensor, ...], Activation]:
        """What crosses the cut for a micro-batch: the tensors, with their graph, and the message."""
        inputs, targets = part

        def forward() -> tuple[str, tuple[torch.Tensor, ...]]:
            with self._precision.forward():
                structure, tensors = flatten(stage(inputs))
            for tensor in tensors:
                if tensor.ndim == 0 or len(tensor) != size:
                    shape = list(tensor.shape)
                    raise RefusedError(f"a tensor of shape {shape} at the cut does not hold {size} examples")
            return structure, self._privacy(tensors)

        with torch.enable_grad():
            purpose = f"step {self.steps_done}" + (f" micro-batch {index}" if index else "")
            structure, tensors = self._forward(purpose, forward)
        target_structure, target_tensors = flatten(targets)
        rounding = torch.Generator().manual_seed(self._seed(f"rounding {self.steps_done} {index}"))
        try:
            activation = Activation(
                step=self.steps_done,
                index=index,
                count=count,
                num_examples=size,
                batch_examples=batch_examples,
                tensors=tuple(encode(tensor, self._spec.encoding, rounding) for tensor in tensors),
                structure=structure,
                # Labels stay as they are: a rounded one would be another.
                targets=tuple(encode(tensor, "raw") for tensor in target_tensors),
                target_structure=target_structure,
            )
        except EncodingError as error:
            raise SplitError(f"the activation of step {self.steps_done + 1} cannot be encoded: {error}") from None
        return tensors, activation

    def _backward(self, tensors: tuple[torch.Tensor, ...], gradient: Gradient, index: int) -> None:
        got = (gradient.step, gradient.index, len(gradient.tensors))
        if got != (self.steps_done, index, len(tensors)):
            raise ProtocolError(f"gradient of micro-batch {got[1]} of step {got[0]} came where {index} is due")
        outputs, gradients = [], []
        for tensor, encoded in zip(tensors, gradient.tensors, strict=True):
            if encoded is None or not tensor.requires_grad:
                continue
            try:
                received = decode(encoded).to(tensor.device, tensor.dtype)
            except EncodingError as error:
                raise ProtocolError(f"a gradient cannot be decoded: {error}") from None
            if received.shape != tensor.shape:
                shapes = f"{list(received.shape)} for an activation of shape {list(tensor.shape)}"
                raise ProtocolError(f"a gradient came with shape {shapes}")
            outputs.append(tensor)
            gradients.append(laid_out_as(tensor, received))
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def _prepared(self) -> tuple[Channel, DeviceStage, StageOptimizer]:
        if self._stage is None or self._optimizer is None or self._channel is None:
            try:
                stage = loaded_stage(
                    DeviceStage,
                    self._workload,
                    self._start_arrays,
                    self._spec.split_point,
                    self._device,
                    self._seed("model"),
                )
            except CutError as error:
                raise RefusedError(str(error)) from None
            self._optimizer = StageOptimizer(
                stage,
                self._workload,
                learning_rate=self._plan.learning_rate,
                proximal_mu=self._plan.proximal_mu,
                precision=self._precision,
            )
            if not self._access.fallback:
                self._start_arrays = {}
            self._channel = self._make_channel()
            if self._closing:
                self._channel.close()  # interrupted before there was one
            self._channel.open(self._spec)
            self._stage = stage
        return self._channel, self._stage, self._optimizer

    def _agree(self) -> None:
        """Have the service keep its half, once."""
        if self._agreed:
            return
        assert self._channel is not None
        self._channel.finish(SessionEnd(num_steps=self.steps_done, num_examples=self.examples_done))
        self._agreed = True

    # ------------------------------------------------------------------------------------------------------ fallback

    def _fall_back(self, error: SplitError) -> None:
        """Start over with the whole model, as if there had been no split."""
        arrays = self._start_arrays
        self._release()
        self._fallback_note = one_line(f"trained whole: {error}")
        self._whole = TaskTraining(
            workload=self._workload,
            plan=self._unsplit_plan,
            arrays=arrays,
            origin=self._origin,
            device=self._device,
        )
        self.steps_done = self.examples_done = 0

    def _whole_step(self, whole: TaskTraining) -> None:
        with self._clock.working():
            whole.step()
        self.steps_done, self.examples_done = whole.steps_done, whole.examples_done

    # ------------------------------------------------------------------------------------------------------ internals

    def _seed(self, purpose: str) -> int:
        origin = self._origin
        return seed_of(origin.seed, origin.server_round, origin.client, self.task, purpose)

    def _release(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._stage, self._optimizer = None, None
        self._batches = iter(())
        self._start_arrays = {}
