"""Fused trainings are the separate ones, to rounding; what cannot be fused is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpu_runtime.bench.floor import SoloTimes
from gpu_runtime.bench.fused import FusedTraining, VmapFused, unsuitable
from gpu_runtime.bench.mixes import MIXES, Share, Work, start_arrays
from gpu_runtime.bench.models import NUM_HELD, build
from gpu_runtime.bench.variants import TooSlowError, VariantError
from gpu_runtime.contracts import DataSpec
from gpu_runtime.device import discover
from gpu_runtime.work import TrainingError
from gpu_runtime.workload import Workload

ONE_CORE = discover(1, "cpu")


class InFloat64:
    """A workload whose weights and inputs are float64: Adam makes of rounding in float32 whole steps within a few."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def build_model(self) -> nn.Module:
        return self._workload.build_model().double()

    def train_examples(self) -> Any:
        examples = self._workload.train_examples()
        if not examples.inputs.is_floating_point():
            return examples
        return replace(examples, inputs=examples.inputs.double())


def share(task: str, num_steps: int = 12, wrap: Any = lambda workload: workload) -> Share:
    workload = wrap(build(task, DataSpec()))
    step = SoloTimes(one_s=1.0, all_s=1.0)
    return Share(workload=workload, arrays=start_arrays(workload), num_steps=num_steps, step=step)


def work_of(*tasks: str, num_steps: int = 12) -> Work:
    return {task: share(task, num_steps) for task in tasks}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["resnet8", "perceptron", "word-bag", "watch", "digits"])
def test_each_task_learns_what_it_learns_alone(kind: str) -> None:
    # SGD with momentum or Adam, over the end of an epoch; the tasks start apart and see other batches.
    work = {task: share(task, wrap=InFloat64) for task in (kind, f"{kind}.2", f"{kind}.3")}
    second = work[f"{kind}.2"]
    work[f"{kind}.2"] = replace(second, arrays={name: array * 1.5 for name, array in second.arrays.items()})
    num_steps = NUM_HELD // second.workload.batch_size + 3
    work = {task: replace(each, num_steps=num_steps) for task, each in work.items()}
    assert unsuitable(work) == ""
    fused = FusedTraining(work, ONE_CORE)
    for _ in range(num_steps):
        fused.step()
    together = fused.finish()
    for task, each in work.items():
        alone = each.training(ONE_CORE)
        while not alone.finished:
            alone.step()
        alone.finish()
        for name, array in alone.arrays.items():
            assert array.dtype == np.float64
            np.testing.assert_allclose(together[task][name], array, rtol=1e-9, atol=1e-11, err_msg=f"{task} {name}")
    first, second_arrays = (next(iter(together[task].values())) for task in list(work)[:2])
    assert not np.allclose(first, second_arrays)


def test_the_variant_runs_all_steps_and_stops_at_its_deadline() -> None:
    variant, threads = VmapFused(ONE_CORE), torch.get_num_threads()
    run = variant.run(work_of("perceptron", "perceptron.2"), 60.0)
    assert run.done_fraction == 1.0
    assert run.finish_s == dict.fromkeys(("perceptron", "perceptron.2"), run.seconds)
    cut = variant.run(work_of("perceptron", "perceptron.2", num_steps=10**5), 0.3)
    assert 0.0 < cut.done_fraction < 0.5
    with pytest.raises(TooSlowError):
        variant.run(work_of("perceptron", "perceptron.2"), 0.0)
    assert torch.get_num_threads() == threads


def test_losses_that_are_not_finite_are_noticed() -> None:
    work = work_of("perceptron", "perceptron.2")
    work["perceptron.2"].workload.loss = lambda outputs, targets: outputs.sum() * float("nan")  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not finite"):
        FusedTraining(work, ONE_CORE).step()
    with pytest.raises(VariantError, match="not finite"):
        VmapFused(ONE_CORE).run(work, 10.0)


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        (("resnet8",), "there is nothing to fuse"),
        (("resnet8", "lenet"), "the tasks differ in architecture"),
        (("lenet", "digits"), "the tasks differ in architecture"),
        (("resnet8", "resnet8.2"), ""),
    ],
)
def test_what_can_be_fused(tasks: tuple[str, ...], reason: str) -> None:
    assert unsuitable(work_of(*tasks)) == reason


def test_only_twins_are_fused() -> None:
    fusable = [mix for mix, kind in MIXES.items() if not unsuitable(work_of(*kind.tasks))]
    assert fusable == ["twins"]


def test_other_reasons() -> None:
    work = dict(work_of("perceptron", "perceptron.2"))
    assert unsuitable(work | {"perceptron.2": share("perceptron.2", 13)}) == "the tasks differ in number of steps"
    work["perceptron.2"].workload.batch_size = 8
    assert unsuitable(work) == "the tasks differ in batch size"

    def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=learning_rate)

    work = dict(work_of("perceptron", "perceptron.2"))
    work["perceptron.2"].workload.optimizer = adam  # type: ignore[method-assign]
    assert unsuitable(work) == "the tasks differ in optimiser"
    for each in (work := dict(work_of("perceptron", "perceptron.2"))).values():
        each.workload.build_model = lambda: nn.Sequential(nn.Linear(36, 6), nn.BatchNorm1d(6))  # type: ignore[method-assign]
    assert unsuitable(work) == "the model has buffers, which steps may change"
    for each in (work := dict(work_of("perceptron", "perceptron.2"))).values():
        each.workload.optimizer = lambda parameters, rate: torch.optim.Rprop(parameters, lr=rate)  # type: ignore[method-assign]
    assert unsuitable(work) == "the optimiser may look at a parameter as a whole"


def test_an_operator_that_cannot_be_mapped_fails_the_variant() -> None:
    work = work_of("perceptron", "perceptron.2")
    for each in work.values():
        inner = each.workload.build_model

        def build_model(inner=inner) -> nn.Module:  # type: ignore[no-untyped-def]
            model = inner()
            model.register_forward_pre_hook(lambda module, args: print(args[0].sum().item()))
            return model

        each.workload.build_model = build_model  # type: ignore[method-assign]
    with pytest.raises(VariantError, match="vmap"):
        VmapFused(ONE_CORE).run(work, 10.0)
