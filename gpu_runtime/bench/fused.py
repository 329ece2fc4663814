"""Tasks of one architecture as one training: parameters stacked, the model mapped over them (torch.func.vmap).

What fusing gains where it is possible at all, to compare with: equal networks, batch shapes, optimisers and numbers of
steps, and inputs that are one tensor. Steps are eager; losses are the workloads' own, one after another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from gpu_runtime.apart import apart
from gpu_runtime.bench.mixes import ORIGIN, Share, Work, synchronize
from gpu_runtime.bench.variants import Run, Variant, VariantError, threads_kept
from gpu_runtime.device import CPU, Device
from gpu_runtime.losses import LossRecord
from gpu_runtime.randomness import sample_batches, seed_of
from gpu_runtime.training import LOSS_CHECK_STRIDE, loaded_model
from gpu_runtime.transfer import Batch, batches_on

# Their steps are elementwise: on stacked parameters each task gets the step that it would get alone.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


class FusedTraining:
    """The trainings of all shares at once, step by step, from the same weights and batches as `TaskTraining`.

    Args:
        work: shares that `unsuitable` has nothing to say about.
        device: where.
    """

    def __init__(self, work: Work, device: Device) -> None:
        self._work = work
        models = [loaded_model(share.workload, share.arrays, device.torch_device) for share in work.values()]
        self._skeleton = models[0].train()
        stacked, _ = stack_module_state(models)
        self._parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(value.detach()) for name, value in stacked.items()
        }
        first = next(iter(work.values())).workload
        self._optimizer = first.optimizer(self._parameters.values(), first.learning_rate)
        stride = 1 if device.kind == CPU else LOSS_CHECK_STRIDE
        self._losses = [LossRecord(stride=stride) for _ in work]
        self._batches = [_batches(share, device) for share in work.values()]
        self.steps_done = 0

    def step(self) -> None:
        """A step of every task."""
        batches = [next(each) for each in self._batches]
        inputs = torch.stack([inputs for inputs, _ in batches])
        self._optimizer.zero_grad(set_to_none=True)
        outputs = torch.vmap(self._forward)(dict(self._parameters), inputs)
        losses = [
            share.workload.loss(output, targets)
            for share, output, (_, targets) in zip(self._work.values(), outputs.unbind(0), batches, strict=True)
        ]
        # A task's parameters enter its own loss only: the gradient of the sum is every task's own.
        torch.autograd.backward(torch.stack(losses).sum())
        self._optimizer.step()
        self.steps_done += 1
        for record, loss in zip(self._losses, losses, strict=True):
            record.add(loss.detach(), len(inputs[0]))

    def finish(self) -> dict[str, dict[str, np.ndarray]]:
        """The trained weights of each task."""
        for record in self._losses:
            record.check()
        host = {name: value.detach().cpu() for name, value in self._parameters.items()}
        return {
            task: {name: value[index].contiguous().numpy() for name, value in host.items()}
            for index, task in enumerate(self._work)
        }

    def _forward(self, parameters: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(self._skeleton, dict(parameters), (inputs,))
        return outputs


class VmapFused(Variant):
    """All tasks of a mix as one `FusedTraining`, on all cores."""

    name = "vmap-fused"

    def __init__(self, device: Device) -> None:
        self._device = device

    def unsuitable(self, work: Work) -> str:
        return unsuitable(work)

    def run(self, work: Work, deadline_s: float) -> Run:
        return apart(lambda: self._run(work, deadline_s))

    def _run(self, work: Work, deadline_s: float) -> Run:
        num_steps = next(iter(work.values())).num_steps
        with threads_kept():
            if self._device.kind == CPU:
                torch.set_num_threads(self._device.num_cores)
            synchronize(self._device)
            started = time.perf_counter()
            try:
                training = FusedTraining(work, self._device)
                while training.steps_done < num_steps and time.perf_counter() < started + deadline_s:
                    training.step()
                training.finish()
            except RuntimeError as error:  # an operator that cannot be mapped, or mapped and differentiated
                raise VariantError(f"{type(error).__name__}: {error}") from error
            synchronize(self._device)
            seconds = time.perf_counter() - started
        return Run(
            seconds=seconds, finish_s=dict.fromkeys(work, seconds), done_fraction=training.steps_done / num_steps
        )


def unsuitable(work: Work) -> str:
    """Why the tasks cannot be one training; empty where they can."""
    if len(work) < 2:
        return "there is nothing to fuse"
    found = [_described(share) for share in work.values()]
    for what in found[0]:
        if any(each[what] != found[0][what] for each in found):
            return f"the tasks differ in {what}"
    share = next(iter(work.values()))
    model = share.workload.build_model()
    if next(model.buffers(), None) is not None:
        return "the model has buffers, which steps may change"
    if not isinstance(share.workload.optimizer(model.parameters(), 0.1), ELEMENTWISE):
        return "the optimiser may look at a parameter as a whole"
    inputs, _ = share.workload.train_examples().batch([0])
    return "" if isinstance(inputs, torch.Tensor) else "the inputs are not one tensor"


def _described(share: Share) -> dict[str, object]:
    """What must be the same in all tasks."""
    workload = share.workload
    model = workload.build_model()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    inputs, _ = workload.train_examples().batch([0])
    return {
        "architecture": (str(model), {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}),
        "optimiser": (type(optimizer), optimizer.defaults, len(optimizer.param_groups)),
        "batch size": workload.batch_size,
        "shape of inputs": inputs.shape if isinstance(inputs, torch.Tensor) else None,
        "number of steps": share.num_steps,
    }


def _batches(share: Share, device: Device) -> Iterator[Batch]:
    """Those of `TaskTraining`."""
    workload = share.workload
    examples = workload.train_examples()
    seed = seed_of(ORIGIN.seed, ORIGIN.server_round, ORIGIN.client, workload.name, "examples")
    indices = sample_batches(len(examples), share.num_examples, workload.batch_size, seed)
    return batches_on(device.torch_device, (examples.batch(each) for each in indices))
