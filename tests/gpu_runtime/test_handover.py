"""Trainings that change hands end with the weights of trainings that did not, bit for bit."""

from __future__ import annotations

import dataclasses
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
    "swapping": lambda parameters, rate: Swapping(parameters, lr=rate),
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


class Swapping(torch.optim.SGD):
    """Puts other memory in the place of the parameters' own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data.clone().clamp_(-1.0, 1.0)


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()


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


class Averaging(Pictures):
    """Puts a new tensor in the place of a buffer in every forward pass."""

    def build_model(self) -> nn.Module:
        return _AveragingModel()


class _AveragingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        self.mean = 0.9 * self.mean + 0.1 * flat.detach().mean(0)
        return self.blocks(flat - self.mean)


class Recurrent(Pictures):
    """A module that keeps its parameters in a list too."""

    def build_model(self) -> nn.Module:
        return _RecurrentModel()


class _RecurrentModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](inputs[:, 0])[0][:, -1])


def _with_attribute(change: Callable[[nn.Module], None], before: Callable[[nn.Module], None]) -> type[Pictures]:
    """A workload whose model is `change`d in every forward pass, and `before` once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
            before(self)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            change(self)
            return self.blocks(inputs)

    class Changing(Pictures):
        def build_model(self) -> nn.Module:
            return Model()

    return Changing


class Box:
    """An object with a number."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


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
    layout, knowing = None, set()
    while stage is None or stage.progress.examples_done < 100:
        now = draw.choice(copies)
        if stage is not None and now not in knowing:
            stage = dataclasses.replace(stage, optimizer=layout)
            knowing.add(now)
        stage = now.advance(draw.randint(1, 3), None if now is last else stage)
        stage, last = from_plain(json.loads(json.dumps(to_plain(stage), allow_nan=False))), now
        assert not stage.stuck
        if stage.optimizer is not None:
            layout, knowing = stage.optimizer, {now}
            stage = dataclasses.replace(stage, optimizer=None)
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


@pytest.mark.parametrize("kind", [Dropping, Normed, Rows, Tied, Averaging, Recurrent])
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
        (lambda parameters, rate: Counting(parameters, lr=rate), "state in attributes of its own"),
        (lambda parameters, rate: _scheduled(torch.optim.SGD(parameters, lr=rate)), "has hooks"),
        (lambda parameters, rate: _wrapped(torch.optim.SGD(parameters, lr=rate)), "wraps its optimiser's steps"),
        (lambda parameters, rate: _set(torch.optim.SGD(parameters, lr=rate), {"a": 1}), "'own' of type dict"),
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


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (lambda model: setattr(model, "count", 0), lambda model: setattr(model, "count", model.count + 1)),
        (lambda model: setattr(model, "seen", []), lambda model: model.seen.append(1)),
        (lambda model: setattr(model, "seen", {"a": [0]}), lambda model: model.seen["a"].append(0)),
        (lambda model: setattr(model, "box", Box()), lambda model: model.box()),
        (lambda model: setattr(model, "free", torch.zeros(2)), lambda model: model.free.add_(1)),
        (lambda model: setattr(model, "draw", random.Random(1)), lambda model: model.draw.random()),
        (lambda model: setattr(model, "draw", torch.Generator()), lambda model: torch.rand(1, generator=model.draw)),
        (lambda model: setattr(model, "draw", np.random.default_rng(1)), lambda model: model.draw.random()),
    ],
)
def test_state_in_attributes_is_noticed(before: Callable[[nn.Module], None], change: Any) -> None:
    workload = _with_attribute(change, before)("changing")
    shared = SharedTraining(training(workload, first_weights(workload)), new_memory("a"), new_memory("b"))
    assert "keeps state in attributes" in shared.advance(1, None).stuck
    assert "keeps state in attributes" in shared.advance(1, None).stuck
    shared.close()


def test_views_of_one_memory_are_noticed() -> None:
    def before(model: nn.Module) -> None:
        model.register_buffer("view", model.blocks[1].weight.detach()[0])  # type: ignore[index, union-attr]

    workload = _with_attribute(lambda model: None, before)("viewing")
    expected = training(workload, first_weights(workload))
    shared = SharedTraining(training(workload, first_weights(workload)), new_memory("a"), new_memory("b"))
    assert "lie in one memory" in shared.advance(13, None).stuck
    expected.advance(13, lambda: False)
    expected.finish()
    assert same(shared.finish(None), expected.arrays)
    shared.close()


def _scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return optimizer


def _set(optimizer: torch.optim.Optimizer, value: Any) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["own"] = value
    return optimizer


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
