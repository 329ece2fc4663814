"""Choosing by paired rounds: noise and drift that all share do not decide, and time goes where it is close."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gpu_runtime.contest import CLEARLY_FASTER, MAX_ROUNDS, MIN_ROUNDS, Outcome, contest


class Machine:
    """Candidates with true speeds on a machine whose pace changes; a whole run takes `run_s` on its clock."""

    def __init__(
        self, speeds: dict[str, float], pace: Callable[[int], float] = lambda number: 1.0, run_s: float = 1.0
    ) -> None:
        self.speeds, self.pace, self.run_s = speeds, pace, run_s
        self.log: list[str] = []
        self.now_s = 0.0

    def run(self, name: str, part: float) -> float | None:
        assert 0.0 < part <= 1.0
        self.log.append(name)
        self.now_s += part * self.run_s
        return self.speeds[name] * self.pace(len(self.log)) or None

    def clock(self) -> float:
        return self.now_s

    def outcome(self, budget_s: float = 1e9) -> Outcome:
        found = contest(list(self.speeds), self.run, budget_s=budget_s, clock=self.clock)
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({"cpu": 1.0}, "cpu"),
        ({"cpu": 1.0, "processes": 1.04}, "cpu"),
        ({"cpu": 1.0, "processes": 1.06}, "processes"),
        ({"cpu": 1.2, "processes": 1.1, "sequential": 1.0}, "cpu"),
        ({"cpu": 0.7, "processes": 0.72, "sequential": 0.9}, "sequential"),
        ({"cpu": 1.0, "processes": 1.2, "sequential": 1.25}, "processes"),
    ],
)
def test_a_later_candidate_must_be_clearly_faster(speeds: dict[str, float], best: str) -> None:
    found = Machine(speeds).outcome()
    assert found.best == best
    assert found.speeds == pytest.approx(speeds)
    assert list(found.speeds) == list(speeds)


@pytest.mark.parametrize("seed", range(20))
def test_a_pace_that_wanders_does_not_decide(seed: int) -> None:
    draw, level = random.Random(seed), 1.0

    def pace(number: int) -> float:
        nonlocal level
        level *= draw.uniform(0.85, 1.18)  # from one run to the next
        return level * (0.4 if draw.random() < 0.05 else 1.0)  # and now and then somebody else takes the machine

    assert Machine({"cpu": 1.0, "processes": 1.4, "sequential": 0.7}, pace).outcome().best == "processes"


def test_a_pace_that_falls_steadily_favours_nobody() -> None:
    found = Machine({"first": 1.0, "second": 1.0}, lambda number: 0.9**number).outcome()
    assert found.best == "first"
    machine = Machine({"first": 1.0, "second": 1.0})
    machine.outcome()
    assert machine.log[:4] == ["first", "second", "second", "first"]


def test_what_is_clear_ends_early_and_what_is_close_goes_on() -> None:
    clear = Machine({"cpu": 1.0, "sequential": 0.5})
    clear.outcome()
    assert len(clear.log) == 2 * MIN_ROUNDS
    close = Machine({"cpu": 1.0, "processes": CLEARLY_FASTER, "sequential": 0.5})
    found = close.outcome()
    assert found.num_rounds == {"cpu": MAX_ROUNDS, "processes": MAX_ROUNDS, "sequential": MIN_ROUNDS}
    lucky = Machine({"cpu": 1.0, "processes": 0.97}, lambda number: 2.0 if number == 2 else 1.0)
    assert lucky.outcome().best == "cpu"


@pytest.mark.parametrize(
    ("budget_s", "num_rounds"),
    # A whole round takes two seconds, the first is always finished, and later ones shrink to a quarter.
    [(0.5, 1), (2.0, 1), (2.4, 1), (2.5, 2), (4.1, 5), (10.0, 5), (14.0, 7), (99.0, MAX_ROUNDS)],
)
def test_the_budget_holds_and_a_short_one_shortens_the_rounds(budget_s: float, num_rounds: int) -> None:
    machine = Machine({"cpu": 1.0, "processes": CLEARLY_FASTER})
    found = machine.outcome(budget_s)
    assert machine.clock() <= max(2.0, budget_s) + 1e-9
    assert found.num_rounds["cpu"] == num_rounds


@pytest.mark.parametrize(("faster", "best"), [(1.1, "cpu"), (1.2, "processes")])
def test_a_single_round_must_show_more(faster: float, best: str) -> None:
    assert Machine({"cpu": 1.0, "processes": faster}).outcome(budget_s=0.1).best == best


def test_candidates_that_cannot_do_the_work_are_missing() -> None:
    found = Machine({"cpu": 0.0, "processes": 1.0}).outcome()
    assert (found.best, found.speeds) == ("processes", {"processes": 1.0})
    machine = Machine({"cpu": 0.0})
    assert contest(["cpu"], machine.run, budget_s=9.0) is None
    assert contest([], machine.run, budget_s=9.0) is None
    # Those that left as slower serve when all others fail later.
    dying = Machine({"cpu": 1.0, "processes": 1.0, "slow": 0.1}, lambda number: 0.0 if number > 9 else 1.0)
    assert dying.outcome().best == "slow"
