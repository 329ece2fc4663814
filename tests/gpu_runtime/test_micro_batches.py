"""Steps that run out of memory are repeated in smaller pieces, and nobody can tell from the result."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import Dropping, Examples, Normed, Pictures, Rows, hold, plan_of, start_arrays
from torch import nn

from gpu_runtime.contracts import FAILED, TRAINED, DataSpec, Report, TaskPlan, from_json, to_json
from gpu_runtime.device import Device
from gpu_runtime.micro_batches import Buffers, MicroBatches, cut, is_out_of_memory
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.training import Origin, TaskTraining, TrainingError
from gpu_runtime.workload import Workload

CPU = torch.device("cpu")
COMPLAINT = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for a second thread."""
    width = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(width)


class Short:
    """Mixed into a workload: runs out of memory at the calls `at`, or whenever more than `most` examples are seen.

    Attributes:
        calls: examples of each call of the loss, those that failed included.
        at: calls of the loss, from 1, that fail.
    """

    error: BaseException = torch.OutOfMemoryError(COMPLAINT)

    def __init__(self, *args: Any, at: Iterable[int] = (), most: int = 10**9, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[int] = []
        self.at, self.most = list(at), most
        self.held: list[weakref.ref[torch.Tensor]] = []

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(targets))
        assert [each for each in self.held if each() is not None] == [], "the failed attempt still holds memory"
        loss: torch.Tensor = super().loss(outputs, targets)  # type: ignore[misc]
        if len(self.calls) in self.at or len(targets) > self.most:
            self.held = [weakref.ref(outputs), weakref.ref(loss)]
            raise type(self.error)(*self.error.args)  # a new one: a kept exception would keep its frames
        return loss


class ShortPictures(Short, Pictures):
    pass


class ShortDropping(Short, Dropping):
    pass


class ShortNormed(Short, Normed):
    pass


class Doubles(Short, Pictures):
    """In float64, with batches of 32 and a model that sees each example alone."""

    batch_size = 32

    def build_model(self) -> nn.Module:
        return super().build_model().double()

    def train_examples(self) -> Examples:
        examples = super().train_examples()
        return Examples(examples.inputs.double(), examples.targets)


def arrays_of(workload: Workload) -> dict[str, np.ndarray]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return {name: value.numpy().copy() for name, value in workload.build_model().state_dict().items()}


def trained(workload: Workload, *, micro_batch: int | None = None, from_step: int = 1, **changes: Any) -> TaskTraining:
    plan = dataclasses.replace(TaskPlan(task=workload.name, num_examples=100), **changes)
    origin = Origin(client="a", server_round=1, seed=7)
    work = TaskTraining(workload=workload, plan=plan, arrays=arrays_of(workload), origin=origin, device=CPU)
    while not work.finished:
        if micro_batch is not None and work.steps_done + 1 == from_step:
            work._micro_batches.size = micro_batch
        work.step()
    work.finish()
    return work


def largest_difference(a: TaskTraining, b: TaskTraining) -> float:
    assert a.arrays.keys() == b.arrays.keys()
    return max(float(np.abs(a.arrays[name] - b.arrays[name]).max()) for name in a.arrays)


# ---------------------------------------------------------------------------------------------------- the same result


@pytest.mark.parametrize("proximal_mu", [0.0, 0.5])
@pytest.mark.parametrize(("batch_size", "most"), [(32, 16), (32, 1), (7, 4), (7, 3), (5, 2)])
def test_accumulated_gradients_are_those_of_the_whole_batch(batch_size: int, most: int, proximal_mu: float) -> None:
    changes = {"batch_size": batch_size, "proximal_mu": proximal_mu, "num_examples": 90}
    whole = trained(Doubles("doubles"), **changes)
    short = trained(Doubles("doubles", most=most), **changes)
    assert short.micro_batch is not None
    assert short.micro_batch <= most
    assert whole.micro_batch is None
    assert (short.steps_done, short.examples_done) == (whole.steps_done, whole.examples_done)
    assert largest_difference(whole, short) <= 1e-12
    for name in ("first", "mean", "last"):
        assert getattr(short.losses, name) == pytest.approx(getattr(whole.losses, name), abs=1e-12)


@given(batch_size=st.integers(2, 12), num_examples=st.integers(1, 40), most=st.integers(1, 11))
@settings(deadline=None, max_examples=10)
def test_whatever_the_cut(batch_size: int, num_examples: int, most: int) -> None:
    changes = {"batch_size": batch_size, "num_examples": num_examples}
    whole, workload = trained(Doubles("doubles"), **changes), Doubles("doubles", most=most)
    assert largest_difference(whole, trained(workload, **changes)) <= 1e-12
    assert sum(calls for calls in workload.calls if calls <= most) == num_examples


def test_fedprox_pulls_once_a_step() -> None:
    # Without a gradient of the loss only the pull is left: one too many would show at once.
    class Flat(Doubles):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().loss(outputs, targets) * (1.0 if len(self.calls) <= 1 else 0.0)

    changes = {"batch_size": 8, "num_examples": 24, "proximal_mu": 2.0, "learning_rate": 0.1}
    whole = trained(Flat("flat"), **changes)
    cut_later = trained(Flat("flat"), micro_batch=3, from_step=2, **changes)
    assert largest_difference(whole, cut_later) <= 1e-12


