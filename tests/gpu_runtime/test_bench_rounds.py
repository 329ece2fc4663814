"""Rounds with variants that only say how long they took, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.disturbance import ForeignLoad
from gpu_runtime.bench.floor import SoloTimes
from gpu_runtime.bench.mixes import MIXES, Share, Work
from gpu_runtime.bench.models import build
from gpu_runtime.bench.results import BASELINE, ONE_THREAD, OURS, headline_of, row_of, state_of, targets_of
from gpu_runtime.bench.rounds import Gate, Measured, Rounds
from gpu_runtime.bench.variants import Run, Variant, VariantError
from gpu_runtime.contracts import DataSpec

ALONE = {BASELINE: {"lenet": 6.0, "resnet8": 2.0}, ONE_THREAD: {"lenet": 10.0, "resnet8": 2.0}}


@dataclass
class Machine:
    """A clock, and how many cores others use from now on: one entry for each look at them, then none."""

    now_s: float = 0.0
    others: list[float] = field(default_factory=list)
    spans: list[str] = field(default_factory=list)
    foreign_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.foreign_s += seconds * (self.others.pop(0) if self.others else 0.0)

    def foreign(self) -> ForeignLoad:
        return ForeignLoad(lambda: (self.foreign_s, 0.0), self.clock)


class Timed(Variant):
    """Takes `seconds` of the machine's clock for the whole work."""

    def __init__(self, name: str, machine: Machine, seconds: float, raises_at: int = 0) -> None:
        self.name, self._machine, self._seconds, self._raises_at = name, machine, seconds, raises_at
        self.deadlines: list[float] = []

    def run(self, work: Work, deadline_s: float) -> Run:
        trial = max(share.num_steps for share in work.values()) == 2
        if trial:
            return Run(seconds=0.0, finish_s=dict.fromkeys(work, 0.0))
        self._machine.spans.append(self.name)
        self.deadlines.append(deadline_s)
        if len(self.deadlines) == self._raises_at:
            raise VariantError("injected fault")
        self._machine.pass_time(self._seconds)
        finish = {task: self._seconds * part for task, part in zip(work, (1.0, 0.9), strict=True)}
        return Run(seconds=self._seconds, finish_s=finish, alone_s=ALONE.get(self.name, {}))


@pytest.fixture(scope="module")
def work() -> Work:
    step = SoloTimes(one_s=0.1, all_s=0.08)
    arrays: dict[str, np.ndarray] = {}
    return {
        task: Share(workload=build(task, DataSpec()), arrays=arrays, num_steps=10, step=step)
        for task in ("lenet", "resnet8")
    }


def measure(
    machine: Machine,
    variants: Sequence[Variant],
    work: Work,
    *,
    total_s: float = 1e6,
    pairs: int = 5,
    gate: Gate | None = None,
    seed: int = 0,
) -> Measured:
    rounds = Rounds(
        variants,
        essential=[variant.name for variant in variants[:3]],
        gate=gate or Gate(patience_fraction=0.0),
        draw=random.Random(seed),
        foreign=machine.foreign(),
        sleep=machine.pass_time,
    )
    return rounds.measure(work, pairs=pairs, budget=Budget(total_s, machine.clock))


def four(machine: Machine, other: Callable[[Machine], Timed] | None = None) -> list[Timed]:
    fourth = other(machine) if other else Timed("other", machine, 4.0)
    return [Timed(BASELINE, machine, 8.0), Timed(ONE_THREAD, machine, 12.0), Timed(OURS, machine, 7.0), fourth]


def test_every_variant_once_a_round_in_changing_order(work: Work) -> None:
    machine = Machine()
    found = measure(machine, four(machine), work)
    rounds = [machine.spans[index : index + 4] for index in range(0, 20, 4)]
    assert all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert all(list(samples) == [0, 1, 2, 3, 4] for samples in found.samples.values())
    assert list(found.samples) == [BASELINE, ONE_THREAD, OURS, "other"]


