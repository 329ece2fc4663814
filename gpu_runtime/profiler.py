"""Measures what training a task costs on a device, in bounded time, with real training steps on synthetic batches.

Results are thrown away; models, their buffers and torch's random state are left as they were, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_runtime import profile_cache
from gpu_runtime.block_costs import bytes_per_example, measure_blocks
from gpu_runtime.contracts import TaskCost
from gpu_runtime.device import CPU, Device
from gpu_runtime.micro_batches import MicroBatches, cut
from gpu_runtime.precision import Precision
from gpu_runtime.profile_cache import CostKey
from gpu_runtime.randomness import seeded_draws
from gpu_runtime.training import on_device
from gpu_runtime.transfer import Batch, map_tensors, num_examples_in
from gpu_runtime.virtual_resource import OperatorDemand, cpu_operators, cuda_operators, demand_of
from gpu_runtime.workload import Workload

MIN_REPEATS = 2
MAX_REPEATS = 30
# Optimiser steps; the first is not timed.
UPDATES = 6
# Of the budget: step times get this part, block times the rest.
STEPS_FRACTION = 0.75
# Smaller ones cannot be told from the noise of their measurement.
MIN_DEMAND = 0.05


class Profiler:
    """Task costs on a device: from memory, from disk, or measured.

    Args:
        budget_s: seconds a measurement may take for each task; a task whose steps are slow takes a few steps more.
        use_disk: look up and keep costs in the user's cache directory.
    """

    def __init__(self, budget_s: float = 3.0, *, use_disk: bool = True) -> None:
        self._budget_s, self._use_disk = budget_s, use_disk
        self._known: dict[CostKey, TaskCost] = {}

    def cost(self, workload: Workload, device: Device) -> TaskCost:
        """Cost of training `workload` on `device`, which nothing else should be using now."""
        with seeded_draws(0, device.torch_device):
            model = workload.build_model()
            key = CostKey(
                device=device.name,
                num_cores=device.num_cores,
                driver=device.driver,
                torch_version=torch.__version__,
                model_hash=model_hash(model, getattr(workload, "autocast_dtype", None)),
                batch_size=workload.batch_size,
                task=workload.name,
                code_hash=code_hash(workload),
            )
            cost = self._known.get(key) or (profile_cache.load(key) if self._use_disk else None)
            if cost is None:
                cost = measure(workload, device, budget_s=self._budget_s, model=model)
                if self._use_disk:
                    profile_cache.store(key, cost)
        self._known[key] = cost
        return cost


def model_hash(model: nn.Module, autocast_dtype: str | None = None) -> str:
    """Hash of an architecture: the modules as they print, names, shapes and dtypes of the state, and the precision."""
    state = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in model.state_dict().items()]
    precision = [autocast_dtype] if autocast_dtype else []
    return hashlib.sha256("\n".join([repr(model), *state, *precision]).encode()).hexdigest()


def code_hash(workload: Workload) -> str:
    """Hash of the file that defines the workload's class: its loss and optimiser cost time too. Empty without one."""
    try:
        path = inspect.getsourcefile(type(workload))
        return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def measure(workload: Workload, device: Device, *, budget_s: float = 3.0, model: nn.Module | None = None) -> TaskCost:
    """Measure one task. `model`, if given, comes back as it was."""
    model = workload.build_model() if model is None else model
    generator = torch.Generator().manual_seed(0)
    with untouched(model, device.torch_device) as trial:
        trial = on_device(trial, workload, device.torch_device).train()
        probe = _Probe(workload, device, trial, generator)
        return probe.cpu_cost(budget_s) if device.kind == CPU else probe.cuda_cost(budget_s)


def operators(workload: Workload, device: Device) -> list[OperatorDemand]:
    """What each operator of a training step keeps busy, the longest first.

    Raises:
        RuntimeError: the profiler cannot see them.
    """
    with seeded_draws(0, device.torch_device), untouched(workload.build_model(), device.torch_device) as trial:
        trial = on_device(trial, workload, device.torch_device).train()
        return _Probe(workload, device, trial, torch.Generator().manual_seed(0)).operators()


@contextlib.contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A copy of `model` to train in the block; afterwards torch's random states are as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield copy.deepcopy(model)


