"""Steps that fit into memory: a batch whose step runs out of memory is cut in halves, its gradient accumulated."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from gpu_runtime.transfer import Batch, map_tensors, num_examples_in
from gpu_runtime.work import TrainingError

# How allocators other than torch's CUDA allocator say it, in RuntimeErrors (see `is_out_of_memory`).
TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory could not be had. `torch.cuda.OutOfMemoryError` is `torch.OutOfMemoryError`."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)


class MicroBatches:
    """How many examples of a batch go through a model at a time: all, until that runs out of memory.

    Each halving is remembered for the following steps and noted. The gradient stays that of the whole batch, whatever
    the cut, for a loss that is the mean over examples; layers that normalise over the batch see smaller ones.

    Args:
        batch_size: examples of a whole batch.
        device: where the steps run.
        cuda: `torch.cuda`, or a fake of it in tests.

    Attributes:
        size: most examples at a time.
        notes: one line for each halving.
    """

    def __init__(self, batch_size: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.size = self.batch_size = batch_size
        self.notes: tuple[str, ...] = ()
        self._device, self._cuda = device, cuda

    def shrink(self, fraction: float, need: str) -> bool:
        """Halve until at most `fraction` of a batch goes at a time; False if one example is more than that.

        Memory that does not depend on the batch makes this too hopeful; the first step will tell.
        """
        size = self.size
        while size > 1 and size > fraction * self.batch_size:
            size = -(-size // 2)
        if size > fraction * self.batch_size:
            return False
        self._set(size, f"to fit: {need}")
        return True

    def restore(self, size: int | None, notes: tuple[str, ...]) -> None:
        """Take over what another has come to; None: whole batches."""
        self.size, self.notes = self.batch_size if size is None else size, notes

    def mean_loss(
        self,
        batch: Batch,
        step: int,
        *,
        add: Callable[[Batch, int, float], torch.Tensor],
        undo: Callable[[], None],
    ) -> torch.Tensor:
        """Accumulate the gradient of a batch and return its mean loss, detached.

        Args:
            batch: on the device.
            step: its number, from 1, for notes.
            add: adds the gradient of (micro-batch, number of examples before it, its part of the batch) times that
                part, and returns the micro-batch's own mean loss.
            undo: forgets the gradients, and whatever else a failed attempt has left.

        Raises:
            TrainingError: one example at a time is too much.
        """
        num_examples = num_examples_in(batch)
        while True:
            loss, reason = self._attempt(batch, num_examples, add)
            if loss is not None:
                return loss
            # Not in the except block: while the exception lives, so do the frames and tensors of the failed attempt.
            undo()
            gc.collect(1)  # cycles of the failed attempt: young, and a full collection would stall all lanes
            if self._device.type == "cuda":
                self._cuda.empty_cache()
            size = min(self.size, num_examples)
            if size == 1:
                raise TrainingError(f"out of memory at step {step} with one example at a time: {reason}")
            self._set(-(-size // 2), f"after out of memory at step {step}", was=size)

    def _attempt(
        self, batch: Batch, num_examples: int, add: Callable[[Batch, int, float], torch.Tensor]
    ) -> tuple[torch.Tensor | None, str]:
        """Loss, or None and the allocator's complaint."""
        try:
            if num_examples <= self.size:
                return add(batch, 0, 1.0).detach(), ""
            total: torch.Tensor | None = None
            for start in range(0, num_examples, self.size):
                stop = min(start + self.size, num_examples)
                part = (stop - start) / num_examples
                loss = add(cut(batch, start, stop, num_examples), start, part).detach() * part
                total = loss if total is None else total + loss
            return total, ""
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None, (str(error).strip() or type(error).__name__).splitlines()[0]

    def _set(self, size: int, why: str, was: int | None = None) -> None:
        was = self.size if was is None else was
        self.size = size
        if size != was:
            self.notes = (*self.notes, f"micro-batch {was} -> {size} {why}")


def cut(batch: Batch, start: int, stop: int, num_examples: int) -> Batch:
    """Examples `start` to `stop` of a batch of `num_examples`.

    Raises:
        TrainingError: a tensor whose first dimension is not the examples.
    """

    def slice_of(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or len(tensor) != num_examples:
            shape = list(tensor.shape)
            raise TrainingError(f"a batch of {num_examples} examples cannot be cut: it has a tensor of shape {shape}")
        return tensor[start:stop]

    part: Batch = map_tensors(slice_of, batch)
    return part


class Buffers:
    """A model's buffers as they were before a step: a forward pass that fails has already advanced some of them.

    Modules may change a buffer in place or put another tensor in its place.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Those that have some when they are built: a step must not search all modules.
        self._modules = [module for module in model.modules() if module._buffers]
        self._live: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Call before a step."""
        live = [
            (module, name, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors = [buffer for _, _, buffer in live]
        if len(live) == len(self._live) and all(a is b for a, (_, _, b) in zip(tensors, self._live, strict=True)):
            _copy(self._kept, tensors)
        else:
            self._live, self._kept = live, [buffer.detach().clone() for buffer in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were at the last `keep`."""
        for module, name, buffer in self._live:
            module._buffers[name] = buffer
        _copy([buffer for _, _, buffer in self._live], self._kept)


def _copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