def test_more_rounds_only_while_there_is_time(work: Work) -> None:
    # A round takes 31 s and a little for each run's surroundings: six of nine fit.
    machine = Machine()
    found = measure(machine, four(machine), work, total_s=200.0, pairs=9)
    assert len(found.samples[OURS]) == 6
    assert machine.now_s <= 200.0


def test_the_slowest_optional_variant_goes_first_and_the_essential_ones_stay(work: Work) -> None:
    machine = Machine()
    variants = [*four(machine), Timed("slow", machine, 40.0)]
    found = measure(machine, variants, work, total_s=71.0 + 4 * 31.0 + 10.0)
    assert len(found.samples["slow"]) == 1
    assert "no time" in found.not_available["slow"]
    assert {len(found.samples[name]) for name in (BASELINE, ONE_THREAD, OURS, "other")} == {5}


def test_without_time_there_are_fewer_pairs(work: Work) -> None:
    machine = Machine()
    found = measure(machine, four(machine), work, total_s=80.0)
    assert 1 <= len(found.samples[OURS]) < 5
    assert machine.now_s <= 80.0 + 12.0


def test_disturbed_runs_are_repeated_and_the_quietest_counts(work: Work) -> None:
    # The first run meets 1.5 foreign cores, then 0.3, then (after a quiet look) none.
    machine = Machine(others=[0.0, 1.5, 0.0, 0.3, 0.0, 0.0])
    found = measure(machine, four(machine), work, gate=Gate(patience_fraction=0.5), total_s=1000.0)
    first = machine.spans[0]
    assert machine.spans[:4] == [first, first, first, machine.spans[3]]
    assert machine.spans[3] != first
    assert found.samples[first][0].foreign_cores == 0.0
    assert not any(sample.disturbed for samples in found.samples.values() for sample in samples.values())


def test_patience_ends(work: Work) -> None:
    machine = Machine(others=[1.0] * 1000)
    found = measure(machine, four(machine), work, gate=Gate(patience_fraction=0.1), total_s=400.0)
    assert all(sample.disturbed for samples in found.samples.values() for sample in samples.values())
    assert len(found.samples[OURS]) == 5
    assert machine.now_s < 31.0 * 5 + 2 * 40.0


def test_a_failing_variant_is_left_out_and_named(work: Work) -> None:
    machine = Machine()
    found = measure(machine, four(machine, lambda m: Timed("other", m, 4.0, raises_at=2)), work)
    assert list(found.samples["other"]) == [0]
    assert found.not_available == {"other": "failed: injected fault"}


def test_a_failing_baseline_ends_the_benchmark(work: Work) -> None:
    machine = Machine()
    variants = four(machine)
    variants[0] = Timed(BASELINE, machine, 8.0, raises_at=1)
    with pytest.raises(VariantError, match="sequential: injected fault"):
        measure(machine, variants, work)


class Stuck(Timed):
    """Does nothing until its deadline from the second round on."""

    def run(self, work: Work, deadline_s: float) -> Run:
        run = super().run(work, deadline_s)
        return run if len(self.deadlines) < 2 else Run(seconds=deadline_s, finish_s={}, done_fraction=0.0)


def test_a_variant_that_does_nothing_stops_and_an_essential_one_ends_the_mix(work: Work) -> None:
    machine = Machine()
    found = measure(machine, four(machine, lambda m: Stuck("other", m, 4.0)), work)
    assert (len(found.samples["other"]), len(found.samples[OURS])) == (1, 5)
    assert found.not_available["other"].startswith("stopped after 1 pairs: its first step had not ended")
    variants = four(machine)
    variants[0] = Stuck(BASELINE, machine, 8.0)
    found = measure(machine, variants, work)
    assert len(found.samples[BASELINE]) == 1
    assert found.not_available[BASELINE].startswith("stopped after 1 pairs: its first step had not ended")


