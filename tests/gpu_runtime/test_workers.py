"""Process lanes with real workers: weights as of threads, faults that stay where they are, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from runtime_fakes import build, hold, plan_of, start_arrays

from gpu_runtime.contracts import Plan, Report, TaskReport
from gpu_runtime.device import discover
from gpu_runtime.lanes import BackendError, choose
from gpu_runtime.runtime import EmbeddedRuntime, TrainResult
from gpu_runtime.settings import SharingSettings
from gpu_runtime.work import RemoteError
from gpu_runtime.workers import shared_memory
from gpu_runtime.workers.pool import WorkerLostError, WorkerPool, WorkerProcess

pytestmark = pytest.mark.skipif(bool(shared_memory.unavailable()), reason=shared_memory.unavailable() or "available")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runtime() -> Iterator[EmbeddedRuntime]:
    made = EmbeddedRuntime(build, SharingSettings(backend="processes", cores=2))
    yield made
    made.close()


def workers_of(runtime: EmbeddedRuntime) -> list[int]:
    return runtime._workers.pids


def train(runtime: EmbeddedRuntime, *refs: str, **options: Any) -> TrainResult:
    return runtime.train(plan_of(*refs, **options), start_arrays(*refs), hold(*refs))


def by_task(report: Report) -> dict[str, TaskReport]:
    return {task.task: task for task in report.tasks}


def gone(pids: list[int], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_weights_equal_those_of_threads(runtime: EmbeddedRuntime) -> None:
    refs = ("pictures", "dropping", "normed", "rows", "staying")
    threads = EmbeddedRuntime(build, SharingSettings(backend="cpu", cores=2))
    expected = train(threads, *refs, deterministic=True)
    found = train(runtime, *refs, deterministic=True, trace=True)
    assert found.report.backend == "processes"
    assert found.arrays.keys() == expected.arrays.keys()
    assert all(np.array_equal(found.arrays[key], expected.arrays[key]) for key in found.arrays)
    for task, report in by_task(found.report).items():
        other = by_task(expected.report)[task]
        assert (report.num_steps, report.num_examples, report.first_loss, report.mean_loss, report.last_loss) == (
            other.num_steps,
            other.num_examples,
            other.first_loss,
            other.mean_loss,
            other.last_loss,
        )
    assert {span.lane for span in found.report.spans} == {"process-0", "process-1"}
    assert len({span.lane for span in found.report.spans if span.task == "staying"}) == 1


@pytest.mark.parametrize("mode", ["exclusive", "sequential"])
def test_other_modes(runtime: EmbeddedRuntime, mode: str) -> None:
    found = train(runtime, "pictures", "rows", sharing_mode=mode, deterministic=True)
    assert found.report.backend == ("processes" if mode == "exclusive" else "sequential")
    assert {task.outcome for task in found.report.tasks} == {"trained"}


def test_a_task_that_fails_fails_alone(runtime: EmbeddedRuntime) -> None:
    found = train(runtime, "raises", "rows", "nan", "empty")
    reports = by_task(found.report)
    assert reports["raises"].error == "RuntimeError: injected fault"
    assert "loss is not finite at step" in reports["nan"].error
    assert "holds no training examples" in reports["empty"].error
    assert reports["rows"].outcome == "trained"
    assert {key.partition("/")[0] for key in found.arrays} == {"rows"}


def test_arrays_that_do_not_fit_are_named(runtime: EmbeddedRuntime) -> None:
    arrays = start_arrays("rows", "pictures")
    arrays["rows/blocks.1.weight"] = np.zeros((2, 2), np.float32)
    found = runtime.train(plan_of("rows", "pictures"), arrays, hold("rows", "pictures"))
    assert "array 'blocks.1.weight' has shape [2, 2]" in by_task(found.report)["rows"].error
    assert by_task(found.report)["pictures"].outcome == "trained"


def test_a_worker_that_dies_costs_one_task_and_comes_back(runtime: EmbeddedRuntime) -> None:
    found = train(runtime, "dying", "rows", "pictures")
    reports = by_task(found.report)
    assert reports["dying"].outcome == "failed"
    assert "has ended (killed by SIGKILL)" in reports["dying"].error
    assert reports["rows"].outcome == reports["pictures"].outcome == "trained"
    before = workers_of(runtime)
    assert {task.outcome for task in train(runtime, "rows", "pictures").report.tasks} == {"trained"}
    assert len(workers_of(runtime)) == 2 > len(before)


def test_all_workers_killed_in_a_step(runtime: EmbeddedRuntime) -> None:
    train(runtime, "rows", "pictures")

    def kill() -> None:
        time.sleep(0.3)
        for pid in workers_of(runtime):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = train(runtime, "slow", "slow-2", "slow-3", num_examples=400)
    killer.join()
    assert {task.outcome for task in found.report.tasks} == {"failed"}
    assert all("SIGKILL" in task.error for task in found.report.tasks)
    assert not [path for path in Path("/proc/self/fd").iterdir() if "paceline-slow" in os.path.realpath(path)]
    assert {task.outcome for task in train(runtime, "rows", "pictures").report.tasks} == {"trained"}


def test_workers_killed_between_rounds_cost_nothing(runtime: EmbeddedRuntime) -> None:
    train(runtime, "rows", "pictures")
    killed = workers_of(runtime)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    # A process can be waited for only when the last of its threads is gone.
    deadline = time.monotonic() + 20.0
    while not all(worker.has_ended for worker in runtime._workers._workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = by_task(train(runtime, "rows", "pictures").report)
    assert [task.outcome for task in found.values()] == ["trained", "trained"]
    assert not set(workers_of(runtime)) & set(killed)


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_killed_while_it_starts_is_started_again_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    pool = WorkerPool(build)
    waiting, left = WorkerProcess.wait_until_there, [times]

    def wait(self: WorkerProcess, timeout_s: float) -> None:
        if left[0]:
            left[0] -= 1
            os.kill(self.pid, signal.SIGKILL)
        waiting(self, timeout_s)

    monkeypatch.setattr(WorkerProcess, "wait_until_there", wait)
    if times == 2:
        with pytest.raises(WorkerLostError, match=r"has ended while it started \(killed by SIGKILL\)"):
            pool.workers(2)
    # All answer what they are asked, also those that nobody had waited for.
    for worker in pool.workers(2):
        assert worker.ask({"order": "forget"}).header == {}
        with pytest.raises(RemoteError, match="KeyError"):
            worker.ask({"order": "nonsense", "task": "none"})
    pool.close()


def test_a_deadline_cuts_and_keeps(runtime: EmbeddedRuntime) -> None:
    found = train(runtime, "slow", "slow-2", num_examples=8000, deadline_s=0.5)
    for report in found.report.tasks:
        assert report.outcome == "trained"
        assert 0 < report.num_examples < 8000
    assert {key.partition("/")[0] for key in found.arrays} == {"slow", "slow-2"}


def test_many_rounds_leave_nothing_open(runtime: EmbeddedRuntime) -> None:
    def open_files() -> list[int]:
        processes = [psutil.Process(), *map(psutil.Process, workers_of(runtime))]
        return [process.num_fds() for process in processes]

    train(runtime, "rows", "pictures", "raises")
    before = open_files()
    for _ in range(10):
        train(runtime, "rows", "pictures", "raises")
    assert open_files() == before


def test_a_task_that_exits_fails_like_any_other(runtime: EmbeddedRuntime) -> None:
    found = train(runtime, "exiting", "rows")
    assert by_task(found.report)["exiting"].error == "SystemExit: enough"
    assert by_task(found.report)["rows"].outcome == "trained"


def test_close_does_not_wait_for_a_step_that_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runtime.runtime.CLOSE_S", 0.2)
    made = EmbeddedRuntime(build, SharingSettings(backend="processes", cores=1))
    found: list[TrainResult] = []
    trainer = threading.Thread(target=lambda: found.append(train(made, "endless")))
    trainer.start()
    while not any(worker.is_busy for worker in made._workers._workers):
        time.sleep(0.05)
    made.close()
    trainer.join(20)
    assert [task.outcome for task in found[0].report.tasks] == ["failed"]


def test_evaluation_needs_no_workers() -> None:
    made = EmbeddedRuntime(build, SharingSettings(backend="processes", cores=2))
    assert made.evaluate(start_arrays("rows"), hold("rows"))["rows"]["num-examples"] == 30
    assert workers_of(made) == []


def test_close_ends_the_workers() -> None:
    made = EmbeddedRuntime(build, SharingSettings(backend="processes", cores=2))
    train(made, "rows", "pictures")
    pids = workers_of(made)
    assert len(pids) == 2
    made.close()
    assert gone(pids)
    assert workers_of(made) == []


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from runtime_fakes import build, hold, plan_of, start_arrays
            from gpu_runtime.runtime import EmbeddedRuntime
            from gpu_runtime.settings import SharingSettings
            runtime = EmbeddedRuntime(build, SharingSettings(backend="processes", cores=2))
            runtime.train(plan_of("rows", "pictures"), start_arrays("rows", "pictures"), hold("rows", "pictures"))
            print(*runtime._workers.pids, flush=True)
            runtime.train(plan_of("slow", num_examples=10**6), start_arrays("slow"), hold("slow"))
            """
        )
    )
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    parent = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.wait(10)
    assert gone(pids)


