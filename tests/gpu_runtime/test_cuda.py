"""What only a CUDA device can show. Run by scripts/gpu_check.sh; skipped, with the reason, elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from runtime_fakes import Dropping, Normed, Pictures, build, hold, plan_of, start_arrays

from gpu_runtime.contracts import TRAINED
from gpu_runtime.device import discover
from gpu_runtime.lanes import BACKENDS
from gpu_runtime.lanes.base import Remaining
from gpu_runtime.lanes.green import GreenBackend
from gpu_runtime.lanes.streams import StreamsBackend
from gpu_runtime.profiler import Profiler, measure
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings
from gpu_runtime.transfer import batches_on

pytestmark = pytest.mark.gpu

REFS = ("pictures", "normed", "rows", "dropping")


def runtime(**options: str) -> EmbeddedRuntime:
    return EmbeddedRuntime(build, SharingSettings(**options), budget_s=0.3)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["sequential", "competitive", "exclusive"])
def test_tasks_train_together_as_alone(mode: str) -> None:
    result = runtime().train(plan_of(*REFS, sharing_mode=mode), start_arrays(*REFS), hold(*REFS))
    assert {task.outcome for task in result.report.tasks} == {TRAINED}
    assert result.report.backend == ("sequential" if mode == "sequential" else "streams")
    assert bool(result.report.notes) == (mode == "exclusive")
    for ref in REFS:
        alone = runtime().train(plan_of(ref, sharing_mode="sequential"), start_arrays(ref), hold(ref)).arrays
        for name, array in alone.items():
            np.testing.assert_allclose(result.arrays[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_device_trains_as_the_host_does() -> None:
    refs = ("pictures", "normed", "rows")
    here = runtime().train(plan_of(*refs), start_arrays(*refs), hold(*refs)).arrays
    host = EmbeddedRuntime(build)
    host._device = discover(kind="cpu")
    there = host.train(plan_of(*refs), start_arrays(*refs), hold(*refs)).arrays
    for name, array in there.items():
        np.testing.assert_allclose(here[name], array, rtol=2e-2, atol=2e-3, err_msg=name)


def test_a_failing_task_leaves_the_others_running() -> None:
    refs = ("raises", "nan", "rows")
    result = runtime().train(plan_of(*refs), start_arrays(*refs), hold(*refs))
    outcomes = {task.task: (task.outcome, task.error) for task in result.report.tasks}
    assert outcomes["rows"] == (TRAINED, "")
    assert outcomes["raises"][1] == "RuntimeError: injected fault"
    # Losses are looked at now and then only, and at the end.
    assert "loss is not finite" in outcomes["nan"][1]
    assert {name.partition("/")[0] for name in result.arrays} == {"rows"}


def test_spans_are_device_time_within_the_round() -> None:
    refs = ("pictures", "normed")
    report = runtime().train(plan_of(*refs, num_examples=800, trace=True), start_arrays(*refs), hold(*refs)).report
    assert {span.lane for span in report.spans} == {"stream-pictures", "stream-normed"}
    assert all(-1e-3 <= span.start_s <= span.end_s <= report.seconds + 1e-3 for span in report.spans)
    first, second = ([span for span in report.spans if span.task == ref] for ref in refs)
    assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in first for b in second)


def test_a_deadline_stops_soon() -> None:
    plan = plan_of("rows", num_examples=100_000_000, deadline_s=0.5)
    result = runtime().train(plan, start_arrays("rows"), hold("rows"))
    (report,) = result.report.tasks
    assert report.outcome == TRAINED
    assert 0 < report.num_examples < 100_000_000
    assert result.report.seconds < 10


def test_prefetched_batches_hold_what_the_host_sent() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = [(torch.full((1 << 20,), float(number)), torch.tensor([number])) for number in range(20)]
    with torch.cuda.stream(torch.cuda.Stream()):
        for number, (inputs, targets) in enumerate(batches_on(device, source)):
            # Work on the lane's stream keeps reading while the next copy is under way.
            total = (inputs * 1.0).sum()
            assert total.item() == number * (1 << 20)
            assert targets.item() == number


def test_evaluation() -> None:
    results = runtime().evaluate(start_arrays("rows", "normed"), hold("rows", "normed"))
    assert {task: result["num-examples"] for task, result in results.items()} == {"rows": 30, "normed": 30}


@pytest.mark.parametrize("kind", [Pictures, Normed, Dropping])
def test_profiling_measures_and_leaves_no_trace(kind: type[Pictures]) -> None:
    device = discover()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    with torch.random.fork_rng():
        model = kind("task").build_model()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    cost = measure(kind("task"), device, budget_s=0.3, model=model)
    assert 0 < cost.demand <= 1
    assert cost.solo_cost_s > 0
    assert cost.peak_memory_bytes > 0
    assert cost.speed_curve[-1] == (1.0, 1.0)
    assert len(cost.blocks) == len(model.blocks)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


def test_memory_is_given_back() -> None:
    made = runtime()

    def after_a_round() -> int:
        made.train(plan_of(*REFS), start_arrays(*REFS), hold(*REFS))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = after_a_round()
    assert [after_a_round() for _ in range(5)] == [first] * 5


def test_costs_are_kept_under_the_devices_name() -> None:
    device = discover()
    assert Profiler(budget_s=0.2).cost(Pictures("a"), device) == Profiler(budget_s=0.2).cost(Pictures("b"), device)


def flip(self: StreamsBackend, left: Sequence[Remaining]) -> None:
    """Every lane goes to another stream, each time."""
    for lane in self._lanes.values():
        lane.go_to(-3 - lane.priority)


@pytest.mark.parametrize("backend", ["streams", "green"])
def test_a_training_whose_lane_goes_elsewhere_equals_one_that_stays(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := BACKENDS[backend].unavailable(discover()):
        pytest.skip(reason)
    monkeypatch.setattr("gpu_runtime.lanes.green.WORTH_MOVING_S", 0.0)
    monkeypatch.setattr(GreenBackend, "rebalance_s", 0.001)
    monkeypatch.setattr(StreamsBackend, "rebalance_s", 0.02)
    monkeypatch.setattr(StreamsBackend, "rebalance", flip)
    refs = ("pictures", "normed", "rows")
    plan = plan_of(*refs, num_examples=2000)
    plan = dataclasses.replace(plan, tasks=(dataclasses.replace(plan.tasks[0], num_examples=60), *plan.tasks[1:]))
    moved = runtime(backend=backend).train(plan, start_arrays(*refs), hold(*refs))
    assert any("went to" in note or ", then " in note for note in moved.report.notes)
    alone = dataclasses.replace(plan, sharing_mode="sequential")
    expected = runtime().train(alone, start_arrays(*refs), hold(*refs)).arrays
    for name, array in expected.items():
        np.testing.assert_allclose(moved.arrays[name], array, rtol=1e-2, atol=1e-3, err_msg=name)
