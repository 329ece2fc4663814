"""Memory and mixed precision on a CUDA device. Run by scripts/gpu_check.sh; skipped, with the reason, elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runtime_fakes import Dropping, Pictures, build, hold, plan_of, start_arrays

from gpu_runtime.contracts import TRAINED, Report
from gpu_runtime.device import discover
from gpu_runtime.device_memory import free_bytes
from gpu_runtime.profiler import measure
from gpu_runtime.runtime import EmbeddedRuntime, TrainResult
from gpu_runtime.workload import Workload

pytestmark = pytest.mark.gpu


def trained(*workloads: Pictures) -> TrainResult:
    by_name: dict[str, Workload] = {workload.name: workload for workload in workloads}
    runtime = EmbeddedRuntime(lambda ref, data: by_name[ref], budget_s=0.3)
    return runtime.train(plan_of(*by_name), start_arrays(*by_name), hold(*by_name))


def only(report: Report) -> tuple[str, int | None, tuple[str, ...]]:
    (task,) = report.tasks
    return task.outcome, task.micro_batch, report.notes


class Greedy(Pictures):
    """Asks for a petabyte whenever it sees more than four examples."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) > 4:
            torch.empty(1 << 50, dtype=torch.uint8, device=outputs.device)
        return super().loss(outputs, targets)


def test_a_step_that_does_not_fit_is_repeated_in_halves() -> None:
    short, whole = trained(Greedy("pictures")), trained(Pictures("pictures"))
    assert only(short.report) == (TRAINED, 4, ("pictures: micro-batch 8 -> 4 after out of memory at step 1",))
    for name, array in whole.arrays.items():
        np.testing.assert_allclose(short.arrays[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_task_that_does_not_fit_is_measured_in_halves() -> None:
    assert measure(Greedy("pictures"), discover(), budget_s=0.3).solo_cost_s > 0


def test_a_lone_task_reports_its_peak_memory() -> None:
    (alone,) = trained(Pictures("pictures")).report.tasks
    assert alone.peak_memory_bytes > 0
    # Of two at once nobody can tell whose it was.
    both = trained(Pictures("pictures"), Dropping("dropping")).report.tasks
    assert [task.peak_memory_bytes for task in both] == [0, 0]


def test_free_memory_is_part_of_the_device() -> None:
    device = discover()
    free = free_bytes(device)
    assert free is not None
    assert 0 < free <= device.memory_bytes
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device.torch_device)
    less = free_bytes(device)
    assert less is not None
    # Others may use the device too: only roughly.
    assert less < free - (1 << 27)
    del held


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(dtype: str) -> None:
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        pytest.skip("this device has no bfloat16")
    seen: set[torch.dtype] = set()

    class Mixed(Pictures):
        autocast_dtype = dtype

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.add(outputs.dtype)
            return super().loss(outputs, targets)

    mixed, full = trained(Mixed("pictures")), trained(Pictures("pictures"))
    assert seen == {getattr(torch, dtype)}
    assert only(mixed.report)[0] == TRAINED
    start = start_arrays("pictures")
    skipped = any("overflowed" in note for note in mixed.report.notes)
    for name, array in full.arrays.items():
        assert mixed.arrays[name].dtype == np.float32
        assert not np.array_equal(mixed.arrays[name], start[name])
        if not skipped:
            np.testing.assert_allclose(mixed.arrays[name], array, rtol=0.1, atol=2e-2, err_msg=name)
    cost = measure(Mixed("pictures"), discover(), budget_s=0.3)
    assert cost.solo_cost_s > 0
    assert len(cost.blocks) == 3


def test_memory_after_many_rounds_is_that_after_three() -> None:
    runtime = EmbeddedRuntime(build)
    refs = ("pictures", "dropping")
    arrays = start_arrays(*refs)
    seen: list[tuple[int, int]] = []
    for _ in range(50):
        runtime.train(plan_of(*refs), arrays, hold(*refs))
        torch.cuda.synchronize()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert seen[-1][0] == seen[2][0]
    assert seen[-1][1] <= 1.03 * seen[2][1]
