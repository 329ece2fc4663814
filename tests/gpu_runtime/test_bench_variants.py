"""Every variant does all of the work, ends what it started, and stops at its deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from gpu_runtime.apart import apart
from gpu_runtime.bench import competitive
from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.competitive import QUICK, mixes_of, size_of, variants_on
from gpu_runtime.bench.fused import VmapFused
from gpu_runtime.bench.mixes import MIXES, Calibration, Mix, Work
from gpu_runtime.bench.ours import Ours
from gpu_runtime.bench.processes import ProcessPerTask, WorkerProcess
from gpu_runtime.bench.results import BASELINE, ONE_THREAD, OURS, targets_of
from gpu_runtime.bench.rounds import Gate
from gpu_runtime.bench.table import table
from gpu_runtime.bench.trace_overhead import trace_overhead
from gpu_runtime.bench.variants import Run, Threads, VariantError, done_fraction, one_each, packed_on, threads_kept
from gpu_runtime.device import discover

DEVICE = discover(2, "cpu")
# Threads that wait for each other take for ever where others use the machine too.
ONE_CORE = discover(1, "cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def work() -> Work:
    tasks = Mix(seconds={"perceptron": 1, "lenet": 1, "perceptron.2": 1})
    return {task: replace(share, num_steps=3) for task, share in Calibration(ONE_CORE).work(tasks, 0.01).items()}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPerTask]:
    variant = ProcessPerTask("process-per-task", DEVICE)
    yield variant
    variant.close()


IN_PROCESS = [
    name
    for name, variant in variants_on(DEVICE, QUICK)[0].items()
    if name != "process-per-task" and "-competitive" not in name and not isinstance(variant, VmapFused)
]


@pytest.mark.parametrize("name", IN_PROCESS)
def test_all_work_is_done_and_nothing_changes(name: str, work: Work) -> None:
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    variant = variants_on(DEVICE, QUICK)[0][name]
    variant.prepare(work)
    run = variant.run(work, 60.0)
    variant.close()
    assert run.done_fraction == 1.0
    assert run.finish_s.keys() == work.keys()
    assert max(run.finish_s.values()) <= run.seconds * 1.5 + 0.1
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, cores)
    if name in (BASELINE, ONE_THREAD):
        assert sum(run.alone_s.values()) == pytest.approx(run.seconds, rel=0.5)


def test_processes_do_all_work_again_and_again(pool: ProcessPerTask, work: Work) -> None:
    assert pool.run(work, 60.0).done_fraction == 1.0
    pids = pool.pids
    assert pool.run(work, 60.0).done_fraction == 1.0
    assert pool.pids == pids
    assert {os.getpgid(pid) for pid in pids} == set(pids)


def test_no_process_is_left(work: Work) -> None:
    variant = ProcessPerTask("process-per-task", DEVICE)
    long = {task: replace(share, num_steps=10**6) for task, share in work.items()}
    variant.prepare(long)
    pids = variant.pids
    # One worker is gone: the run fails and the others, which would train for ever, are ended as well.
    psutil.Process(pids[0]).kill()
    with pytest.raises(VariantError, match="has ended"):
        variant.run(long, 60.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert variant.pids == []


def test_workers_do_not_outlive_a_killed_parent() -> None:
    code = (
        "import time\n"
        "from gpu_runtime.bench.processes import WorkerProcess\n"
        "print(WorkerProcess().pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 30
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.05)


def test_faults_of_a_worker_are_told(pool: ProcessPerTask, work: Work) -> None:
    pool.prepare(work)
    worker: WorkerProcess = pool._workers[0]
    worker.tell({"prepare": "no-such-task", "steps": 1, "device": {"name": "cpu", "kind": "cpu", "num_cores": 1}})
    with pytest.raises(VariantError, match="there is no synthetic task 'no-such-task'"):
        worker.answer(60.0)
    with pytest.raises(VariantError, match="has not answered"):
        worker.answer(0.01)


def test_a_run_stops_at_its_deadline(work: Work) -> None:
    for name in (BASELINE, "thread-per-task", OURS):
        variant = variants_on(DEVICE, QUICK)[0][name]
        long = {task: replace(share, num_steps=10**5) for task, share in work.items()}
        run = variant.run(long, 0.3)
        variant.close()
        assert 0.0 < run.done_fraction < 0.5
        assert run.whole_s > run.seconds


def test_processes_stop_at_their_deadline(pool: ProcessPerTask, work: Work) -> None:
    long = {task: replace(share, num_steps=10**5) for task, share in work.items()}
    assert 0.0 < pool.run(long, 0.2).done_fraction < 0.5


def test_a_task_that_raises_fails_its_variant(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work["lenet"].workload, "loss", lambda outputs, targets: 1 / 0)
    with pytest.raises(VariantError, match="ZeroDivisionError"):
        Threads("threads", DEVICE, groups=one_each, width=1).run(work, 10.0)


def _settled(process: psutil.Process, most: int) -> int:
    """Threads of the process once at most `most` are left: a team ends a moment after its thread was joined."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if (num_threads := process.num_threads()) <= most:
            time.sleep(0.2)
            return min(num_threads, process.num_threads())
    return process.num_threads()


