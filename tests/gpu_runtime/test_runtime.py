"""The runtime as others see it: plans in, reports and arrays out."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime_fakes import Accuracy, Pictures, Rows, build, hold, plan_of, start_arrays

from gpu_runtime.contracts import (
    CANCELLED,
    FAILED,
    TRAINED,
    DataSpec,
    HeldTask,
    Partition,
    Plan,
    Profile,
    Report,
    TaskPlan,
    TaskReport,
    from_json,
    to_json,
)
from gpu_runtime.device import Device
from gpu_runtime.runtime import EmbeddedRuntime, EvaluationError
from gpu_runtime.settings import SharingSettings
from gpu_runtime.workload import Workload
from gpu_runtime.workload_cache import FactoryError

REFS = ("pictures", "dropping", "normed", "rows")


def runtime(cores: int = 2, factory: Any = build, **options: Any) -> EmbeddedRuntime:
    """A runtime that believes it was given `cores` cores, however many this machine has."""
    made = EmbeddedRuntime(factory, SharingSettings(**options), budget_s=0.05)
    made._device = Device(name="test", kind="cpu", num_cores=cores)
    return made


def by_task(report: Report) -> dict[str, TaskReport]:
    return {task.task: task for task in report.tasks}


def test_a_round() -> None:
    result = runtime().train(plan_of(*REFS, trace=True), start_arrays(*REFS), hold(*REFS))
    report = result.report
    assert (report.client, report.server_round, report.clock, report.backend) == ("a", 1, "measured", "cpu")
    assert [task.task for task in report.tasks] == list(REFS)
    for task in report.tasks:
        assert (task.outcome, task.num_examples, task.num_steps, task.error) == (TRAINED, 60, 8, "")
        assert task.share is not None
        assert 0 < task.seconds <= report.seconds
    start = start_arrays(*REFS)
    assert result.arrays.keys() == start.keys()
    for name, array in result.arrays.items():
        assert (array.shape, array.dtype) == (start[name].shape, start[name].dtype)
    assert {span.task for span in report.spans} == set(REFS)
    assert from_json(Report, to_json(report)) == report


def test_no_spans_unless_traced() -> None:
    assert runtime().train(plan_of("rows"), start_arrays("rows"), hold("rows")).report.spans == ()


# ------------------------------------------------------------------------------------------------------ determinism


def alone() -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for ref in REFS:
        result = runtime(1).train(plan_of(ref, deterministic=True), start_arrays(ref), hold(ref))
        arrays |= result.arrays
    return arrays


@pytest.mark.parametrize("mode", ["sequential", "exclusive", "competitive"])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_deterministic_tasks_train_together_as_alone_bit_for_bit(mode: str, cores: int) -> None:
    expected = alone()
    for _ in range(2):
        plan = plan_of(*REFS, deterministic=True, sharing_mode=mode)
        arrays = runtime(cores).train(plan, start_arrays(*REFS), hold(*REFS)).arrays
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            assert np.array_equal(array, expected[name]), name


def test_a_task_that_fails_does_not_change_the_others() -> None:
    refs = ("raises", *REFS, "nan")
    result = runtime().train(plan_of(*refs, deterministic=True), start_arrays(*refs), hold(*refs))
    expected = alone()
    assert result.arrays.keys() == expected.keys()
    assert all(np.array_equal(array, expected[name]) for name, array in result.arrays.items())


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("ref", "error"),
    [
        ("raises", "RuntimeError: injected fault"),
        ("nan", "TrainingError: loss is not finite at step 3"),
        ("empty", "TrainingError: this client holds no training examples of the task"),
    ],
)
def test_failing_tasks_are_reported_and_the_others_go_on(ref: str, error: str) -> None:
    result = runtime().train(plan_of(ref, "rows"), start_arrays(ref, "rows"), hold(ref, "rows"))
    reports = by_task(result.report)
    assert (reports[ref].outcome, reports[ref].error, reports[ref].num_examples) == (FAILED, error, 0)
    assert reports["rows"].outcome == TRAINED
    assert {name.partition("/")[0] for name in result.arrays} == {"rows"}
    assert from_json(Report, to_json(result.report)) == result.report


def without(key: str) -> Any:
    return lambda arrays: {name: array for name, array in arrays.items() if name != key}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without("rows/blocks.1.bias"), "StateError: arrays lack 'blocks.1.bias'"),
        (lambda a: a | {"rows/x": np.zeros(1)}, "StateError: arrays hold 'x', which the model does not have"),
        (
            lambda a: a | {"rows/blocks.1.bias": np.zeros((2, 8), np.float32)},
            "StateError: array 'blocks.1.bias' has shape [2, 8], the model wants [16]",
        ),
        (
            lambda a: a | {"rows/blocks.1.bias": np.zeros(16)},
            "StateError: array 'blocks.1.bias' has dtype float64, the model wants float32",
        ),
        (
            lambda a: a | {"rows/blocks.1.bias": np.full(16, np.nan, np.float32)},
            "TrainingError: loss is not finite at step 1",
        ),
        (
            lambda a: {name: array for name, array in a.items() if not name.startswith("rows/")},
            "the message has no arrays for this task",
        ),
    ],
)
def test_arrays_that_do_not_fit_fail_their_task(change: Any, error: str) -> None:
    result = runtime().train(
        plan_of("rows", "pictures"), change(start_arrays("rows", "pictures")), hold("rows", "pictures")
    )
    reports = by_task(result.report)
    assert (reports["rows"].outcome, reports["rows"].error) == (FAILED, error)
    assert reports["pictures"].outcome == TRAINED


def test_a_plan_for_a_task_that_is_not_held() -> None:
    result = runtime().train(plan_of("rows", "boxes"), start_arrays("rows"), hold("rows", "unknown"))
    assert by_task(result.report)["boxes"].error == (
        "this client does not hold the task (it holds: rows); unknown: ValueError: there is no task 'unknown'"
    )
    assert by_task(result.report)["rows"].outcome == TRAINED


def test_a_plan_that_names_a_task_twice() -> None:
    result = runtime().train(plan_of("rows", "rows"), start_arrays("rows"), hold("rows"))
    assert [(task.outcome, task.error) for task in result.report.tasks] == [
        (TRAINED, ""),
        (FAILED, "the plan names this task twice"),
    ]


def test_a_plan_without_tasks() -> None:
    result = runtime().train(plan_of(), {}, hold("rows"))
    assert (result.arrays, result.report.tasks) == ({}, ())


def test_a_deadline_cuts_the_work_and_says_so() -> None:
    plan = Plan(
        client="a",
        server_round=1,
        seed=0,
        tasks=(TaskPlan(task="rows", num_examples=10_000_000),),
        deadline_s=0.2,
    )
    result = runtime().train(plan, start_arrays("rows"), hold("rows"))
    (report,) = result.report.tasks
    assert report.outcome == TRAINED
    assert 0 < report.num_examples < 10_000_000
    assert result.report.notes == (f"rows: deadline of 0.2 s cut it to {report.num_examples} of 10000000",)
    assert result.arrays


def test_closing_cancels_what_runs() -> None:
    began = threading.Event()

    class Signalling(Pictures):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            began.set()
            return super().loss(outputs, targets)

    made = runtime(factory=lambda ref, data: Signalling(ref))
    closer = threading.Thread(target=lambda: began.wait(30) and made.close())
    closer.start()
    plan = plan_of("pictures", num_examples=100_000_000)
    result = made.train(plan, start_arrays("pictures"), hold("pictures"))
    closer.join()
    assert [(task.outcome, task.error) for task in result.report.tasks] == [(CANCELLED, "cancelled")]
    assert result.arrays == {}


def test_a_runtime_works_after_a_failure() -> None:
    made = runtime()
    made.train(plan_of("raises"), start_arrays("raises"), hold("raises"))
    made.close()
    assert made.train(plan_of("rows"), start_arrays("rows"), hold("rows")).arrays


# ---------------------------------------------------------------------------------------------------------- caching


def test_clients_with_different_data_do_not_share_a_workload() -> None:
    built: list[HeldTask] = []

    def counting(ref: str, data: DataSpec) -> Workload:
        built.append(HeldTask(ref=ref, data=data))
        return Pictures(ref, num_examples=10 * (data.partition.index + 1))

    made = runtime(factory=counting)
    holds = [HeldTask(ref="pictures", data=DataSpec(partition=Partition(index=i, count=3))) for i in range(3)]
    sizes = [made.profile("x", [each], measure=False).tasks[0].num_examples for each in (*holds, *holds)]
    assert sizes == [10, 20, 30, 10, 20, 30]
    assert built == holds


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runtime.workload_cache.MAX_WORKLOADS", 2)
    made = runtime()
    for index in range(5):
        made.profile("x", [HeldTask(ref="rows", data=DataSpec(seed=index))], measure=False)
    assert len(made._workloads) == 2


# ------------------------------------------------------------------------------------------- profile and evaluation


def test_an_inventory_measures_nothing() -> None:
    profile = runtime().profile("a", hold("pictures", "empty", "nothing"), measure=False)
    assert [(t.task, t.num_examples, t.batch_size, t.cost) for t in profile.tasks] == [
        ("pictures", 50, 8, None),
        ("empty", 0, 8, None),
    ]
    assert profile.errors == ("nothing: ValueError: there is no task 'nothing'",)
    assert from_json(Profile, to_json(profile)) == profile


def test_a_measured_profile() -> None:
    profile = runtime().profile("a", hold("pictures"))
    (task,) = profile.tasks
    assert (profile.client, profile.num_cores, profile.clock, profile.capacity) == ("a", 2, "measured", 1.0)
    assert task.cost is not None
    assert task.cost.solo_cost_s > 0
    assert len(task.cost.blocks) == 3
    assert from_json(Profile, to_json(profile)) == profile


@pytest.mark.parametrize("backend", ["streams", "green"])
def test_a_backend_that_cannot_work_here_is_told_in_the_profile(backend: str) -> None:
    profile = runtime(backend=backend).profile("a", hold("rows"))
    assert profile.tasks == ()
    assert profile.errors == (f"sharing backend '{backend}' cannot be used: torch.cuda.is_available() is false",)


def test_training_after_profiling_uses_the_costs() -> None:
    made = runtime()
    made.profile("a", hold(*REFS))
    result = made.train(plan_of(*REFS), start_arrays(*REFS), hold(*REFS))
    assert {task.outcome for task in result.report.tasks} == {TRAINED}


@pytest.mark.parametrize(("split", "count"), [("test", 30), ("train", 50)])
def test_evaluation(split: str, count: int) -> None:
    results = runtime().evaluate(start_arrays("rows", "normed"), hold("rows", "normed", "pictures"), split=split)
    assert results.keys() == {"rows", "normed"}
    for result in results.values():
        assert result.keys() == {"loss", "accuracy", "num-examples"}
        assert result["num-examples"] == count


def test_evaluation_without_examples() -> None:
    results = runtime().evaluate(start_arrays("empty"), hold("empty"), split="train")
    assert results == {"empty": {"num-examples": 0.0}}


def test_evaluation_does_not_train() -> None:
    arrays = start_arrays("normed", "dropping")
    kept = {name: array.copy() for name, array in arrays.items()}
    made = runtime()
    first, second = (made.evaluate(arrays, hold("normed", "dropping")) for _ in range(2))
    for task in ("normed", "dropping"):
        assert second[task] == pytest.approx(first[task])
    assert all(np.array_equal(arrays[name], kept[name]) for name in arrays)


def test_evaluation_that_fails_tells_which_and_keeps_the_rest() -> None:
    arrays = start_arrays("rows", "pictures") | {"rows/extra": np.zeros(1)}
    with pytest.raises(EvaluationError, match="failed for rows: StateError: arrays hold 'extra'") as caught:
        runtime().evaluate(arrays, hold("rows", "pictures"))
    assert caught.value.results.keys() == {"pictures"}


@pytest.mark.parametrize(
    ("computed", "words"),
    [
        ({"accuracy": torch.zeros(2)}, "metric 'accuracy' must be a number, not tensor"),
        ({"accuracy": "good"}, "metric 'accuracy' must be a number, not 'good'"),
        ({"accuracy": None}, "metric 'accuracy' must be a number, not None"),
        ([0.5], r"metrics\(\).compute\(\) must return a dict, not list"),
        (ZeroDivisionError("no\nboxes"), "ZeroDivisionError: no"),
    ],
    ids=["two-elements", "text", "none", "list", "raises"],
)
def test_metrics_that_are_no_numbers_cost_their_task_only(
    computed: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Accuracy):
        def compute(self) -> Any:
            if isinstance(computed, Exception):
                raise computed
            return computed

    monkeypatch.setattr(Rows, "metrics", lambda self: Odd())
    with pytest.raises(EvaluationError, match=words) as caught:
        runtime().evaluate(start_arrays("rows", "pictures"), hold("rows", "pictures"))
    assert caught.value.faults.keys() == {"rows"}
    assert caught.value.results.keys() == {"pictures"}


def test_a_task_that_cannot_be_built_for_evaluation_is_named_by_its_reference() -> None:
    with pytest.raises(EvaluationError) as caught:
        runtime().evaluate(start_arrays("rows"), hold("rows", "nothing"))
    assert caught.value.faults == {"nothing": "ValueError: there is no task 'nothing'"}


def test_evaluation_of_the_first_examples_only() -> None:
    results = runtime().evaluate(start_arrays("rows", "pictures"), hold("rows", "pictures"), max_examples=7)
    assert {result["num-examples"] for result in results.values()} == {7}


def test_evaluation_of_an_unknown_split() -> None:
    with pytest.raises(ValueError, match="split must be 'train' or 'test', not 'valid'"):
        runtime().evaluate({}, [], split="valid")


# ---------------------------------------------------------------------------------------------------------- factory


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("tasks", "not of the form"),
        ("no_such_package:build", "cannot be loaded: ModuleNotFoundError"),
        ("runtime_fakes:nothing", "cannot be loaded: AttributeError"),
        ("runtime_fakes:KINDS", "is not callable"),
    ],
)
def test_factories_that_cannot_be_found(reference: str, complaint: str) -> None:
    with pytest.raises(FactoryError, match=complaint):
        EmbeddedRuntime(reference)


def test_a_dotted_factory() -> None:
    made = EmbeddedRuntime("runtime_fakes:build")
    assert made.profile("a", hold("rows"), measure=False).tasks[0].task == "rows"


def test_the_batch_size_and_rate_of_a_plan_are_used() -> None:
    plan = plan_of("rows")
    changed = dataclasses.replace(plan, tasks=(dataclasses.replace(plan.tasks[0], batch_size=20, learning_rate=0.0),))
    result = runtime().train(changed, start_arrays("rows"), hold("rows"))
    assert result.report.tasks[0].num_steps == 3
    assert all(np.array_equal(array, start_arrays("rows")[name]) for name, array in result.arrays.items())


def test_the_calling_thread_gets_no_openmp_team() -> None:
    """Loading data is wide work too. In a process of its own: this one has teams from other tests."""
    script = textwrap.dedent(
        """
        import os, time, torch
        from runtime_fakes import Pictures, hold, plan_of, start_arrays
        from gpu_runtime.runtime import EmbeddedRuntime
        from gpu_runtime.settings import SharingSettings

        class Wide(Pictures):
            def train_examples(self):
                torch.ones(1 << 22).exp()
                return super().train_examples()

        def threads():
            # Threads end a moment after they were joined: wait until their number stands still.
            seen = []
            while len(seen) < 400 and len(set(seen[-20:])) != 1 or len(seen) < 20:
                seen.append(len(os.listdir("/proc/self/task")))
                time.sleep(0.025)
            return seen[-1]

        torch.set_num_threads(4)
        runtime = EmbeddedRuntime(lambda ref, data: Wide(ref), SharingSettings(cores=1))
        runtime.train(plan_of("pictures"), start_arrays("pictures"), hold("pictures"))
        assert torch.get_num_threads() == 4
        after = threads()
        torch.ones(1 << 22).exp()
        print(after, threads())
        """
    )
    paths = os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    after, with_team = map(int, done.stdout.split())
    # What a wide operation in the calling thread would have left.
    assert with_team == after + 3
