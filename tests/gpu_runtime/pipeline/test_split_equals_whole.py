"""Split training gives what unsplit training gives: for every cut, every number of micro-batches, every optimiser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from local_channel import LocalChannel
from runtime_fakes import Blocks, Rows
from split_fakes import (
    Dropping,
    Single,
    Skipping,
    Split,
    arrays_of,
    distance,
    key_of,
    run,
    service,
    split_arrays,
    split_training,
    whole_arrays,
    whole_training,
)
from torch import nn

from gpu_runtime.pipeline.halves import join_halves

Make = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
MOMENTUM: Make = lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1)  # noqa: E731
ADAM: Make = lambda p, lr: torch.optim.AdamW(p, lr=lr / 10, weight_decay=0.1)  # noqa: E731
# 20 steps of batches of 7, the last one of 3.
TWENTY_STEPS = 19 * 7 + 3


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("split_point", [1, 2, 3])
def test_every_cut_and_every_number_of_micro_batches(split_point: int, micro_batches: int) -> None:
    workload = Split(make=MOMENTUM)
    split = split_arrays(workload, split_point=split_point, micro_batches=micro_batches, num_examples=TWENTY_STEPS)
    assert distance(split, whole_arrays(workload, num_examples=TWENTY_STEPS)) < 1e-10


@pytest.mark.parametrize("options", [{}, {"proximal_mu": 0.5}, {"learning_rate": 0.001, "batch_size": 5}])
@pytest.mark.parametrize("make", [MOMENTUM, ADAM])
def test_optimisers_and_overrides(make: Make, options: dict[str, Any]) -> None:
    workload = Split(make=make)
    split = split_arrays(workload, split_point=2, micro_batches=3, num_examples=TWENTY_STEPS, **options)
    whole = whole_arrays(workload, num_examples=TWENTY_STEPS, **options)
    assert distance(split, whole) < 1e-10
    assert distance(split, arrays_of(workload)) > 1e-3
    if options:
        assert distance(split, split_arrays(workload, split_point=2, num_examples=TWENTY_STEPS)) > 1e-4


@pytest.mark.parametrize("split_point", [1, 2, 3, 4])
def test_skip_connections_cross_the_cut(split_point: int) -> None:
    workload = Skipping()
    split = split_arrays(workload, split_point=split_point, micro_batches=3, num_examples=TWENTY_STEPS)
    assert distance(split, whole_arrays(workload, num_examples=TWENTY_STEPS)) < 1e-10


class Frozen(Split):
    """Some blocks are frozen, and the optimiser is given what is left: for one of the halves that is nothing."""

    def __init__(self, *frozen: int) -> None:
        super().__init__(make=lambda p, lr: torch.optim.SGD([each for each in p if each.requires_grad], lr, 0.9))
        self.frozen = frozen

    def blocks(self) -> nn.Module:
        model = super().blocks()
        for index in self.frozen:
            model.blocks[index].requires_grad_(False)
        return model


@pytest.mark.parametrize(("frozen", "split_point"), [((0,), 1), ((0, 1), 2), ((0, 1), 1), ((3,), 3), ((2, 3), 1)])
def test_a_half_that_is_frozen(frozen: tuple[int, ...], split_point: int) -> None:
    workload = Frozen(*frozen)
    split = split_arrays(workload, split_point=split_point, micro_batches=3, num_examples=TWENTY_STEPS)
    assert distance(split, whole_arrays(workload, num_examples=TWENTY_STEPS)) < 1e-10


class InPlace(nn.Module):
    """Works in place on the first of its inputs, and nothing but its code says so."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, state: Any) -> torch.Tensor:
        first, second = state if isinstance(state, tuple) else (state, 0.0)
        return self.body(nn.functional.relu_(first) + second)


class Twice(nn.Module):
    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, inputs


class Hidden(Split):
    def blocks(self) -> nn.Module:
        body = nn.Sequential(nn.Tanh(), nn.Linear(8, 3))
        return Blocks(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), Twice(), InPlace(body))


class Plain(Split):
    def blocks(self) -> nn.Module:
        return Blocks(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), InPlace(nn.Linear(8, 3)))


@pytest.mark.parametrize(("workload", "split_point"), [(Hidden(), 1), (Hidden(), 2), (Plain(), 1)])
def test_blocks_that_work_in_place_unannounced(workload: Split, split_point: int) -> None:
    split = split_arrays(workload, split_point=split_point, micro_batches=3, num_examples=TWENTY_STEPS)
    assert distance(split, whole_arrays(workload, num_examples=TWENTY_STEPS)) < 1e-10