def test_wide_work_leaves_no_openmp_threads() -> None:
    def wide() -> float:
        torch.set_num_threads(2)
        return float(torch.ones(1 << 20).exp().sum())

    process = psutil.Process()
    with threads_kept():
        apart(wide)  # the first use of a library may start threads for good
        gone = _settled(process, process.num_threads())
        for _ in range(3):
            assert apart(wide) == pytest.approx(2.718281828 * (1 << 20), rel=1e-4)
        assert _settled(process, gone) <= gone
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 / 0)


def test_static_packing_by_hand(work: Work) -> None:
    step = {"perceptron": 3.0, "lenet": 5.0, "perceptron.2": 4.0}
    costly = {
        task: replace(share, step=replace(share.step, one_s=step[task]), num_steps=1) for task, share in work.items()
    }
    assert packed_on(2)(costly) == [["lenet"], ["perceptron.2", "perceptron"]]
    assert done_fraction(costly, {"lenet": 0.5, "perceptron.2": 1.0}) == pytest.approx(6.5 / 12)


def test_work_is_sized_by_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = {"lenet": 0.002, "resnet8": 0.02, "unet": 0.03}
    monkeypatch.setattr(Calibration, "_step_s", lambda self, workload, arrays, threads: step_s[workload.name])
    calibration = Calibration(ONE_CORE)
    for mix in ("imbalanced", "balanced"):
        found = calibration.work(MIXES[mix], 4.0)
        expected_s = sum(share.num_steps * min(share.step.one_s, share.step.all_s) for share in found.values())
        assert expected_s == pytest.approx(4.0, rel=0.05)
    steps = {task: share.num_steps for task, share in calibration.work(MIXES["imbalanced"], 50.0).items()}
    assert steps["lenet"] / steps["unet"] == pytest.approx(75 / 24, rel=0.1)


def test_eight_mixes_and_the_names_of_the_issue() -> None:
    assert {"imbalanced", "balanced", "small", "dominant", "alone", "eight", "driving", "mixed"} <= MIXES.keys()
    assert len(MIXES["eight"].tasks) == 8
    assert mixes_of(" small, alone,small") == ("small", "alone")
    assert mixes_of("") == tuple(MIXES)
    with pytest.raises(ValueError, match="unknown mixes \\['cocktail'\\]"):
        mixes_of("cocktail")
    assert size_of(quick=True, pairs=7).pairs == 7
    assert size_of(quick=True).trace_pairs == 0
    assert size_of(quick=True, pairs=7, trace_overhead=True).trace_pairs == 7


def test_a_trace_is_compared_with_none_in_pairs(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    ours, order = Ours(OURS, ONE_CORE), [False]
    monkeypatch.setattr(ours, "prepare", lambda work: None)

    def run(work: Work, deadline_s: float, *, trace: bool) -> Run:
        order.append(trace)
        return Run(seconds=1.03 if trace else 1.0, finish_s={})

    monkeypatch.setattr(ours, "run", run)
    found = trace_overhead(ours, {"small": work, "alone": work}, pairs=3, seconds=0.0, budget=Budget(60.0))
    assert found.keys() == {"small", "alone"}
    assert found["small"]["median"] == pytest.approx(1.03)
    assert order[3:9] == [False, True, True, False, False, True]
    assert trace_overhead(ours, {"small": work}, pairs=3, seconds=9.0, budget=Budget(1.0)) == {}
    (target,) = targets_of([], [], {"small": found["small"] | {"num_pairs": 9}})
    assert (target["what"], target["state"]) == ("trace_overhead", "missed")


def test_json_of_a_tiny_run(pool: ProcessPerTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competitive, "ProcessPerTask", lambda name, device: pool)
    pids = pool.pids
    size = replace(QUICK, total_s=30.0, featured_s=0.02, other_s=0.02, num_predictions=2, profile_s=0.1, trace_pairs=2)
    result = competitive.run(ONE_CORE, ["small", "alone"], size=size, gate=Gate(patience_fraction=0.0))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result.keys() >= {"name", "device", "versions", "settings", "rows", "headline"}
    small, alone = result["rows"]
    every = {BASELINE, ONE_THREAD, OURS, "process-per-task", "thread-per-task", "static-packing", "oversubscribed"}
    assert every <= small["ratio_to_baseline"].keys() | small["not_available"].keys()
    assert {BASELINE, ONE_THREAD, OURS} <= small["ratio_to_floor"].keys()
    assert small["ratio_to_baseline"][BASELINE]["median"] == 1.0
    assert small["num_pairs"][OURS] == len(small["seconds"][OURS]) == len(small["foreign_cores"][OURS])
    assert alone["finish_spread"] is None
    assert alone["not_available"]["process-per-task"].startswith("left out of a quick run")
    headline = result["headline"]
    assert headline["speedup"].keys() == headline["ratio_to_floor"].keys() == {"small", "alone"}
    assert headline["best_other_variant"].keys() == {"small", "alone"}
    assert len(headline["makespan_prediction_error"]) <= 2
    # "small" is featured, "alone" is not.
    assert headline["trace_overhead"].keys() == headline["intervals"]["trace_overhead"].keys() == {"small"}
    assert headline["intervals"]["trace_overhead"]["small"]["num_pairs"] == 2
    text = table(result)
    assert all(word in text for word in ("small", "alone", "process-per-task", "not available", "target"))
    assert pool.pids == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
