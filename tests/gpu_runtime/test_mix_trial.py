"""Which backend serves a mix: the choice follows what was measured, and is remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runtime_fakes import Pictures, Rows, build, hold, plan_of, start_arrays

from gpu_runtime import mix_trial
from gpu_runtime.contracts import TaskCost
from gpu_runtime.device import Device
from gpu_runtime.lanes import BackendError, PartitionBackend, choose
from gpu_runtime.mix_trial import MixTask, MixTrials
from gpu_runtime.profile_cache import MixResult
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings

CPU = Device(name="test", kind="cpu", num_cores=2)
# Threads that wait for each other take for ever where others use the machine too.
ONE_CORE = Device(name="test", kind="cpu", num_cores=1)
COST = TaskCost(demand=0.5, solo_cost_s=1e-4, speed_curve=((0.5, 1.0), (1.0, 1.0)))


@pytest.fixture(autouse=True)
def no_mix_trials() -> None:
    """Here they do happen."""


def make(name: str) -> PartitionBackend:
    return choose(name, "competitive", ONE_CORE)


def tasks(*workloads: Pictures, cost: TaskCost = COST) -> list[MixTask]:
    return [MixTask(held=hold(each.name)[0], workload=each, cost=cost) for each in workloads]


def trials(backends: Callable[[str], PartitionBackend] = make, use_disk: bool = False) -> MixTrials:
    return MixTrials(backends, trial_s=0.02, use_disk=use_disk)


def test_capacity_is_demand_served_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[int, int]] = []

    def run(self: MixTrials, name: str, tasks: list[MixTask], steps: dict[int, int], device: Device) -> float:
        runs.append(dict(steps))
        return {"sequential": 2.0, "cpu": 0.5}[name]

    monkeypatch.setattr(MixTrials, "_run", run)
    made = MixTrials(make, trial_s=0.16, use_disk=False)
    result = made.result(tasks(Rows("rows"), Pictures("pictures")), ["sequential", "cpu"], CPU)
    assert result is not None
    # Each task 0.5 of the device for 1e-4 s an example, 8 examples a step.
    steps = runs[-1]
    served = sum(0.5 * 1e-4 * 8 * count for count in steps.values())
    assert result.capacities == pytest.approx({"sequential": served / 2.0, "cpu": served / 0.5})
    assert (result.best, result.capacity) == ("cpu", result.capacities["cpu"])
    assert runs[0] == {0: mix_trial.WARM_UP_STEPS, 1: mix_trial.WARM_UP_STEPS}
    # An eighth of the time for each run, half of it for each task.
    assert steps[0] == steps[1] == round(0.02 / (0.5 + 0.5) / 8e-4)


def test_real_trials_leave_workloads_as_they_are() -> None:
    rows = Rows("rows")
    result = trials().result(tasks(rows, Pictures("pictures")), ["sequential", "cpu"], ONE_CORE)
    assert result is not None
    assert list(result.capacities) == ["sequential", "cpu"]
    assert all(capacity > 0 for capacity in result.capacities.values())
    assert len(rows.train_examples()) == 50


def test_a_single_task_needs_no_trial() -> None:
    assert trials().result(tasks(Rows("rows")), ["cpu"], CPU) is None


@pytest.mark.parametrize("factor", [None, float("nan")])
def test_a_task_that_fails_leaves_the_choice_open(factor: float | None) -> None:
    faulty, made = Pictures("faulty"), trials()
    faulty.loss = lambda outputs, targets: outputs.sum() * factor  # type: ignore[assignment, method-assign]
    assert made.result(tasks(Rows("rows"), faulty), ["sequential", "cpu"], ONE_CORE) is None
    assert made.known(["rows", "faulty"]) is None


def test_a_backend_that_cannot_be_had_is_left_out() -> None:
    def backend(name: str) -> PartitionBackend:
        if name == "processes":
            raise BackendError("no workers today")
        return make(name)

    result = trials(backend).result(tasks(Rows("rows"), Pictures("pictures")), ["cpu", "processes"], ONE_CORE)
    assert result is not None
    assert list(result.capacities) == ["cpu"]


def test_processes_are_not_tried_for_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(MixTrials, "_run", lambda self, name, *_: tried.append(name) or 1.0)  # type: ignore[func-returns-value]
    slow = TaskCost(demand=1.0, solo_cost_s=0.02, speed_curve=((1.0, 1.0),))
    both = [*tasks(Rows("rows")), *tasks(Pictures("pictures"), cost=slow)]
    trials().result(both, ["cpu", "processes"], CPU)
    assert set(tried) == {"cpu"}
    trials().result(tasks(Rows("rows"), Pictures("pictures")), ["cpu", "processes"], CPU)
    assert set(tried) == {"cpu", "processes"}


def test_a_part_of_a_known_mix_is_known() -> None:
    made = trials()
    made._known = {
        frozenset("abc"): MixResult(capacities={"cpu": 1.0}, best="cpu"),
        frozenset("abcd"): MixResult(capacities={"processes": 1.0}, best="processes"),
    }
    assert made.known(["b", "a"]) == made._known[frozenset("abc")]
    assert made.known(["a", "d"]) == made._known[frozenset("abcd")]
    assert made.known(["a", "e"]) is None
    assert made.known(["a"]) is None


def test_results_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    mix = tasks(Rows("rows"), Pictures("pictures"))
    with monkeypatch.context() as patch:
        # What was chosen is kept, and not chosen anew by capacities.
        result = MixResult(capacities={"sequential": 1.5, "cpu": 2.5}, best="sequential")
        patch.setattr(MixTrials, "_measured", lambda *_: result)
        first = trials(use_disk=True).result(mix, ["sequential", "cpu"], CPU)
    assert first == result
    with monkeypatch.context() as patch:
        patch.setattr(MixTrials, "_measured", lambda *_: pytest.fail("measured again"))
        assert trials(use_disk=True).result(mix, ["sequential", "cpu"], CPU) == first
    measured: list[int] = []
    monkeypatch.setattr(MixTrials, "_measured", lambda *_: measured.append(1))
    other = TaskCost(demand=0.5, solo_cost_s=2e-4, speed_curve=((0.5, 1.0), (1.0, 1.0)))
    trials(use_disk=True).result(tasks(Rows("rows"), Pictures("pictures"), cost=other), ["sequential", "cpu"], CPU)
    assert measured == [1]


# ------------------------------------------------------------------------------------------------------ the runtime


def test_the_runtime_trains_on_what_was_best(monkeypatch: pytest.MonkeyPatch) -> None:
    best = MixResult(capacities={"sequential": 3.0, "cpu": 1.0, "processes": 2.0}, best="sequential")
    monkeypatch.setattr(MixTrials, "_measured", lambda *_: best)
    runtime = EmbeddedRuntime(build, SharingSettings(cores=2), budget_s=0.05)
    runtime._mixes._use_disk = False
    profile = runtime.profile("a", hold("rows", "pictures"))
    assert profile.capacity == 3.0
    plan, arrays = plan_of("rows", "pictures"), start_arrays("rows", "pictures")
    assert runtime.train(plan, arrays, hold("rows", "pictures")).report.backend == "sequential"
    # One task alone, or another mode, needs no choice.
    assert runtime.train(plan_of("rows"), start_arrays("rows"), hold("rows")).report.backend == "cpu"
    exclusive = plan_of("rows", "pictures", sharing_mode="exclusive")
    assert runtime.train(exclusive, arrays, hold("rows", "pictures")).report.backend == "cpu"
    runtime.close()
    assert runtime.train(plan, arrays, hold("rows", "pictures")).report.backend == "cpu"


def test_without_a_profile_threads_serve() -> None:
    runtime = EmbeddedRuntime(build, SharingSettings(cores=2))
    plan, arrays = plan_of("rows", "pictures"), start_arrays("rows", "pictures")
    assert runtime.train(plan, arrays, hold("rows", "pictures")).report.backend == "cpu"


def test_an_inventory_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixTrials, "_measured", lambda *_: pytest.fail("measured"))
    runtime = EmbeddedRuntime(build, SharingSettings(cores=2))
    assert runtime.profile("a", hold("rows", "pictures"), measure=False).capacity == 1.0
