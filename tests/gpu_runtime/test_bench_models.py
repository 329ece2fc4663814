"""The suites' models in the benchmark against those of the tasks."""

from __future__ import annotations

import pytest
import torch

from gpu_runtime.bench.models import KINDS, build
from gpu_runtime.contracts import DataSpec
from gpu_runtime.transfer import map_tensors

SUITE_TASKS = ("digits", "detection", "segmentation", "watch", "breast-cancer")


@pytest.mark.parametrize("name", SUITE_TASKS)
def test_suite_models_are_those_of_the_tasks(name: str) -> None:
    pytest.importorskip("torchmetrics", reason="the tasks need their packages")
    from tasks import registry

    ours, theirs = build(name, DataSpec()), registry.build(name, DataSpec())
    assert ours.batch_size == theirs.batch_size
    one, other = ours.build_model(), theirs.build_model()
    assert {key: value.shape for key, value in one.state_dict().items()} == {
        key: value.shape for key, value in other.state_dict().items()
    }
    one.load_state_dict(other.state_dict())
    assert type(ours.optimizer(one.parameters(), 0.1)) is type(theirs.optimizer(other.parameters(), 0.1))
    inputs, targets = theirs.synthetic_batch(6, torch.Generator().manual_seed(1))
    outputs = one(inputs)
    assert torch.equal(outputs, other(inputs))
    assert torch.equal(ours.loss(outputs, map_tensors(_as_long, targets)), theirs.loss(outputs, targets))
    own_inputs, own_targets = ours.synthetic_batch(6, torch.Generator().manual_seed(1))
    assert (own_inputs.shape, own_inputs.dtype) == (inputs.shape, inputs.dtype)
    assert theirs.loss(outputs, own_targets).isfinite()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_trains(name: str) -> None:
    workload = build(name, DataSpec())
    model = workload.build_model().train()
    optimizer = workload.optimizer(model.parameters(), 0.01)
    inputs, targets = workload.train_examples().batch([0, 1, 5, 5])
    torch.autograd.backward(workload.loss(model(inputs), targets))
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
    optimizer.step()


def test_plain_models_have_the_sizes_of_docs() -> None:
    sizes = {name: sum(p.numel() for p in kind.build().parameters()) for name, kind in KINDS.items()}
    assert 55_000 < sizes["lenet"] < 65_000
    assert 70_000 < sizes["resnet8"] < 85_000
    assert 50_000 < sizes["grid-detector"] < 75_000
    assert 25_000 < sizes["unet"] < 35_000
    assert sizes["word-bag"] == 10_000 * 64 + 64 * 10 + 10


def test_twins_have_names_of_their_own() -> None:
    assert (build("lenet.2", DataSpec()).name, build("lenet", DataSpec()).name) == ("lenet.2", "lenet")


def _as_long(value: torch.Tensor) -> torch.Tensor:
    return value.long() if value.dtype == torch.uint8 else value