# ----------------------------------------------------------------------------------------------------- the retried step


@pytest.mark.parametrize("kind", [ShortPictures, ShortDropping, ShortNormed])
def test_a_retried_step_is_as_if_it_had_been_small_from_the_start(kind: type[Pictures]) -> None:
    # Dropout draws and batch norm's running statistics included: bit for bit.
    failed = trained(kind("task", at=[7]), num_examples=100)  # type: ignore[call-arg]
    small = trained(kind("task"), micro_batch=4, from_step=7, num_examples=100)
    assert failed.micro_batch == 4
    assert failed.notes == ("micro-batch 8 -> 4 after out of memory at step 7",)
    assert largest_difference(failed, small) == 0.0
    assert failed.losses == small.losses


def test_failing_in_the_second_micro_batch_forgets_the_first() -> None:
    # Steps of 8 examples: 8 fails, then of 4 and 4 the second fails, then four times 2.
    workload = ShortPictures("task", at=[2, 4])
    failed = trained(workload, num_examples=24)
    assert workload.calls == [8, 8, 4, 4, *[2] * 4, *[2] * 4]
    assert failed.notes == (
        "micro-batch 8 -> 4 after out of memory at step 2",
        "micro-batch 4 -> 2 after out of memory at step 2",
    )
    assert largest_difference(failed, trained(ShortPictures("task"), micro_batch=2, from_step=2, num_examples=24)) == 0


def test_the_first_step_may_fail_too_and_still_tells_who_draws() -> None:
    work = trained(ShortDropping("task", at=[1]), num_examples=24)
    assert work._draws_random_numbers is True
    assert largest_difference(work, trained(ShortDropping("task"), micro_batch=4, num_examples=24)) == 0.0


def test_a_short_last_batch_is_halved_from_its_own_size() -> None:
    workload = ShortPictures("task", at=[2])
    work = trained(workload, num_examples=13)
    assert workload.calls == [8, 5, 3, 2]
    assert work.notes == ("micro-batch 5 -> 3 after out of memory at step 2",)


def test_random_state_of_the_process_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trained(ShortDropping("task", at=[3]))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_failure_nothing_is_cut() -> None:
    workload = ShortPictures("task")
    work = trained(workload, num_examples=20)
    assert workload.calls == [8, 8, 4]
    assert (work.notes, work.micro_batch) == ((), None)


# ------------------------------------------------------------------------------------------------------------ giving up


def test_one_example_at_a_time_is_the_end() -> None:
    workload = ShortPictures("task", most=0)
    with pytest.raises(
        TrainingError,
        match=r"out of memory at step 1 with one example at a time: CUDA out of memory. Tried to allocate 2.00 GiB.$",
    ):
        trained(workload)
    assert workload.calls == [8, 4, 2, 1]


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_are_not_retried(error: Exception) -> None:
    workload = ShortPictures("task", at=[2])
    workload.error = error
    with pytest.raises(type(error)):
        trained(workload)
    assert workload.calls == [8, 8]


def test_what_counts_as_out_of_memory() -> None:
    def cpu_error() -> BaseException:
        try:
            torch.empty(1 << 60, dtype=torch.uint8)
        except RuntimeError as error:
            return error
        raise AssertionError("this machine has an exbibyte of memory")

    assert is_out_of_memory(cpu_error())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_real_allocation_that_fails_on_the_cpu() -> None:
    class Greedy(Rows):
        calls = 0

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if len(targets) > 4:
                torch.empty(1 << 60, dtype=torch.uint8)
            return super().loss(outputs, targets)

    assert trained(Greedy("rows"), num_examples=16).notes == ("micro-batch 8 -> 4 after out of memory at step 1",)


def test_batches_that_cannot_be_cut() -> None:
    inputs = torch.arange(6).reshape(3, 2)
    part = cut((inputs, (torch.arange(3), inputs)), 1, 3, 3)
    assert part[0].tolist() == [[2, 3], [4, 5]]
    assert part[1][0].tolist() == [1, 2]
    for odd in (torch.zeros(2), torch.tensor(1.0)):
        with pytest.raises(TrainingError, match=r"a batch of 3 examples cannot be cut: it has a tensor of shape \["):
            cut((inputs, odd), 0, 2, 3)


# --------------------------------------------------------------------------------------------------------- on purpose


@pytest.mark.parametrize(("fraction", "size"), [(1.0, 32), (0.6, 16), (0.5, 16), (0.49, 8), (1 / 32, 1)])
def test_shrinking_before_the_first_step(fraction: float, size: int) -> None:
    micro = MicroBatches(32, CPU)
    assert micro.shrink(fraction, "needs 2, 1 are free")
    assert micro.size == size
    assert micro.notes == (() if size == 32 else (f"micro-batch 32 -> {size} to fit: needs 2, 1 are free",))


