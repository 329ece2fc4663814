"""Mixed precision: asked for by a workload, used on CUDA only, and the arithmetic of scaled losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from runtime_fakes import Pictures, Rows, build, hold, plan_of, start_arrays
from test_training import CPU, ORIGIN, arrays_of, plan

from gpu_runtime.contracts import FAILED, DataSpec
from gpu_runtime.precision import Precision
from gpu_runtime.profiler import model_hash
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.training import TaskTraining, TrainingError

CUDA = torch.device("cuda", 0)


class FakeAmp:
    """Records autocast; its gradient scaler is torch's own, on the CPU."""

    def __init__(self) -> None:
        self.inside = False
        self.asked: list[tuple[str, Any]] = []
        self.scaler: torch.amp.GradScaler | None = None

    @contextlib.contextmanager
    def autocast(self, device_type: str, *, dtype: torch.dtype) -> Iterator[None]:
        self.asked.append((device_type, dtype))
        self.inside = True
        yield
        self.inside = False

    def GradScaler(self, device: str) -> torch.amp.GradScaler:
        assert device == "cuda"
        self.scaler = torch.amp.GradScaler("cpu")
        return self.scaler


class Half(Pictures):
    autocast_dtype = "float16"


class Brain(Pictures):
    autocast_dtype = "bfloat16"


def training(workload: Pictures, amp: FakeAmp | None = None, **changes: Any) -> TaskTraining:
    """A training on the CPU; with `amp`, in the precision it would have on CUDA."""
    name = workload.name
    work = TaskTraining(
        workload=workload, plan=plan(name, **changes), arrays=arrays_of(name), origin=ORIGIN, device=CPU
    )
    if amp is not None:
        work._precision = Precision(workload, CUDA, amp)
    return work


def trained(workload: Pictures, amp: FakeAmp | None = None, **changes: Any) -> TaskTraining:
    work = training(workload, amp, **changes)
    while not work.finished:
        work.step()
    work.finish()
    return work


def equal(a: TaskTraining, b: TaskTraining) -> bool:
    return all(np.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)


def test_workloads_that_say_nothing_train_in_full_precision() -> None:
    amp = FakeAmp()
    precision = Precision(Pictures("pictures"), CUDA, amp)
    with precision.forward():
        assert not amp.inside
    assert (amp.asked, amp.scaler) == ([], None)


@pytest.mark.parametrize("kind", [Half, Brain])
def test_a_cpu_always_trains_in_full_precision(kind: type[Pictures]) -> None:
    assert equal(trained(kind("pictures")), trained(Pictures("pictures")))


def test_bfloat16_covers_forward_and_loss_and_scales_nothing() -> None:
    amp = FakeAmp()
    inside: list[bool] = []

    class Watched(Brain):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            inside.append(amp.inside)
            outputs.register_hook(lambda gradient: inside.append(amp.inside))
            return super().loss(outputs, targets)

    work = trained(Watched("pictures"), amp, num_examples=16)
    assert amp.asked == [("cuda", torch.bfloat16)] * 2
    assert amp.scaler is None
    # The loss within, the backward pass without.
    assert inside == [True, False] * 2
    assert work.notes == ()


@pytest.mark.parametrize("changes", [{}, {"proximal_mu": 0.5}])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_float16_scales_are_taken_back_before_the_step(changes: dict[str, float], micro_batch: int | None) -> None:
    # Scales are powers of two: nothing here may change a single bit, FedProx's pull included.
    works = [training(Half("pictures"), amp, **changes) for amp in (FakeAmp(), None)]
    for work in works:
        work._micro_batches.size = micro_batch or work.batch_size
        while not work.finished:
            work.step()
        work.finish()
    assert equal(*works)
    assert works[0].losses == works[1].losses
    assert works[0].notes == ()


def test_a_step_that_overflows_is_skipped_and_the_next_has_half_the_scale() -> None:
    class Steep(Half):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # Times the first scale, 2**16, this is beyond float32; times the second it is not.
            return outputs.sum() * 2.0**112 + super().loss(outputs, targets)

    amp = FakeAmp()
    work = training(Steep("pictures"), amp, num_examples=16, learning_rate=1e-38)
    work.step()
    assert amp.scaler is not None
    scale = amp.scaler.get_scale()
    assert scale == 2.0**15
    assert work._model is not None
    start = arrays_of("pictures")
    assert all(np.array_equal(value.numpy(), start[name]) for name, value in work._model.state_dict().items())
    while work._precision.num_skipped == work.steps_done < 2:
        work.step()
    assert work.notes == (f"float16 overflowed in {work._precision.num_skipped} of 2 steps, which were skipped",)


@pytest.mark.parametrize("asked", ["int8", torch.float16, True])
def test_an_unknown_precision_is_refused(asked: Any) -> None:
    workload = Rows("rows")
    workload.autocast_dtype = asked  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="autocast_dtype must be None, 'bfloat16' or 'float16', not"):
        training(workload)


def test_the_report_names_an_unknown_precision() -> None:
    def wrong(ref: str, data: DataSpec) -> Any:
        workload = build(ref, data)
        workload.autocast_dtype = "half"  # type: ignore[attr-defined]
        return workload

    result = EmbeddedRuntime(wrong).train(plan_of("rows"), start_arrays("rows"), hold("rows"))
    (task,) = result.report.tasks
    assert task.outcome == FAILED
    assert task.error == "TrainingError: autocast_dtype must be None, 'bfloat16' or 'float16', not 'half'"


def test_costs_in_another_precision_are_other_costs() -> None:
    with torch.random.fork_rng(devices=[]):
        model = Rows("rows").build_model()
    hashes = {model_hash(model, dtype) for dtype in (None, "bfloat16", "float16")}
    assert len(hashes) == 3
    assert model_hash(model) in hashes
