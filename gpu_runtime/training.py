"""Local training of one task as a pure function of (arrays, plan, seed, round, client, task), one step at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gpu_runtime.contracts import TaskPlan
from gpu_runtime.graphs import Capture, CudaCapture, GraphedStep
from gpu_runtime.losses import LossRecord, LossStatistics
from gpu_runtime.micro_batches import Buffers, MicroBatches
from gpu_runtime.precision import Precision
from gpu_runtime.randomness import generator_state, sample_batches, seed_of, seeded_draws
from gpu_runtime.state import dump_state, load_state
from gpu_runtime.transfer import Batch, batches_on, num_examples_in
from gpu_runtime.work import TrainingError, Work
from gpu_runtime.workload import Workload

# On CUDA, reading the loss waits for the device: look for NaN only every so many steps, and at the end.
LOSS_CHECK_STRIDE = 16


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Whose training it is: with the plan and the arrays, all that the result depends on."""

    client: str
    server_round: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training has come, but for its tensors: plain numbers that may cross between processes.

    `losses` are those of `LossRecord.numbers`; `draws_random_numbers` is None before the first step.
    """

    steps_done: int = 0
    examples_done: int = 0
    losses: tuple[float, ...] = ()
    micro_batch: int | None = None
    notes: tuple[str, ...] = ()
    draws_random_numbers: bool | None = None


class TaskTraining(Work):
    """One task's local training for one round.

    The model is built and loaded in the first step, so that this happens in the task's lane and not before its turn.
    Modules that draw random numbers (dropout) are noticed in the first step; from then on each forward pass draws from
    generators seeded for that step and held by one thread at a time, so that lanes do not disturb each other.

    A step that runs out of memory is repeated in micro-batches (`gpu_runtime.micro_batches`). Models see each example
    once all the same; random draws and buffers start where those of the first attempt did.

    Args:
        workload: model, loss, optimiser and this client's examples.
        plan: load, and overrides of batch size and learning rate.
        arrays: start weights, without the task's name in front.
        origin: seed, round and client.
        device: where to train.
        capture: makes graphs of steps (`gpu_runtime.graphs`); by default CUDA graphs on CUDA, none elsewhere.

    Raises:
        TrainingError: no examples held, a plan that cannot be followed, or an unknown precision.
    """

    can_move = True

    def __init__(
        self,
        *,
        workload: Workload,
        plan: TaskPlan,
        arrays: Mapping[str, np.ndarray],
        origin: Origin,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.task = plan.task
        self.num_examples = plan.num_examples
        self.batch_size = workload.batch_size if plan.batch_size is None else plan.batch_size
        check_plan(plan, self.batch_size)
        examples = workload.train_examples()
        if len(examples) == 0:
            raise TrainingError("this client holds no training examples of the task")
        self._workload, self._plan, self._origin, self._device = workload, plan, origin, device
        self._start_arrays: Mapping[str, np.ndarray] = arrays
        self._indices = sample_batches(len(examples), self.num_examples, self.batch_size, self._seed("examples"))
        self._batches: Iterator[Batch] = batches_on(device, (examples.batch(indices) for indices in self._indices))
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._anchor: list[torch.Tensor] = []
        self._draws_random_numbers: bool | None = None
        self._precision = Precision(workload, device)
        self._micro_batches = MicroBatches(self.batch_size, device)
        self._buffers: Buffers | None = None
        self._capture = CudaCapture(device) if capture is None and device.type == "cuda" else capture
        self._graph: GraphedStep | None = None
        self._graph_off = ""
        self._losses = LossRecord(stride=1 if device.type == "cpu" else LOSS_CHECK_STRIDE)
        self.arrays: dict[str, np.ndarray] = {}

    @property
    def losses(self) -> LossStatistics:
        return self._losses.statistics()

    @property
    def notes(self) -> tuple[str, ...]:
        graph = (self._graph_off,) if self._graph_off else ()
        return (*self._micro_batches.notes, *self._precision.notes, *graph)

    @property
    def micro_batch(self) -> int | None:
        """Examples at a time, where memory made that less than a batch."""
        return None if self._micro_batches.size == self.batch_size else self._micro_batches.size

    @property
    def progress(self) -> Progress:
        return Progress(
            steps_done=self.steps_done,
            examples_done=self.examples_done,
            losses=self._losses.numbers,
            micro_batch=self.micro_batch,
            notes=self._micro_batches.notes,
            draws_random_numbers=self._draws_random_numbers,
        )

    def resume(self, progress: Progress) -> None:
        """Go on where another copy of this training, whose tensors this one shares, has come to (CPU only)."""
        for _ in range(progress.steps_done - self.steps_done):
            next(self._indices)
        self.steps_done, self.examples_done = progress.steps_done, progress.examples_done
        self._losses.restore(progress.losses)
        self._micro_batches.restore(progress.micro_batch, progress.notes)
        self._draws_random_numbers = progress.draws_random_numbers

    def tensors(self, share: Callable[[nn.Module], None]) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimiser, made now if need be; `share` may then move the model's memory."""
        made = self._model is None
        model, optimizer, _ = self._prepared()
        if made:
            share(model)
        return model, optimizer

    def shrink(self, fraction: float, need: str) -> bool:
        return self._micro_batches.shrink(fraction, need)

    def moved(self) -> None:
        """Go on on the current stream: with a graph captured there, and with memory that is not freed under its feet.

        The caching allocator gives memory back to the stream it was allocated on as soon as the last tensor is gone,
        unless it knows that another stream uses it too.
        """
        if self._graph is not None:
            self._graph.restart()
        if self._device.type == "cuda" and self._model is not None and self._optimizer is not None:
            stream = torch.cuda.current_stream(self._device)
            state = [value for values in self._optimizer.state.values() for value in values.values()]
            for tensor in (*self._model.state_dict().values(), *state, *self._anchor, *self._losses.tensors):
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)

    def step(self) -> None:
        """Advance by one optimiser step.

        Raises:
            StateError: in the first step, when the arrays do not fit the model.
            TrainingError: the loss is not finite, or memory is short even for one example at a time.
        """
        model, optimizer, buffers = self._prepared()
        batch = next(self._batches)
        loss = self._graphed(batch)
        if loss is None:
            loss = self._eager(model, optimizer, buffers, batch)
        num_examples = num_examples_in(batch)
        self.steps_done += 1
        self.examples_done += num_examples
        self._losses.add(loss, num_examples)

    def _graphed(self, batch: Batch) -> torch.Tensor | None:
        """The loss of a step taken by a graph; None where it is to be taken eagerly.

        Steps that draw random numbers, or that memory has cut into micro-batches, are.
        """
        if self._graph is None or self._draws_random_numbers is not False or self.micro_batch is not None:
            return None
        with torch.enable_grad():
            loss = self._graph.take(batch)
        self._graph_off = self._graph.off
        return loss

    def _whole(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        """A step with nothing that a graph could not repeat."""
        optimizer.zero_grad(set_to_none=True)
        loss = self._loss_of(model, batch)
        self._precision.backward(loss)
        if self._anchor:
            pull_to_anchor(model.parameters(), self._anchor, self._plan.proximal_mu)
        self._precision.step(optimizer)
        return loss.detach()

    def _eager(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, buffers: Buffers, batch: Batch
    ) -> torch.Tensor:
        buffers.keep()
        optimizer.zero_grad(set_to_none=True)

        def undo() -> None:
            optimizer.zero_grad(set_to_none=True)
            buffers.put_back()

        with torch.enable_grad():
            loss = self._micro_batches.mean_loss(
                batch,
                self.steps_done + 1,
                add=lambda part, before, weight: self._add_gradient(model, part, before, weight),
                undo=undo,
            )
        self._precision.unscale(optimizer)
        if self._anchor:
            pull_to_anchor(model.parameters(), self._anchor, self._plan.proximal_mu)
        self._precision.step(optimizer)
        return loss

    def finish(self) -> None:
        """Set `arrays` to the trained weights.

        Raises:
            TrainingError, StateError: the losses or the weights are not finite.
        """
        self._losses.check()
        assert self._model is not None, "finish before the first step"
        self.arrays = dump_state(self._model)
        self._release()

    def abandon(self) -> None:
        self._release()

    # ------------------------------------------------------------------------------------------------------ internals

    def _seed(self, purpose: str) -> int:
        origin = self._origin
        return seed_of(origin.seed, origin.server_round, origin.client, self.task, purpose)

    def _prepared(self) -> tuple[nn.Module, torch.optim.Optimizer, Buffers]:
        if self._model is None or self._optimizer is None or self._buffers is None:
            model = loaded_model(self._workload, self._start_arrays, self._device, seed=self._seed("model"))
            self._start_arrays = {}
            model.train()
            rate = self._workload.learning_rate if self._plan.learning_rate is None else self._plan.learning_rate
            self._optimizer = self._workload.optimizer(model.parameters(), rate)
            if self._plan.proximal_mu:
                self._anchor = [parameter.detach().clone() for parameter in model.parameters()]
            self._model, self._buffers = model, Buffers(model)
            self._graph = self._graph_of(model, self._optimizer)
        return self._model, self._optimizer, self._buffers

    def _graph_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> GraphedStep | None:
        wanted = getattr(self._workload, "cuda_graph", True) and not self._precision.scales_losses
        if self._capture is None or not wanted:
            return None
        return GraphedStep(model, optimizer, functools.partial(self._whole, model, optimizer), self._capture)

    def _add_gradient(self, model: nn.Module, part: Batch, before: int, weight: float) -> torch.Tensor:
        """Add `weight` times the gradient of a (micro-)batch with `before` examples of its batch before it."""
        loss = self._forward(model, part, before)
        self._precision.backward(loss if weight == 1.0 else loss * weight)
        return loss

    def _forward(self, model: nn.Module, part: Batch, before: int) -> torch.Tensor:
        if self._draws_random_numbers is False:
            return self._loss_of(model, part)
        purpose = f"step {self.steps_done}" + (f" example {before}" if before else "")
        with seeded_draws(self._seed(purpose), self._device):
            generators = generator_state(self._device)
            loss = self._loss_of(model, part)
            if self._draws_random_numbers is None:
                after = generator_state(self._device)
                self._draws_random_numbers = any(not torch.equal(a, b) for a, b in zip(generators, after, strict=True))
            return loss

    def _loss_of(self, model: nn.Module, part: Batch) -> torch.Tensor:
        inputs, targets = part
        with self._precision.forward():
            return self._workload.loss(model(inputs), targets)

    def _release(self) -> None:
        if self._graph is not None:
            self._graph.close()
        self._model, self._optimizer, self._buffers, self._graph, self._anchor = None, None, None, None, []
        self._batches = iter(())
        self._start_arrays = {}


@torch.no_grad()
def pull_to_anchor(parameters: Iterable[nn.Parameter], anchor: Sequence[torch.Tensor], mu: float) -> None:
    """Add that of FedProx's mu/2 ||w - w0||^2 (arXiv 1812.06127, eq. 2) to the gradients; w0 is `anchor`."""
    for parameter, start in zip(parameters, anchor, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(parameter - start, alpha=mu)


def check_plan(plan: TaskPlan, batch_size: int) -> None:
    """Raises TrainingError on a plan that cannot be followed."""
    if plan.num_examples <= 0 or batch_size <= 0:
        raise TrainingError(f"plan asks for {plan.num_examples} examples in batches of {batch_size}")
    if plan.split_point is not None:
        raise TrainingError(f"plan splits the model at block {plan.split_point}; this runtime trains whole models")
    if plan.share is not None and not 0 < plan.share <= 1:
        raise TrainingError(f"plan gives the task a share of {plan.share}; a share is above 0 and at most 1")
    for name in ("learning_rate", "proximal_mu"):
        value = getattr(plan, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise TrainingError(f"plan sets {name} to {value}; it must be finite and not negative")


def loaded_model(
    workload: Workload, arrays: Mapping[str, np.ndarray], device: torch.device, *, seed: int = 0
) -> nn.Module:
    """A new model of the workload with `arrays` as its state, on `device`, in the workload's memory format.

    Raises:
        StateError: the arrays do not fit.
    """
    with seeded_draws(seed, torch.device("cpu")):
        model = workload.build_model()
    load_state(model, arrays)
    return on_device(model, workload, device)


def on_device(model: nn.Module, workload: Workload, device: torch.device) -> nn.Module:
    """`model` moved to `device`, with the memory format that suits the workload.

    Channels-last for models with 2-d convolutions, unless the workload's `channels_last` says otherwise.

    A rule and not a measurement: the choice changes the last bits of the result, which must not depend on timing.
    """
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if getattr(workload, "channels_last", has_convolutions):
        model = model.to(memory_format=torch.channels_last)
    return model.to(device)