def test_a_device_stage_without_parameters() -> None:
    workload = Dropping()
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), split_point=1)
        run(training)
        assert training.arrays == {}
        assert set(stages.collect(key_of("split")).arrays) == set(arrays_of(workload))


@pytest.mark.parametrize("micro_batches", [1, 3, 7])
@pytest.mark.parametrize("split_point", [1, 2, 3])
def test_the_first_gradient_in_single_precision(split_point: int, micro_batches: int) -> None:
    rate = 0.5
    workload = Single(make=lambda parameters, _: torch.optim.SGD(parameters, lr=rate))
    start = arrays_of(workload)

    def gradient(after: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: (start[key].astype(float) - after[key]) / rate for key in start}

    split = split_arrays(workload, split_point=split_point, micro_batches=micro_batches, num_examples=7)
    assert distance(gradient(split), gradient(whole_arrays(workload, num_examples=7))) < 1e-5


def test_losses_are_those_of_whole_training() -> None:
    workload = Split()
    whole = whole_training(workload)
    run(whole)
    with service(workload) as stages:
        split = split_training(workload, LocalChannel(stages), split_point=2, micro_batches=3)
        run(split)
    for name in ("first", "mean", "last"):
        assert getattr(split.losses, name) == pytest.approx(getattr(whole.losses, name), rel=1e-10)


def test_dropout_repeats_and_differs_from_step_to_step() -> None:
    workload = Dropping()
    one = split_arrays(workload, split_point=2, micro_batches=2)
    assert distance(one, split_arrays(workload, split_point=2, micro_batches=2)) == 0
    assert 1e-3 < distance(one, whole_arrays(workload)) < 1
    assert 1e-3 < distance(one, split_arrays(workload, split_point=2, micro_batches=3)) < 1


def test_dropout_keeps_its_expectation() -> None:
    class Summing(Dropping):
        """The loss is linear in the activations: over many masks, the mean gradient is that without dropout."""

        batch_size = 64

        def build_model(self) -> nn.Module:
            model = super().build_model()
            nn.init.zeros_(model.blocks[2][1].bias)
            return model

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.sum(1).mean()

    workload = Summing(make=lambda parameters, _: torch.optim.SGD(parameters, lr=1e-6), num_examples=64)
    start, num_examples = arrays_of(workload), 64 * 60
    after = split_arrays(workload, split_point=2, micro_batches=4, num_examples=num_examples)
    key = "blocks.1.0.bias"
    moved = (start[key] - after[key]) / 1e-6 / 60
    # d loss / d hidden bias, and each of two dropouts keeps half of the units and doubles them.
    expected = start["blocks.2.1.weight"].sum(0)
    # The standard error of 60 * 64 masks of variance 3 is 0.028 of each.
    assert np.abs(moved - expected).max() < 0.15 * np.abs(expected).max()


def test_two_tasks_at_once_give_what_they_give_alone() -> None:
    one, two = Split("one"), Skipping("two")
    alone = {each.name: split_arrays(each, split_point=2, num_examples=TWENTY_STEPS) for each in (one, two)}
    with service(one, two, cores=2) as stages:
        trainings = [
            split_training(each, LocalChannel(stages), split_point=2, num_examples=TWENTY_STEPS) for each in (one, two)
        ]
        threads = [threading.Thread(target=run, args=(training,)) for training in trainings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each, training in zip((one, two), trainings, strict=True):
            half = stages.collect(key_of(each.name))
            joined = join_halves(training.arrays, half.arrays, list(arrays_of(each)))
            assert distance(joined, alone[each.name]) < 1e-10
            assert distance(joined, whole_arrays(each, num_examples=TWENTY_STEPS)) < 1e-10


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "int8"])
def test_lossy_encodings_train_to_a_similar_loss(encoding: str) -> None:
    workload = Single()
    whole = whole_training(workload, num_examples=210)
    run(whole)
    with service(workload) as stages:
        split = split_training(workload, LocalChannel(stages), split_point=2, num_examples=210, encoding=encoding)
        run(split)
    assert whole.losses.last is not None
    assert split.losses.mean == pytest.approx(whole.losses.mean, rel=0.1)


def test_the_halves_hold_the_keys_of_the_whole_model_once() -> None:
    workload = Rows("rows")
    split = split_arrays(workload, split_point=2)
    assert list(split) == list(arrays_of(workload))
    assert {key: array.dtype for key, array in split.items()} == {k: a.dtype for k, a in arrays_of(workload).items()}
