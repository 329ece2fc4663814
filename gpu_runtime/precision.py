"""Mixed precision of one training: autocast on CUDA, with scaled losses for float16."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from gpu_runtime.work import TrainingError
from gpu_runtime.workload import Workload

DTYPES = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """What `Workload.autocast_dtype` asks for, on CUDA. Elsewhere full precision: bfloat16 is slower on most CPUs.

    Gradients too small for float16 would vanish, so its losses are scaled up and the gradients down again
    (`torch.amp.GradScaler`). A step whose scaled gradients overflow is skipped and the scale halved.

    Args:
        workload: may have `autocast_dtype`.
        device: where it trains.
        amp: `torch.amp`, or a fake of it in tests.

    Raises:
        TrainingError: an `autocast_dtype` that is neither None nor one of `DTYPES`.
    """

    def __init__(self, workload: Workload, device: torch.device, amp: Any = torch.amp) -> None:
        asked = getattr(workload, "autocast_dtype", None)
        if asked not in DTYPES:
            raise TrainingError(f"autocast_dtype must be None, 'bfloat16' or 'float16', not {asked!r}")
        self._device, self._amp = device, amp
        self._dtype = DTYPES[asked] if device.type == "cuda" else None
        self._scaler = amp.GradScaler(device.type) if self._dtype is torch.float16 else None
        self.num_steps = self.num_skipped = 0

    @property
    def scales_losses(self) -> bool:
        """Whether each step waits for the device, to see if float16 has overflowed."""
        return self._scaler is not None

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Context of the forward pass and the loss, not of the backward pass."""
        if self._dtype is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._amp.autocast(self._device.type, dtype=self._dtype)
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` (scaled, until `unscale`) to the parameters'."""
        torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Called once a step, when all gradients are there and before anything is added to them."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step, or none where float16 overflowed."""
        self.num_steps += 1
        if self._scaler is None:
            optimizer.step()
            return
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self.num_skipped += self._scaler.get_scale() < before

    @property
    def notes(self) -> tuple[str, ...]:
        if self.num_skipped == 0:
            return ()
        return (f"float16 overflowed in {self.num_skipped} of {self.num_steps} steps, which were skipped",)
