"""Whole training steps as CUDA graphs: one launch a step, so that one Python thread keeps several streams full.

A graph repeats the kernels of one step at fixed addresses. It is captured after a few eager steps, compared with an
eager step from the same state, and used for batches of the same shapes; anything else runs eagerly.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpu_runtime.own_state import HiddenStateError, OwnState
from gpu_runtime.transfer import Batch, map_tensors
from gpu_runtime.work import one_line

# Eager steps before a capture: lazy initialisation, autotuning and the optimiser's state happen in them.
WARM_UP_STEPS = 3
# Largest difference between a graph's step and an eager one, in parts of the largest change that the step makes: the
# order of atomic additions differs from run to run.
TOLERANCE = 1e-2

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]
# Calls that the driver forbids while some thread captures are fewer when only one does.
_capturing = threading.Lock()


class CudaCapture:
    """Captures on the current stream, which must not be the default one.

    `torch.cuda.graph` would wait for the whole device and collect garbage first, and stall all other lanes with it.

    Args:
        device: a CUDA device.
        cuda: `torch.cuda`, or a fake of it in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def __call__(self, body: Callable[[], torch.Tensor]) -> Replay:
        """Nothing of `body` is computed now; the replay returns the tensor it returned, computed anew each time.

        Raises:
            RuntimeError: something in `body` cannot be captured.
        """
        graph = self._cuda.CUDAGraph()
        with _capturing:
            self._cuda.current_stream(self._device).synchronize()
            # Other lanes go on allocating and copying: only what this thread does counts.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                output = body()
            except BaseException:
                # The capture is broken already: ending it says so once more, and is needed all the same.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class GraphedStep:
    """Decides for each batch of a training whether a graph takes the step, and takes it.

    Args:
        model, optimizer: of the training; the model takes no random numbers.
        body: a whole eager step on a batch: gradients from none, optimiser's step; returns the loss, detached.
        capture: `CudaCapture`, or a fake of it in tests.

    Attributes:
        off: why all steps are eager; empty while graphs are possible.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        body: Callable[[Batch], torch.Tensor],
        capture: Capture,
    ) -> None:
        self._model, self._optimizer, self._body, self._capture = model, optimizer, body, capture
        self.off = why_not(optimizer)
        self._num_eager = 0
        self._own_state: OwnState | None = None
        self._shapes: Any = None
        self._static: Batch | None = None
        self._replay: Replay | None = None

    def take(self, batch: Batch) -> torch.Tensor | None:
        """The loss of this step, taken by the graph; None: take it eagerly."""
        if self.off:
            return None
        if self._replay is None:
            self._num_eager += 1
            if self._num_eager <= WARM_UP_STEPS:
                # From the second step on: the first may make what later ones only use.
                self._own_state = self._own_state if self._num_eager != 2 else OwnState(self._model, self._optimizer)
                return None
            return self._first(batch)
        if _shapes_of(batch) != self._shapes:
            return None
        return self._again(batch)

    def restart(self) -> None:
        """Capture anew at the next step: a graph keeps the priority and the SMs of the stream it was captured on.

        torch instantiates graphs with per-node priorities, and kernels stay in the green context of their capture,
        whatever stream the graph is launched on. The old graph must have come to its end.
        """
        self._replay, self._static = None, None

    def close(self) -> None:
        """Let graph and memory go."""
        self._replay, self._static, self._own_state = None, None, None
        self.off = self.off or "closed"

    # ------------------------------------------------------------------------------------------------------ internals

    def _first(self, batch: Batch) -> torch.Tensor | None:
        """Capture, take this step by the graph and eagerly from the same state, and compare."""
        try:
            assert self._own_state is not None
            self._own_state.check()
            self._shapes = _shapes_of(batch)
            self._static = static = map_tensors(torch.Tensor.clone, batch)
            self._optimizer.zero_grad(set_to_none=True)
            replay = self._capture(lambda: self._body(static))
            before = [tensor.clone() for tensor in self._state()]
            replay()
            after = [tensor.clone() for tensor in self._state()]
            self._put_back(before)
            loss = self._body(batch)
            if difference := _difference(before, self._state(), after):
                self.off = f"CUDA graph not used: {difference}"
        except (RuntimeError, HiddenStateError) as error:
            # Nothing was computed in a capture that failed: the eager step starts from where this one did.
            self.off = f"CUDA graph not used: {one_line(error)}"
            self._static = None
            return None
        if not self.off:
            self._replay = replay
        return loss

    def _again(self, batch: Batch) -> torch.Tensor:
        assert self._replay is not None
        assert self._static is not None
        for static, tensor in zip(_tensors(self._static), _tensors(batch), strict=True):
            static.copy_(tensor)
        return self._replay().clone()

    def _state(self) -> list[torch.Tensor]:
        """Everything a step changes."""
        kept = [
            value
            for parameter in self._model.parameters()
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        return [*(parameter.detach() for parameter in self._model.parameters()), *self._model.buffers(), *kept]

    @torch.no_grad()
    def _put_back(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self._state(), values, strict=True):
            tensor.copy_(value)


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimiser's step cannot be part of a graph; empty when it can. Makes it capturable if need be."""
    if type(optimizer) is torch.optim.SGD:
        return ""
    if "capturable" not in optimizer.defaults or type(optimizer).__module__.split(".")[0] != "torch":
        return f"CUDA graph not used: {type(optimizer).__name__} may compute on the host"
    for group in optimizer.param_groups:
        group["capturable"] = True
    return ""


def _tensors(batch: Batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def _shapes_of(batch: Batch) -> list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in _tensors(batch)]


def _difference(before: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], graphed: Sequence[torch.Tensor]) -> str:
    """In what a graph's step differs from an eager one; empty where it does not."""
    for start, expected, found in zip(before, eager, graphed, strict=True):
        if not expected.numel():
            continue
        moved = (expected.double() - start.double()).abs().max().item()
        apart = (expected.double() - found.double()).abs().max().item()
        # A change too small to tell from rounding may differ by as much.
        rounding = 8 * torch.finfo(torch.float32).eps * expected.double().abs().max().item()
        if not apart <= TOLERANCE * moved + rounding:
            return f"its first step differs from an eager one by {apart:.3g} where that moves {moved:.3g}"
    return ""