# -------------------------------------------------------------------------------------------------- what cannot be


def test_a_factory_that_no_other_process_could_import() -> None:
    assert WorkerPool(lambda ref, data: build(ref, data)).unavailable
    assert not WorkerPool(build).unavailable
    with pytest.raises(BackendError, match="no function that another process could import"):
        choose("processes", "competitive", discover(2, "cpu"), WorkerPool(lambda ref, data: build(ref, data)))


def test_a_worker_that_does_not_start_is_told() -> None:
    pool = WorkerPool("no_such_package.at_all:build")
    try:
        with pytest.raises(WorkerLostError, match="has ended while it started"):
            pool.workers(1)
    finally:
        pool.close()


def test_without_workers_auto_goes_on_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EmbeddedRuntime(build, SharingSettings(cores=2))
    monkeypatch.setattr(made._mixes, "known", lambda tasks: Best())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = train(made, "rows", "pictures")
    assert found.report.backend == "cpu"
    assert any("cpu instead of processes for this round: worker process" in note for note in found.report.notes)
    assert {task.outcome for task in found.report.tasks} == {"trained"}


class Best:
    best, capacity = "processes", 1.0


def test_plans_are_checked_before_any_worker_is_asked(runtime: EmbeddedRuntime) -> None:
    plan: Plan = plan_of("rows", "pictures", num_examples=0)
    found = runtime.train(plan, start_arrays("rows", "pictures"), hold("rows", "pictures"))
    assert all("plan asks for 0 examples" in task.error for task in found.report.tasks)