def test_a_run_is_cut_at_a_multiple_of_the_baseline_and_by_the_time_of_the_mix(work: Work) -> None:
    machine = Machine()
    other = Timed("other", machine, 4.0)
    other.patience = 2.0
    variants = four(machine, lambda m: other)
    measure(machine, variants, work, total_s=1000.0)
    assert set(other.deadlines[1:]) == {2.0 * 8.0 + 2.0}
    # An equal part of 1000 s is 50 s for each of 5 pairs of 4 variants: 3 times that, twice as much if essential.
    assert set(variants[0].deadlines) == {2 * 3 * 50.0}
    measure(machine, variants, work, total_s=400.0)
    assert other.deadlines[-1] == 18.0
    measure(machine, variants, work, total_s=100.0)
    assert other.deadlines[-1] == 3 * 5.0


def test_a_row_by_hand(work: Work) -> None:
    machine = Machine()
    found = measure(machine, four(machine), work)
    row = row_of("imbalanced", MIXES["imbalanced"], work, found, 2, has_floor=True)
    # The floor of 10 or 6 s and 2 s on two cores is 6.8 s (test_bench_floor.py).
    assert row["floor_s"] == pytest.approx([6.8] * 5)
    assert row["ratio_to_floor"][OURS]["median"] == pytest.approx(7.0 / 6.8)
    assert row["ratio_to_baseline"][OURS]["median"] == pytest.approx(7.0 / 8.0)
    assert row["tasks"]["lenet"]["one_thread_s"] == 10.0
    # LeNet must be widened, so only ResNet-8 may end when it likes: nothing can end together.
    assert row["finish_spread"] is None
    headline = headline_of([row], [{"error": 0.1}, {"error": 0.4}])
    assert headline["speedup"] == {"imbalanced": pytest.approx(8.0 / 7.0)}
    assert headline["best_other_variant"] == {"imbalanced": {"variant": "other", "ours_over_it": 7.0 / 4.0}}
    assert headline["makespan_prediction_error"] == [0.1, 0.4]


def test_tasks_that_are_never_widened_should_end_together(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALONE, ONE_THREAD, {"lenet": 6.0, "resnet8": 3.5})
    machine = Machine()
    row = row_of("balanced", MIXES["balanced"], work, measure(machine, four(machine), work), 2, has_floor=True)
    assert row["finish_spread"]["median"] == pytest.approx(0.1)
    states = {target["what"]: target["state"] for target in targets_of([row], [])}
    assert states["finish_spread"] == "missed"


def test_a_target_is_missed_only_if_the_interval_excludes_it() -> None:
    assert state_of(1.08, {"median": 1.07, "low": 1.0}) == "met"
    assert state_of(1.08, {"median": 1.10, "low": 1.05}) == "open"
    assert state_of(1.08, {"median": 1.10, "low": 1.09}) == "missed"
    assert state_of(1.08, {"median": 1.10, "low": 1.09}, trusted=False) == "unclear"


def test_a_busy_machine_and_too_few_pairs_tell_nothing(work: Work) -> None:
    machine = Machine(others=[1.0] * 1000)
    busy = row_of("balanced", MIXES["balanced"], work, measure(machine, four(machine), work), 2, has_floor=True)
    assert {target["state"] for target in targets_of([busy], [])} == {"unclear"}
    machine = Machine()
    few = measure(machine, four(machine), work, pairs=4)
    row = row_of("balanced", MIXES["balanced"], work, few, 2, has_floor=True)
    assert {target["state"] for target in targets_of([row], [])} == {"unclear"}


@pytest.mark.parametrize(("errors", "state"), [([0.1] * 9 + [0.2], "met"), ([0.1] * 8 + [0.2] * 2, "missed")])
def test_nine_of_ten_predictions(errors: list[float], state: str) -> None:
    (target,) = targets_of([], [{"error": error, "disturbed": False} for error in errors])
    assert target["state"] == state