class _Probe:
    """Training steps of one model on one synthetic batch, timed; in micro-batches where memory wants it."""

    def __init__(self, workload: Workload, device: Device, model: nn.Module, generator: torch.Generator) -> None:
        self._workload, self._device, self._model, self._generator = workload, device, model, generator
        self._optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
        self._precision = Precision(workload, device.torch_device)
        self._micro_batches = MicroBatches(workload.batch_size, device.torch_device)
        self._batch = self._make_batch(workload.batch_size)

    def cpu_cost(self, budget_s: float) -> TaskCost:
        """c is the cost at the fastest number of threads, V = c_one_thread / (cores c), s(k / cores) from the rest."""
        callers_threads = torch.get_num_threads()
        try:
            step_s = self._step_seconds(_thread_counts(self._device.num_cores), budget_s * STEPS_FRACTION)
            fastest = min(step_s, key=lambda threads: step_s[threads])
            torch.set_num_threads(fastest)
            blocks = measure_blocks(
                self._model, self._loss, self._micro_batch(), budget_s * (1 - STEPS_FRACTION), _nothing
            )
            memory = self._cpu_peak_bytes()
            update_s = self._update_seconds(_nothing)
        finally:
            torch.set_num_threads(callers_threads)
        cores = self._device.num_cores
        return TaskCost(
            demand=min(1.0, step_s[1] / (cores * step_s[fastest])),
            solo_cost_s=step_s[fastest] / self._workload.batch_size,
            speed_curve=speed_curve({threads / cores: step_s[fastest] / s for threads, s in step_s.items()}),
            peak_memory_bytes=memory,
            blocks=blocks,
            update_s=update_s,
            target_bytes=self._target_bytes(),
        )

    def cuda_cost(self, budget_s: float) -> TaskCost:
        """c by events; V from the kernels of a step (`virtual_resource`), as far as the profiler can see them.

        Else V from how the step time grows with the batch: a step that fills the device takes twice as long at twice
        the batch (V = 1); one that leaves it idle, because its kernels are small or are launched too slowly, takes no
        longer (V near 0). So V = t(2B) / t(B) - 1. Where 2B does not fit into memory it runs as 2 x B: V = 1.
        """
        torch.cuda.reset_peak_memory_stats(self._device.index)
        at_rest = torch.cuda.memory_allocated(self._device.index)
        once_s = self._cuda_step_s(budget_s * STEPS_FRACTION / 2)
        peak = torch.cuda.max_memory_allocated(self._device.index) - at_rest
        state = sum(value.numel() * value.element_size() for value in self._model.state_dict().values())
        demand = max(MIN_DEMAND, self._cuda_demand(once_s, budget_s * STEPS_FRACTION / 2))
        with self._precision.forward():
            blocks = measure_blocks(
                self._model,
                self._loss,
                self._micro_batch(),
                budget_s * (1 - STEPS_FRACTION),
                torch.cuda.synchronize,
            )
        return TaskCost(
            demand=demand,
            solo_cost_s=once_s / self._workload.batch_size,
            speed_curve=((demand, 1.0), (1.0, 1.0)) if demand < 1.0 else ((1.0, 1.0),),
            peak_memory_bytes=peak + state,
            blocks=blocks,
            update_s=self._update_seconds(torch.cuda.synchronize),
            target_bytes=self._target_bytes(),
        )

    def operators(self) -> list[OperatorDemand]:
        """What each operator of a step keeps busy, the longest first. Raises RuntimeError where that cannot be seen."""
        if self._device.kind == CPU:
            return cpu_operators(self._step, self._device.num_cores)
        self._step()
        return cuda_operators(self._step, self._device.torch_device, self._device.num_cores)

    # ------------------------------------------------------------------------------------------------------ internals

    def _cuda_demand(self, once_s: float, budget_s: float) -> float:
        try:
            return demand_of(self.operators(), once_s)
        except (RuntimeError, OSError, ValueError):
            pass
        batch, micro_batches = self._batch, self._micro_batches
        twice = 2 * self._workload.batch_size
        self._batch, self._micro_batches = self._make_batch(twice), MicroBatches(twice, self._device.torch_device)
        twice_s = self._cuda_step_s(budget_s)
        self._batch, self._micro_batches = batch, micro_batches
        return min(1.0, twice_s / once_s - 1.0)

    def _make_batch(self, size: int) -> Batch:
        batch = self._workload.synthetic_batch(size, self._generator)
        moved: Batch = map_tensors(lambda tensor: tensor.to(self._device.torch_device), batch)
        return moved

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self._workload.loss(outputs, targets)

    def _micro_batch(self) -> Batch:
        num_examples = self._workload.batch_size
        return cut(self._batch, 0, min(self._micro_batches.size, num_examples), num_examples)

    def _step(self) -> None:
        self._forget_gradients()
        self._micro_batches.mean_loss(self._batch, 1, add=self._add_gradient, undo=self._forget_gradients)
        self._precision.unscale(self._optimizer)
        self._precision.step(self._optimizer)

    def _update_seconds(self, wait_for_device: Callable[[], None]) -> float:
        """Median seconds of the optimiser's step, with the gradients that the last pass has left.

        Called last: the weights are worth nothing afterwards.
        """
        seconds = []
        for _ in range(UPDATES):
            wait_for_device()
            started = time.perf_counter()
            self._optimizer.step()
            wait_for_device()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    def _target_bytes(self) -> int:
        return bytes_per_example(self._batch[1], num_examples_in(self._batch))

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _add_gradient(self, part: Batch, before: int, weight: float) -> torch.Tensor:
        inputs, targets = part
        with self._precision.forward():
            loss = self._loss(self._model(inputs), targets)
        self._precision.backward(loss if weight == 1.0 else loss * weight)
        return loss

    def _step_seconds(self, thread_counts: list[int], budget_s: float) -> dict[int, float]:
        """Seconds of a step at each number of threads, the lower quartile: what others do on the machine only adds.

        The numbers take turns, so that all see the same noise.
        A turn is one untimed step (a new width has to wake its threads) and one timed one.
        """
        samples: dict[int, list[float]] = {threads: [] for threads in thread_counts}
        began = time.perf_counter()
        for repeat in range(MAX_REPEATS):
            if repeat >= MIN_REPEATS and time.perf_counter() - began > budget_s:
                break
            for threads in thread_counts:
                torch.set_num_threads(threads)
                self._step()
                started = time.perf_counter()
                self._step()
                samples[threads].append(time.perf_counter() - started)
        return {threads: sorted(seconds)[len(seconds) // 4] for threads, seconds in samples.items()}

    def _cuda_step_s(self, budget_s: float) -> float:
        """Mean seconds of a step, over as many as the budget allows, waiting for the device only now and then."""
        for _ in range(3):
            self._step()
        torch.cuda.synchronize(self._device.index)
        began, num_steps, total_s = time.perf_counter(), 0, 0.0
        while num_steps < MIN_REPEATS or time.perf_counter() - began < budget_s:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(5):
                self._step()
            end.record()
            end.synchronize()
            total_s += begin.elapsed_time(end) / 1e3
            num_steps += 5
        return total_s / num_steps

    def _cpu_peak_bytes(self) -> int:
        """Weights, gradients, optimiser state, one batch, and what autograd saves between forward and backward."""
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs, targets = self._micro_batch()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self._loss(self._model(inputs), targets)
        for value in (*self._model.parameters(), *self._model.buffers()):
            saved.pop(value.untyped_storage().data_ptr(), None)
        del loss
        return sum(saved.values()) + self._resident_bytes()

    def _resident_bytes(self) -> int:
        sizes: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        map_tensors(note, (self._batch, dict(self._model.state_dict())))
        map_tensors(note, [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None])
        map_tensors(note, [dict(state) for state in self._optimizer.state.values()])
        return sum(sizes)


def speed_curve(samples: dict[float, float]) -> tuple[tuple[float, float], ...]:
    """A concave, rising curve from samples (v, speed over the best speed), from (0, 0) to (1, 1).

    More threads than help are not used, so the curve never falls; noise that would make it convex is lifted to the
    line between its neighbours.
    """
    points = [(0.0, 0.0)]
    best = 0.0
    for share in sorted(samples):
        best = min(1.0, max(best, samples[share]))
        points.append((share, best))
    if points[-1][0] < 1.0:
        points.append((1.0, 1.0))
    points[-1] = (1.0, 1.0)
    hull: list[tuple[float, float]] = []
    for point in points:
        while len(hull) >= 2 and _below(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(hull[1:])


def _below(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies strictly below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) < (c[1] - a[1]) * (b[0] - a[0])


def _thread_counts(cores: int) -> list[int]:
    """1, the powers of two, and all cores: every count up to four, few beyond."""
    counts = {1, 2, 3, cores} | {2**power for power in range(2, 11)}
    return sorted(count for count in counts if count <= cores)


_nothing: Callable[[], None] = lambda: None  # noqa: E731
