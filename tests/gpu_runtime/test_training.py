"""Local training as a pure function, and what enters its result."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import Dropping, Empty, Normed, Pictures, build, start_arrays

from gpu_runtime.contracts import DataSpec, TaskPlan
from gpu_runtime.evaluation import TaskEvaluation
from gpu_runtime.randomness import sample_batches, seed_of, seeded_draws
from gpu_runtime.state import StateError
from gpu_runtime.training import Origin, TaskTraining, TrainingError

CPU = torch.device("cpu")
ORIGIN = Origin(client="a", server_round=1, seed=7)


def plan(task: str = "pictures", **changes: Any) -> TaskPlan:
    return dataclasses.replace(TaskPlan(task=task, num_examples=60), **changes)


def arrays_of(task: str) -> dict[str, np.ndarray]:
    return {key.partition("/")[2]: array for key, array in start_arrays(task).items()}


def training(task: str = "pictures", arrays: Any = None, origin: Origin = ORIGIN, **changes: Any) -> TaskTraining:
    return TaskTraining(
        workload=build(task, DataSpec()),
        plan=plan(task, **changes),
        arrays=arrays_of(task) if arrays is None else arrays,
        origin=origin,
        device=CPU,
    )


def trained(task: str = "pictures", **options: Any) -> TaskTraining:
    work = training(task, **options)
    while not work.finished:
        work.step()
    work.finish()
    return work


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------------- randomness


@given(held=st.integers(1, 40), wanted=st.integers(1, 120), size=st.integers(1, 50), seed=st.integers(0, 2**62))
def test_every_example_is_used_equally_often(held: int, wanted: int, size: int, seed: int) -> None:
    batches = list(sample_batches(held, wanted, size, seed))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    counts = Counter(int(index) for batch in batches for index in batch)
    assert sum(counts.values()) == wanted
    used = [counts[index] for index in range(held)]
    assert set(used) <= {wanted // held, -(-wanted // held)}


def test_examples_are_shuffled_anew_each_epoch() -> None:
    first, second = sample_batches(50, 100, 50, seed=1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert first.tolist() != second.tolist()


def test_seeds_differ_with_every_argument_and_stay() -> None:
    base = (1, 2, "a", "b", "c")
    others = [(2, 2, "a", "b", "c"), (1, 3, "a", "b", "c"), (1, 2, "ab", "", "c"), (1, 2, "a", "b", "d")]
    assert len({seed_of(*each) for each in [base, *others]}) == 5
    assert seed_of(*base) == 5737274763347373915


def test_seeded_draws_leave_the_generator_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded_draws(5, CPU):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded_draws(5, CPU):
        assert torch.equal(torch.rand(3), drawn)


# --------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("task", ["pictures", "dropping", "normed", "rows"])
def test_the_result_depends_on_nothing_but_the_arguments(task: str) -> None:
    torch.manual_seed(1)
    once = trained(task)
    torch.manual_seed(2)
    torch.rand(10)
    before = torch.get_rng_state()
    again = trained(task)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(once.arrays, again.arrays)
    assert once.losses == again.losses


@pytest.mark.parametrize("task", ["pictures", "dropping"])
def test_seed_round_and_client_change_the_result(task: str) -> None:
    base = trained(task).arrays
    for change in ({"seed": 8}, {"server_round": 2}, {"client": "b"}):
        assert not same(base, trained(task, origin=dataclasses.replace(ORIGIN, **change)).arrays)


def test_an_epoch_of_sgd_by_hand() -> None:
    workload, arrays = Pictures("pictures"), arrays_of("pictures")
    workload.channels_last = False  # type: ignore[attr-defined]
    work = TaskTraining(workload=workload, plan=plan(num_examples=20), arrays=arrays, origin=ORIGIN, device=CPU)
    while not work.finished:
        work.step()
    work.finish()

    model = workload.build_model()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    examples, losses = workload.train_examples(), []
    for indices in sample_batches(50, 20, 8, seed_of(7, 1, "a", "pictures", "examples")):
        inputs, targets = examples.batch(indices)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(targets)))
    assert same(work.arrays, {name: value.numpy() for name, value in model.state_dict().items()})
    assert [n for _, n in losses] == [8, 8, 4]
    assert work.losses.first == losses[0][0]
    assert work.losses.last == losses[-1][0]
    assert work.losses.mean == pytest.approx(sum(loss * n for loss, n in losses) / 20)


def test_training_learns() -> None:
    losses = trained("rows", num_examples=400, learning_rate=0.002).losses
    assert losses.first is not None
    assert losses.last is not None
    assert losses.last < 0.5 * losses.first


def test_overrides_of_batch_size_and_learning_rate() -> None:
    assert trained(batch_size=20).steps_done == 3
    assert trained().steps_done == 8
    start = arrays_of("pictures")
    assert same(trained(learning_rate=0.0).arrays, start)
    assert not same(trained(learning_rate=0.01).arrays, trained(learning_rate=0.02).arrays)


def test_fedprox_pulls_towards_the_start() -> None:
    start = arrays_of("pictures")

    def distance(mu: float) -> float:
        end = trained(num_examples=200, proximal_mu=mu).arrays
        return float(sum(((end[name] - start[name]) ** 2).sum() for name in start))

    assert distance(10.0) < distance(1.0) < distance(0.0)


def test_fedprox_gradient_by_hand() -> None:
    # The pull is 0 in the first step; in the second it is mu (w1 - w0), seen here without momentum or loss gradient.
    class Flat(Pictures):
        calls = 0

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return outputs.sum() * (1.0 if self.calls == 1 else 0.0)

        def optimizer(self, parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=learning_rate)

    def after(steps: int) -> dict[str, np.ndarray]:
        changes = plan(num_examples=8 * steps, learning_rate=0.1, proximal_mu=2.0)
        work = TaskTraining(workload=Flat("pictures"), plan=changes, arrays=start, origin=ORIGIN, device=CPU)
        while not work.finished:
            work.step()
        work.finish()
        return work.arrays

    start = arrays_of("pictures")
    one, two = after(1), after(2)
    for name in start:
        np.testing.assert_allclose(two[name], one[name] - 0.1 * 2.0 * (one[name] - start[name]), atol=1e-6)


def test_buffers_are_trained_and_keep_their_types() -> None:
    arrays = trained("normed").arrays
    assert arrays["blocks.0.1.num_batches_tracked"] == 8
    assert arrays["blocks.0.1.num_batches_tracked"].dtype == np.int64
    assert all(array.flags.c_contiguous for array in arrays.values())


def test_the_callers_arrays_are_not_written_to() -> None:
    arrays = arrays_of("pictures")
    kept = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    trained(arrays=arrays)
    assert same(arrays, kept)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"blocks.2.1.bias": None}, "arrays lack 'blocks.2.1.bias'"),
        ({"extra": np.zeros(1)}, "arrays hold 'extra', which the model does not have"),
        ({"blocks.2.1.bias": np.zeros(4, np.float32)}, r"'blocks.2.1.bias' has shape \[4\], the model wants \[3\]"),
        ({"blocks.2.1.bias": np.zeros(3, np.float64)}, "has dtype float64, the model wants float32"),
        ({"blocks.2.1.bias": np.zeros(3, ">f4")}, "has dtype >f4, the model wants float32"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, Any], complaint: str) -> None:
    arrays = {name: array for name, array in (arrays_of("pictures") | change).items() if array is not None}
    with pytest.raises(StateError, match=complaint):
        training(arrays=arrays).step()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_examples": 0}, "asks for 0 examples"),
        ({"batch_size": -1}, "batches of -1"),
        ({"split_point": 1}, "splits the model at block 1"),
        ({"share": 0.0}, "share of 0.0"),
        ({"share": float("nan")}, "share of nan"),
        ({"learning_rate": float("nan")}, "learning_rate to nan"),
        ({"proximal_mu": -0.1}, "proximal_mu to -0.1"),
    ],
)
def test_plans_that_cannot_be_followed(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TrainingError, match=complaint):
        training(**changes)


def test_no_examples() -> None:
    with pytest.raises(TrainingError, match="holds no training examples"):
        TaskTraining(workload=Empty("empty"), plan=plan("empty"), arrays={}, origin=ORIGIN, device=CPU)


def test_weights_that_are_not_finite_are_refused_at_the_end() -> None:
    class Overflowing(Pictures):
        """The loss of every step is fine, the step itself is not."""

        def optimizer(self, parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
            listed = list(parameters)
            optimizer = super().optimizer(listed, learning_rate)
            optimizer.register_step_post_hook(lambda *_: listed[0].detach().fill_(float("inf")))
            return optimizer

    arrays = arrays_of("pictures")
    workload, once = Overflowing("pictures"), plan(num_examples=8)
    work = TaskTraining(workload=workload, plan=once, arrays=arrays, origin=ORIGIN, device=CPU)
    work.step()
    assert work.losses.last is not None
    with pytest.raises(StateError, match=r"weights 'blocks.0.0.weight' are not finite after training"):
        work.finish()


def test_finishing_lets_the_model_go() -> None:
    work = trained()
    assert work._model is None
    assert work._optimizer is None


def test_memory_format_does_not_change_what_is_learnt() -> None:
    plain = Pictures("pictures")
    plain.channels_last = False  # type: ignore[attr-defined]
    results = []
    for workload in (Pictures("pictures"), plain):
        work = TaskTraining(workload=workload, plan=plan(), arrays=arrays_of("pictures"), origin=ORIGIN, device=CPU)
        while not work.finished:
            work.step()
        work.finish()
        results.append(work.arrays)
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("kind", [Pictures, Dropping, Normed])
def test_evaluation_by_hand(kind: type[Pictures]) -> None:
    workload = kind(kind.__name__.lower())
    arrays = arrays_of(workload.name)
    model = workload.build_model()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    inputs, targets = workload.train_examples().batch(range(50))
    with torch.no_grad():
        outputs = model.eval()(inputs)
    work = TaskEvaluation(workload=workload, arrays=arrays, examples=workload.train_examples(), device=CPU)
    while not work.finished:
        work.step()
    work.finish()
    result = work.results
    assert result["num-examples"] == 50
    assert result["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert result["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)), rel=1e-4)
