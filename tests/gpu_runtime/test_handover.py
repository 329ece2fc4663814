"""Trainings that change hands end with the weights of trainings that did not, bit for bit."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from runtime_fakes import Dropping, Normed, Pictures, Rows
from torch import nn

from gpu_runtime.contracts import TaskPlan
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.workers import shared_memory
from gpu_runtime.workers.handover import SharedTraining, Stage, from_plain, to_plain
from gpu_runtime.workers.shared_memory import new_memory, slots_for, tensors_at

pytestmark = pytest.mark.skipif(bool(shared_memory.unavailable()), reason=shared_memory.unavailable() or "available")
ORIGIN = Origin(client="a", server_round=1, seed=7)
Optimizer = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw-amsgrad": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, amsgrad=True),
    "adagrad": lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate),
    "rmsprop": lambda parameters, rate: torch.optim.RMSprop(parameters, lr=rate, centered=True, momentum=0.5),
    "rprop": lambda parameters, rate: torch.optim.Rprop(parameters, lr=rate),
    "own": lambda parameters, rate: Replacing(parameters, {"lr": rate}),
}


class Replacing(torch.optim.Optimizer):
    """Keeps a number and a word, puts new tensors in place of old ones, adds a tensor late, and changes its rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.9
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["phase"] = "early" if state["count"] < 5 else "late"
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                if state["count"] == 3:
                    state["third"] = parameter.grad.clone()
                parameter.data.add_(state["mean"] + state.get("third", 0.0), alpha=-group["lr"] * state["count"])


class Keeping(torch.optim.SGD):
    """Keeps a list: that cannot be shared."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["history"] = [1, 2]


class Tied(Pictures):
    """Two layers with one weight, a buffer that is not saved, an empty and a 0-dim parameter."""

    def build_model(self) -> nn.Module:
        return _TiedModel()


class _TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        second.weight = first.weight
        self.blocks = nn.Sequential(nn.Flatten(), first, second, nn.Linear(64, 3))
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.blocks(inputs) * self.scale * torch.log1p(self.calls) + self.empty.sum()


def training(workload: Pictures, arrays: dict[str, np.ndarray], **changes: Any) -> TaskTraining:
    plan = TaskPlan(task=workload.name, num_examples=100, learning_rate=0.01, **changes)
    return TaskTraining(workload=workload, plan=plan, arrays=arrays, origin=ORIGIN, device=torch.device("cpu"))


def workload_of(kind: type[Pictures], optimizer: str) -> Pictures:
    workload = kind(kind.__name__.lower())
    workload.optimizer = OPTIMIZERS[optimizer]  # type: ignore[method-assign, assignment]
    return workload


def first_weights(workload: Pictures) -> dict[str, np.ndarray]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return {name: value.numpy().copy() for name, value in workload.build_model().state_dict().items()}


def alone(workload: Pictures, **changes: Any) -> TaskTraining:
    work = training(workload, first_weights(workload), **changes)
    while not work.finished:
        work.step()
    work.finish()
    return work


def in_turns(workload: Pictures, num_workers: int, seed: int, **changes: Any) -> SharedTraining:
    """Trained by copies that take random turns, as processes would: numbers cross as JSON text."""
    memories = [new_memory("model"), new_memory("optimizer")]
    copies = [
        SharedTraining(training(workload, first_weights(workload), **changes), *(os.dup(memory) for memory in memories))
        for _ in range(num_workers)
    ]
    draw, stage, last = random.Random(seed), None, None
    while stage is None or stage.progress.examples_done < 100:
        now = draw.choice(copies)
        stage = now.advance(draw.randint(1, 3), None if now is last else stage)
        stage, last = from_plain(json.loads(json.dumps(to_plain(stage), allow_nan=False))), now
        assert not stage.stuck
    now = draw.choice(copies)
    now.training.arrays = now.finish(None if now is last else stage)
    for copy in copies:
        copy.close()
    for memory in memories:
        os.close(memory)
    return now


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(optimizer: str) -> None:
    expected = alone(workload_of(Pictures, optimizer))
    found = in_turns(workload_of(Pictures, optimizer), num_workers=3, seed=1).training
    assert same(found.arrays, expected.arrays)
    assert found.losses == expected.losses
    assert (found.steps_done, found.examples_done) == (13, 100)


@pytest.mark.parametrize("kind", [Dropping, Normed, Rows, Tied])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_model(kind: type[Pictures], seed: int) -> None:
    expected = alone(workload_of(kind, "adam"))
    assert same(in_turns(workload_of(kind, "adam"), num_workers=2, seed=seed).training.arrays, expected.arrays)


def test_the_pull_to_the_first_weights_stays() -> None:
    workload = workload_of(Pictures, "momentum")
    expected = alone(workload, proximal_mu=0.5)
    assert not same(expected.arrays, alone(workload).arrays)
    assert same(in_turns(workload, num_workers=2, seed=4, proximal_mu=0.5).training.arrays, expected.arrays)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda parameters, rate: Keeping(parameters, lr=rate), "keeps a list named 'history'"),
        (lambda parameters, rate: torch.optim.Adam(parameters, lr=torch.tensor(rate)), "setting 'lr' in a tensor"),
        (lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, dampening=float("inf")), "dampening = inf"),
    ],
)
def test_what_cannot_be_shared_is_named(optimizer: Optimizer, reason: str) -> None:
    workload = Pictures("pictures")
    workload.optimizer = optimizer  # type: ignore[method-assign, assignment]
    shared = SharedTraining(training(workload, first_weights(workload)), new_memory("a"), new_memory("b"))
    stage = shared.advance(2, None)
    assert reason in stage.stuck
    assert stage.progress.steps_done == 2
    # Where it is, it goes on.
    assert shared.advance(2, None).progress.steps_done == 4
    shared.close()


def test_close_gives_the_memory_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    workload = Pictures("pictures")
    shared = SharedTraining(training(workload, first_weights(workload)), new_memory("a"), new_memory("b"))
    shared.advance(1, None)
    assert len(os.listdir("/proc/self/fd")) >= before + 2
    shared.close()
    shared.close()
    del shared
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_stage_survives_json() -> None:
    workload = workload_of(Pictures, "adam")
    shared = SharedTraining(training(workload, first_weights(workload)), new_memory("a"), new_memory("b"))
    stage = shared.advance(1, None)
    shared.close()
    assert isinstance(stage, Stage)
    assert from_plain(json.loads(json.dumps(to_plain(stage)))) == from_plain(to_plain(stage))


# ---------------------------------------------------------------------------------------------------- shared memory


def test_tensors_over_one_memory_are_one() -> None:
    tensors = [
        torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.randn(3, 4).t(),
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(2, dtype=torch.complex64),
    ]
    memory = new_memory("test")
    slots = slots_for(tensors)
    here, there = tensors_at(memory, slots), tensors_at(memory, slots)
    os.close(memory)
    for tensor, one, other in zip(tensors, here, there, strict=True):
        one.copy_(tensor)
        assert torch.equal(other, tensor)
        assert other.dtype == tensor.dtype
        assert tensor.numel() == 0 or other.stride() == tensor.stride()
    assert all(slot.offset % 64 == 0 for slot in slots)


def test_new_places_lie_behind_the_old() -> None:
    first = slots_for([torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
    second = slots_for([torch.zeros(1)], start=first[-1].offset + first[-1].num_bytes)
    assert [slot.offset for slot in (*first, *second)] == [0, 64, 128]
