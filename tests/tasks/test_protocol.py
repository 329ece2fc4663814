"""What every built-in task must keep: one suite, run over all tasks whose data comes with installed packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpu_runtime.contracts import DataSpec, Partition
from tasks import driving, tiny
from tasks.base import Task, TensorExamples
from tasks.data import Once, loaded
from tasks.registry import BUILT_IN, SUITES, build, check_model

NUM_EXAMPLES = {
    "digits": (4000, 1000),
    "detection": (6000, 500),
    "segmentation": (6000, 500),
    "watch": (3675, 1002),
    "breast-cancer": (400, 169),
    "tiny-digits": (1400, 397),
    "tiny-faces": (150, 50),
    "tiny-scenes": (800, 100),
}
NO_DATA = ("fashion-mnist", "cifar10")

every_task = pytest.mark.parametrize("ref", sorted(BUILT_IN))
every_loadable_task = pytest.mark.parametrize("ref", sorted(NUM_EXAMPLES))


def test_every_built_in_task_is_covered() -> None:
    assert set(NUM_EXAMPLES) | set(NO_DATA) == set(BUILT_IN)
    assert {name for suite in SUITES.values() for name in suite} <= set(NUM_EXAMPLES)


def batch_of(ref: str, count: int) -> tuple[Task, Any, Any]:
    task = build(ref, DataSpec())
    return task, *task.synthetic_batch(count, torch.Generator().manual_seed(3))


def part(value: Any, chosen: slice) -> Any:
    return tuple(one[chosen] for one in value) if isinstance(value, tuple) else value[chosen]


@every_task
def test_name_is_the_reference(ref: str) -> None:
    assert build(ref, DataSpec()).name == ref


@every_task
def test_model_can_be_cut_at_every_boundary(ref: str) -> None:
    task, inputs, _ = batch_of(ref, 2)
    check_model(task)
    model = task.build_model()
    whole = model(inputs)
    assert len(model.blocks) >= 3
    for cut in range(1, len(model.blocks)):
        boundary = model.blocks[:cut](inputs)
        assert isinstance(boundary, torch.Tensor | tuple)
        assert torch.equal(model.blocks[cut:](boundary), whole)


@every_task
def test_gradients_cross_every_boundary(ref: str) -> None:
    task, inputs, targets = batch_of(ref, 2)
    model = task.build_model()
    task.loss(model(inputs), targets).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@every_task
def test_loss_of_a_batch_is_the_mean_over_its_examples(ref: str) -> None:
    task, inputs, targets = batch_of(ref, 6)
    with torch.no_grad():
        outputs = task.build_model()(inputs)
        whole = task.loss(outputs, targets)
        first = task.loss(outputs[:2], part(targets, slice(0, 2)))
        rest = task.loss(outputs[2:], part(targets, slice(2, 6)))
    assert whole.shape == ()
    assert float(whole) == pytest.approx(float((2 * first + 4 * rest) / 6), rel=1e-5)


@every_task
def test_outputs_of_an_example_do_not_depend_on_its_batch(ref: str) -> None:
    task, inputs, _ = batch_of(ref, 4)
    model = task.build_model()
    assert torch.allclose(model(inputs)[1:3], model(inputs[1:3]), atol=1e-5)


@every_task
def test_state_has_no_batch_statistics_and_is_contiguous(ref: str) -> None:
    model = build(ref, DataSpec()).build_model()
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert all(value.dtype == torch.float32 and value.is_contiguous() for value in model.state_dict().values())


@every_task
def test_model_follows_the_random_state(ref: str) -> None:
    task = build(ref, DataSpec())
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.cat([value.flatten() for value in task.build_model().state_dict().values()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@every_task
def test_synthetic_batch_feeds_loss_and_metrics(ref: str) -> None:
    task, inputs, targets = batch_of(ref, 3)
    again_inputs, _ = task.synthetic_batch(3, torch.Generator().manual_seed(3))
    assert torch.equal(inputs, again_inputs)
    outputs = task.build_model()(inputs)
    assert task.loss(outputs, targets).isfinite()
    metrics = task.metrics()
    metrics.update(outputs, targets)
    values = metrics.compute()
    assert all(type(value) is float and 0.0 <= value <= 1.0 for value in values.values())
    assert task.primary_metric in values


@every_loadable_task
def test_number_of_examples(ref: str) -> None:
    task = build(ref, DataSpec())
    assert (len(task.train_examples()), len(task.test_examples())) == NUM_EXAMPLES[ref]


@every_loadable_task
def test_synthetic_batch_looks_like_the_data(ref: str) -> None:
    task, inputs, targets = batch_of(ref, 2)
    real_inputs, real_targets = task.train_examples().batch([0, 1])
    for made, real in zip(_flat(inputs, targets), _flat(real_inputs, real_targets), strict=True):
        assert (made.shape, made.dtype) == (real.shape, real.dtype)


@every_loadable_task
def test_training_and_test_inputs_are_disjoint(ref: str) -> None:
    task = build(ref, DataSpec())
    train, test = (_fingerprints(examples) for examples in (loaded(task).train, task.test_examples()))
    assert not train & test


@every_loadable_task
def test_loading_is_a_pure_function_of_the_seed(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "NUM_TRAIN_SCENES", 300)
    loads = []
    for _ in range(2):
        monkeypatch.setattr(driving, "_scenes", Once())
        monkeypatch.setattr(tiny, "_scenes", Once())
        loads.append(build(ref, DataSpec(seed=5)).load())
    first, again = loads
    assert torch.equal(first.test.inputs, again.test.inputs)
    for one, other in zip(
        _flat(first.train.inputs, first.train.targets), _flat(again.train.inputs, again.train.targets), strict=True
    ):
        assert one is not other
        assert torch.equal(one, other)
    assert (first.partition_labels == again.partition_labels).all()


@every_loadable_task
def test_inputs_are_of_order_one(ref: str) -> None:
    inputs = build(ref, DataSpec()).train_examples().inputs
    assert inputs.isfinite().all()
    assert abs(float(inputs.mean())) < 1.0
    assert 0.3 < float(inputs.std()) < 2.0


@every_loadable_task
def test_parts_hold_all_training_examples(ref: str) -> None:
    shares = (0.5, 0.3, 0.2)
    parts = [
        build(ref, DataSpec(partition=Partition(index=index, count=3, shares=shares))).train_examples()
        for index in range(3)
    ]
    total = NUM_EXAMPLES[ref][0]
    assert sum(map(len, parts)) == total
    assert all(abs(len(one) - share * total) <= 1 for one, share in zip(parts, shares, strict=True))


@every_loadable_task
def test_a_few_steps_lower_the_loss(ref: str) -> None:
    task = build(ref, DataSpec())
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.optimizer(model.parameters(), task.learning_rate)
    inputs, targets = task.train_examples().batch(range(16))
    losses = []
    for _ in range(12):
        loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def _flat(*values: Any) -> list[torch.Tensor]:
    return [one for value in values for one in (value if isinstance(value, tuple) else (value,))]


def _fingerprints(examples: TensorExamples) -> set[bytes]:
    return {row.numpy().tobytes() for row in examples.inputs}
