"""The mixes of tasks a benchmark compares, and how much work each of their tasks gets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_runtime.apart import apart
from gpu_runtime.bench.floor import SoloTimes
from gpu_runtime.bench.models import build, kind_of
from gpu_runtime.contracts import DataSpec, TaskPlan
from gpu_runtime.device import CPU, Device
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.workload import Workload

ORIGIN = Origin(client="bench", server_round=1, seed=0)
MIN_STEPS = 4
# Timed steps of a calibration: at least so many, then until so many seconds have passed.
CALIBRATION_STEPS, CALIBRATION_S, MAX_CALIBRATION_STEPS = 3, 0.1, 50

CONVOLUTIONAL, SMALL_STEPS, OTHER = "convolutional", "small-step", "other"
EIGHT = ("lenet", "lenet.2", "resnet8", "grid-detector", "unet", "perceptron", "sensor-net", "word-bag")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Tasks that run together.

    `steps` are relative numbers of optimiser steps, `seconds` relative times alone on all threads; a mix has one of
    them. `character` decides which target holds; a `featured` mix gets every variant in a quick run too.
    """

    steps: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    character: str = OTHER
    featured: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.steps or self.seconds)


MIXES: dict[str, Mix] = {
    "imbalanced": Mix(steps={"lenet": 75, "resnet8": 22, "unet": 24}, character=CONVOLUTIONAL, featured=True),
    "balanced": Mix(seconds={"lenet": 1, "resnet8": 1, "unet": 1}, character=CONVOLUTIONAL, featured=True),
    "small": Mix(seconds={"perceptron": 1, "sensor-net": 1, "word-bag": 1}, character=SMALL_STEPS, featured=True),
    # Steps of one pass over the training data: 4000 digits, 6000 scenes; 3675 windows, 400 rows.
    "driving": Mix(steps={"digits": 500, "detection": 750, "segmentation": 375}),
    "mixed": Mix(steps={"watch": 115, "breast-cancer": 25, "digits": 500}, character=SMALL_STEPS),
    "dominant": Mix(seconds={"unet": 8, "lenet": 1, "resnet8": 1}, character=CONVOLUTIONAL),
    "alone": Mix(seconds={"resnet8": 1}, character=CONVOLUTIONAL),
    "eight": Mix(seconds=dict.fromkeys(EIGHT, 1.0)),
    "twins": Mix(seconds={"resnet8": 1, "resnet8.2": 1}, character=CONVOLUTIONAL),
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """The work of one task of a mix: its workload, start weights, number of steps, and what a step took alone."""

    workload: Workload
    arrays: Mapping[str, np.ndarray]
    num_steps: int
    step: SoloTimes

    @property
    def num_examples(self) -> int:
        return self.num_steps * self.workload.batch_size

    @property
    def one_s(self) -> float:
        """Calibrated seconds of the whole work on one thread."""
        return self.num_steps * self.step.one_s

    def training(self, device: Device, num_steps: int | None = None) -> TaskTraining:
        """The same work as in every other variant: `TaskTraining`, from the start weights."""
        steps = self.num_steps if num_steps is None else num_steps
        return TaskTraining(
            workload=self.workload,
            plan=TaskPlan(task=self.workload.name, num_examples=steps * self.workload.batch_size),
            arrays=self.arrays,
            origin=ORIGIN,
            device=device.torch_device,
        )


Work = Mapping[str, Share]


class Calibration:
    """Step times of each kind of task on this device, measured once in an invocation. Only sizes work by them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[str, tuple[Workload, dict[str, np.ndarray], SoloTimes]] = {}

    def work(self, mix: Mix, seconds: float) -> Work:
        """Work for each task so that all of it takes about `seconds`, one task after another."""
        known = apart(lambda: {task: self._measured(task) for task in mix.tasks})
        # The better width: two threads that wait for each other on a busy machine say nothing about the work.
        step_s = {task: min(step.one_s, step.all_s) for task, (_, _, step) in known.items()}
        if mix.steps:
            scale = seconds / sum(count * step_s[task] for task, count in mix.steps.items())
            counts = {task: count * scale for task, count in mix.steps.items()}
        else:
            total = sum(mix.seconds.values())
            counts = {task: seconds * part / total / step_s[task] for task, part in mix.seconds.items()}
        return {
            task: Share(
                workload=build(task, DataSpec()),
                arrays=known[task][1],
                num_steps=max(MIN_STEPS, round(counts[task])),
                step=known[task][2],
            )
            for task in mix.tasks
        }

    def _measured(self, task: str) -> tuple[Workload, dict[str, np.ndarray], SoloTimes]:
        kind = kind_of(task)
        if kind not in self._known:
            workload = build(kind, DataSpec())
            arrays = start_arrays(workload)
            callers_threads = torch.get_num_threads()
            try:
                one_s = self._step_s(workload, arrays, 1)
                many = self._device.kind == CPU and self._device.num_cores > 1
                all_s = self._step_s(workload, arrays, self._device.num_cores) if many else one_s
            finally:
                torch.set_num_threads(callers_threads)
            self._known[kind] = workload, arrays, SoloTimes(one_s=one_s, all_s=all_s)
        return self._known[kind]

    def _step_s(self, workload: Workload, arrays: Mapping[str, np.ndarray], threads: int) -> float:
        """Seconds of a step, the lower quartile: what others do on the machine only adds."""
        if self._device.kind == CPU:
            torch.set_num_threads(threads)
        unlimited = TaskPlan(task=workload.name, num_examples=1_000_000_000)
        training = TaskTraining(
            workload=workload, plan=unlimited, arrays=arrays, origin=ORIGIN, device=self._device.torch_device
        )
        training.step()
        samples: list[float] = []
        while len(samples) < CALIBRATION_STEPS or (
            sum(samples) < CALIBRATION_S and len(samples) < MAX_CALIBRATION_STEPS
        ):
            started = time.perf_counter()
            training.step()
            synchronize(self._device)
            samples.append(time.perf_counter() - started)
        training.abandon()
        return sorted(samples)[len(samples) // 4]


def start_arrays(workload: Workload) -> dict[str, np.ndarray]:
    """The same first weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return {name: value.numpy() for name, value in workload.build_model().state_dict().items()}


def synchronize(device: Device) -> None:
    if device.kind != CPU:
        torch.cuda.synchronize(device.index)
