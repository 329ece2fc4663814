"""MPS lanes on a fake daemon and real workers that use the CPU: caps, workers kept and replaced, falling back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import Pictures, build, hold, plan_of, start_arrays

from gpu_runtime.contracts import TaskPlan
from gpu_runtime.lanes.mps import MpsBackend, percentages
from gpu_runtime.mps_daemon import MpsError
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings
from gpu_runtime.training import Origin, Progress, TaskTraining
from gpu_runtime.workers import shared_memory
from gpu_runtime.workers.handover import OwnTraining, Stage

needs_workers = pytest.mark.skipif(bool(shared_memory.unavailable()), reason=shared_memory.unavailable() or "available")


class FakeDaemon:
    """A daemon whose faults are set from outside."""

    def __init__(self) -> None:
        self.is_started = False
        self.refuses = self.dead = ""
        self.starts = 0

    def start(self) -> None:
        if self.refuses:
            raise MpsError(self.refuses)
        self.is_started = True
        self.starts += 1

    def stop(self) -> None:
        self.is_started, self.dead = False, ""

    def died(self) -> str:
        return self.dead

    def client_environment(self, share: float) -> dict[str, str]:
        return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(round(100 * share))}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRuntime]:
    monkeypatch.setattr(MpsBackend, "unavailable", classmethod(lambda cls, device: ""))
    made = EmbeddedRuntime(build, SharingSettings(backend="mps", cores=2))
    made._workers.mps = FakeDaemon()  # type: ignore[assignment]
    yield made
    made.close()


def daemon_of(runtime: EmbeddedRuntime) -> Any:
    return runtime._workers.mps


def train(runtime: EmbeddedRuntime, *refs: str, **options: Any) -> Any:
    return runtime.train(plan_of(*refs, **options), start_arrays(*refs), hold(*refs))


def caps_of(runtime: EmbeddedRuntime) -> list[str]:
    found = []
    for pid in runtime._workers.pids:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found += [entry.decode().partition("=")[2] for entry in variables if entry.startswith(b"CUDA_MPS_ACTIVE")]
    return found


@needs_workers
def test_each_task_has_a_worker_with_its_cap(runtime: EmbeddedRuntime) -> None:
    found = train(runtime, "pictures", "rows", deterministic=True, trace=True)
    assert found.report.backend == "mps"
    assert {task.outcome for task in found.report.tasks} == {"trained"}
    lanes = {span.task: span.lane for span in found.report.spans}
    assert lanes == {"pictures": "mps-pictures", "rows": "mps-rows"}
    assert caps_of(runtime) == ["50", "50"]
    assert "mps: caps on active threads: pictures 50 %, rows 50 %" in found.report.notes
    alone = EmbeddedRuntime(build, SharingSettings(backend="cpu", cores=1))
    expected = train(alone, "pictures", "rows", deterministic=True)
    assert all(np.array_equal(found.arrays[key], expected.arrays[key]) for key in expected.arrays)
    # The same shares: the same workers. Another task alone: its worker, with a cap of its own.
    pids = runtime._workers.pids
    train(runtime, "rows", "pictures")
    assert runtime._workers.pids == pids
    train(runtime, "rows")
    assert caps_of(runtime)[0] == "100"
    assert runtime._workers.pids[0] != pids[0]
    assert runtime._workers.pids[1] == pids[1]


@needs_workers
def test_a_dead_daemon_costs_one_round(runtime: EmbeddedRuntime) -> None:
    daemon = daemon_of(runtime)
    assert train(runtime, "rows").report.backend == "mps"
    daemon.dead = "an MPS server (process 7) has gone, and its clients with it"
    found = train(runtime, "rows")
    assert found.report.backend == "cpu"
    assert f"cpu instead of mps for this round: {'an MPS server (process 7) has gone, and its clients with it'}" in (
        found.report.notes
    )
    assert {task.outcome for task in found.report.tasks} == {"trained"}
    assert train(runtime, "rows").report.backend == "mps"
    assert daemon.starts == 2


def test_a_daemon_that_does_not_start(runtime: EmbeddedRuntime) -> None:
    daemon_of(runtime).refuses = "nvidia-cuda-mps-control -d failed with code 1: no permission"
    found = train(runtime, "rows", "pictures")
    assert found.report.backend == "cpu"
    assert any("no permission" in note for note in found.report.notes)


# ---------------------------------------------------------------------------------------------------- percentages


def test_percentages_by_hand() -> None:
    shares = {"a": 0.61, "b": 0.4, "c": 1.0, "d": 0.01}
    assert percentages(shares, disjoint=False) == {"a": 70, "b": 40, "c": 100, "d": 10}
    assert percentages({"a": 0.6, "b": 0.3, "c": 0.3}, disjoint=True) == {"a": 50, "b": 20, "c": 20}
    assert percentages(dict.fromkeys("abcdefghijkl", 0.5), disjoint=True) == dict.fromkeys("abcdefghijkl", 8)


@given(st.dictionaries(st.text(min_size=1), st.floats(0.001, 1.0), min_size=1, max_size=30))
def test_disjoint_percentages_fit(shares: dict[str, float]) -> None:
    found = percentages(shares, disjoint=True)
    assert found.keys() == shares.keys()
    assert sum(found.values()) <= 100
    assert min(found.values()) >= 1


# --------------------------------------------------------------------------------------------- one process's training


def test_an_own_training_waits_for_its_device() -> None:
    waited: list[torch.device] = []
    workload = Pictures("pictures")
    arrays = {key.partition("/")[2]: value for key, value in start_arrays("pictures").items()}
    training = TaskTraining(
        workload=workload,
        plan=TaskPlan(task="pictures", num_examples=24),
        arrays=arrays,
        origin=Origin(client="a", server_round=1, seed=1),
        device=torch.device("cpu"),
    )
    own = OwnTraining(training, torch.device("cuda", 0), waited.append)
    stage = own.advance(2, Stage(progress=Progress(micro_batch=4, notes=("micro-batch 8 -> 4 to fit",))))
    assert (stage.progress.steps_done, stage.progress.micro_batch, stage.stuck) == (2, 4, "")
    assert waited == [torch.device("cuda", 0)]
    assert own.advance(1, None).progress.examples_done == 24
    assert own.finish(None).keys() == arrays.keys()
