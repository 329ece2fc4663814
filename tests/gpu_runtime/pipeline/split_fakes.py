"""Workloads to split, in double precision, and a split training beside its unsplit twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from local_channel import LocalChannel
from runtime_fakes import Blocks, Examples, Pictures
from torch import nn

from gpu_runtime.apart import narrow
from gpu_runtime.contracts import SplitAccess, TaskPlan
from gpu_runtime.device import Device
from gpu_runtime.pipeline.halves import join_halves
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.session import Channel, SessionKey
from gpu_runtime.pipeline.split_training import SplitTraining
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.work import Work
from gpu_runtime.workload import Workload

CPU = torch.device("cpu")
ORIGIN = Origin(client="a", server_round=3, seed=7)
ACCESS = SplitAccess(address="127.0.0.1:1", run="run", token="secret", fallback=False)


class Keep(nn.Module):
    """Encoder step of a U-Net: hands its input on beside its output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, state: Any) -> tuple[torch.Tensor, ...]:
        x, *skips = (state,) if isinstance(state, torch.Tensor) else state
        return (self.body(x), x, *skips)


class Merge(nn.Module):
    """Decoder step of a U-Net: adds the last skip to its upsampled input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, state: tuple[torch.Tensor, ...]) -> Any:
        x, skip, *rest = state
        y = self.body(skip + nn.functional.interpolate(x, scale_factor=2.0))
        return (y, *rest) if rest else y


def _conv(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1), nn.GroupNorm(1, channels_out), nn.Tanh()
    )


class Split(Pictures):
    """Four blocks, the third begins in place. Options: precision, optimiser."""

    batch_size = 7
    dtype = torch.float64

    def __init__(
        self,
        name: str = "split",
        make: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer] | None = None,
        num_examples: int = 30,
    ) -> None:
        super().__init__(name, num_examples)
        self._make = make

    def blocks(self) -> nn.Module:
        return Blocks(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8)),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 3)),
        )

    def build_model(self) -> nn.Module:
        return self.blocks().to(self.dtype)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return self._make(parameters, learning_rate) if self._make else super().optimizer(parameters, learning_rate)

    def train_examples(self) -> Examples:
        examples = super().train_examples()
        return Examples(examples.inputs.to(self.dtype), examples.targets)


class Single(Split):
    dtype = torch.float32


class Skipping(Split):
    """A U-Net with two skip connections over the cuts; its first one is the input itself, which needs no gradient."""

    def blocks(self) -> nn.Module:
        return Blocks(
            Keep(_conv(1, 2, stride=2)),
            Keep(_conv(2, 2, stride=2)),
            Merge(_conv(2, 1)),
            Merge(_conv(1, 2)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 3)),
        )


class Dropping(Split):
    """Dropout on both sides of the second cut."""

    def blocks(self) -> nn.Module:
        return Blocks(
            nn.Flatten(),
            nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5)),
            nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 3)),
        )


def arrays_of(workload: Workload, seed: int = 1) -> dict[str, np.ndarray]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return {name: value.numpy().copy() for name, value in workload.build_model().state_dict().items()}


def plan_of(workload: Workload, **options: Any) -> TaskPlan:
    defaults: dict[str, Any] = {"num_examples": 20, "split_point": 1, "micro_batches": 2, "encoding": "raw"}
    return TaskPlan(task=workload.name, **{**defaults, **options})


def key_of(task: str, attempt: int = 0) -> SessionKey:
    return SessionKey(run="run", server_round=ORIGIN.server_round, attempt=attempt, client=ORIGIN.client, task=task)


@contextmanager
def service(*workloads: Workload, cores: int = 1) -> Iterator[ServerStages]:
    """Serves round 3 of "run", with the start weights of `arrays_of`."""
    device = StageDevice(Device(name="test", kind="cpu", num_cores=cores))
    stages = ServerStages(device)
    try:
        stages.open_round(
            "run", 3, 0, {each.name: each for each in workloads}, {each.name: arrays_of(each) for each in workloads}
        )
        yield stages
    finally:
        stages.close()
        device.close()


def split_training(workload: Workload, channel: Channel, **options: Any) -> SplitTraining:
    """Options are those of `SplitTraining`, and of the plan."""
    own = {name: options.pop(name) for name in ("access", "emulation", "noise_seed", "arrays") if name in options}
    return SplitTraining(
        **{
            "workload": workload,
            "plan": plan_of(workload, **options),
            "arrays": arrays_of(workload),
            "origin": ORIGIN,
            "device": CPU,
            "access": ACCESS,
            "channel": lambda: channel,
            **own,
        }
    )


def whole_training(workload: Workload, **options: Any) -> TaskTraining:
    options = {**options, "split_point": None, "micro_batches": 1, "encoding": "fp32"}
    return TaskTraining(
        workload=workload, plan=plan_of(workload, **options), arrays=arrays_of(workload), origin=ORIGIN, device=CPU
    )


def run(work: Work) -> None:
    """To its end, on one core: small steps on several only wait for each other."""
    with narrow():
        while not work.finished:
            work.step()
        work.finish()


def whole_arrays(workload: Workload, **options: Any) -> dict[str, np.ndarray]:
    training = whole_training(workload, **options)
    run(training)
    return training.arrays


def split_arrays(workload: Workload, **options: Any) -> dict[str, np.ndarray]:
    """The whole model after a split training: both halves joined."""
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), **options)
        run(training)
        half = stages.collect(key_of(workload.name))
    assert (half.num_steps, half.num_examples) == (training.steps_done, training.examples_done)
    return join_halves(training.arrays, half.arrays, list(arrays_of(workload)))


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Relative distance of two models, over all their weights."""
    assert list(one) == list(other)
    apart = sum(float(np.square(one[key].astype(float) - other[key]).sum()) for key in one)
    return (apart / sum(float(np.square(other[key].astype(float)).sum()) for key in one)) ** 0.5