@pytest.mark.parametrize("fraction", [0.0, 0.03])
def test_less_than_one_example_does_not_fit(fraction: float) -> None:
    micro = MicroBatches(32, CPU)
    assert not micro.shrink(fraction, "needs")
    assert (micro.size, micro.notes) == (32, ())


def test_on_cuda_the_cache_is_emptied_before_the_retry() -> None:
    done: list[str] = []

    class FakeCuda:
        def empty_cache(self) -> None:
            done.append("emptied")

    def add(batch: Any, before: int, weight: float) -> torch.Tensor:
        done.append(f"{before} {len(batch[0])} {weight:.2f}")
        if len(done) == 1:
            raise torch.OutOfMemoryError(COMPLAINT)
        return torch.tensor(2.0 if before else 1.0)

    micro = MicroBatches(3, torch.device("cuda"), cuda=FakeCuda())
    batch = (torch.zeros(3, 1), torch.zeros(3))
    loss = micro.mean_loss(batch, 1, add=add, undo=lambda: done.append("undone"))
    assert done == ["0 3 1.00", "undone", "emptied", "0 2 0.67", "2 1 0.33"]
    assert loss.item() == pytest.approx((2 * 1.0 + 1 * 2.0) / 3)


# ----------------------------------------------------------------------------------------------------- in a whole round


def runtime(workloads: dict[str, Workload]) -> EmbeddedRuntime:
    def build(ref: str, data: DataSpec) -> Workload:
        return workloads[ref]

    made = EmbeddedRuntime(build, budget_s=0.05)
    made._device = Device(name="test", kind="cpu", num_cores=2)
    return made


def test_out_of_memory_at_step_7_in_a_round() -> None:
    workloads: dict[str, Workload] = {
        "pictures": ShortPictures("pictures", at=[7]),
        "rows": Rows("rows"),
        "dropping": ShortDropping("dropping", most=0),
    }
    refs = tuple(workloads)
    plan = plan_of(*refs, deterministic=True)
    result = runtime(workloads).train(plan, start_arrays(*refs), hold(*refs))
    reports = {task.task: task for task in result.report.tasks}
    assert (reports["pictures"].outcome, reports["pictures"].micro_batch) == (TRAINED, 4)
    assert (reports["rows"].outcome, reports["rows"].micro_batch) == (TRAINED, None)
    assert reports["dropping"].outcome == FAILED
    assert "out of memory at step 1 with one example at a time" in reports["dropping"].error
    assert "pictures: micro-batch 8 -> 4 after out of memory at step 7" in result.report.notes
    assert from_json(Report, to_json(result.report)) == result.report

    calm: dict[str, Workload] = {"pictures": Pictures("pictures")}
    expected = runtime(calm).train(plan_of("pictures"), start_arrays("pictures"), hold("pictures"))
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(result.arrays[name], array, rtol=1e-4, atol=1e-6)
    (task,) = expected.report.tasks
    assert reports["pictures"].mean_loss == pytest.approx(task.mean_loss, rel=1e-5)
    assert reports["pictures"].num_steps == task.num_steps


def test_a_task_that_does_not_fit_starts_with_a_smaller_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = ShortPictures("pictures")
    made = runtime({"pictures": workload})
    made.profile("a", hold("pictures"))
    peak = made._costs["pictures", 8].peak_memory_bytes
    workload.calls.clear()
    monkeypatch.setattr("gpu_runtime.device_memory.host_free_bytes", lambda root=None: round(peak * 0.3))
    result = made.train(plan_of("pictures", num_examples=16), start_arrays("pictures"), hold("pictures"))
    (task,) = result.report.tasks
    assert (task.outcome, task.micro_batch) == (TRAINED, 2)
    assert workload.calls == [2] * 8
    assert result.report.notes[0].startswith("pictures: micro-batch 8 -> 2 to fit: needs ")

    monkeypatch.setattr("gpu_runtime.device_memory.host_free_bytes", lambda root=None: 10)
    result = made.train(plan_of("pictures"), start_arrays("pictures"), hold("pictures"))
    (task,) = result.report.tasks
    assert task.outcome == FAILED
    assert task.error.startswith("MemoryNeedError: needs ")


def test_evaluation_is_never_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Pictures):
        batch_size = 64

    made = runtime({"pictures": Wide("pictures")})
    made.profile("a", hold("pictures"))
    monkeypatch.setattr("gpu_runtime.device_memory.host_free_bytes", lambda root=None: 10)
    assert made.evaluate(start_arrays("pictures"), hold("pictures"))["pictures"]["num-examples"] == 30


def test_buffers_that_were_replaced_are_put_back() -> None:
    model = torch.nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("count", torch.tensor(1))
    buffers = Buffers(model)
    for expected in (0.0, 5.0):
        buffers.keep()
        kept = model.mean
        model.mean = torch.full((2,), 9.0)
        model.count.add_(1)
        buffers.put_back()
        assert model.mean is kept
        assert model.mean.tolist() == [expected, expected]
        assert model.count.item() == 1
        model.mean = torch.full((2,), 5.0)
