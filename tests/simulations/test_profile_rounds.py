"""Profile-only rounds and the bound by true costs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulations.fleet import Fleet, FleetError, load_fleet, parse_fleet
from simulations.profile_rounds import ProfileGame, main, summary_of
from simulations.task_costs import RecordedCosts, load_costs
from simulations.true_bound import true_bound, true_load
from simulations.virtual_device import VirtualDevice
from strategies.options import StrategyOptions

REFS = ("digits", "detection", "segmentation")
PAIR = """
cost-error = 0.0
dropout = {dropout}
[[client]]
name = "fast"
speed = 3.0
[[client]]
name = "slow"
"""


def pair(dropout: float = 0.0) -> Fleet:
    return parse_fleet("pair", PAIR.format(dropout=dropout))


def device(fleet: Fleet, index: int, costs: RecordedCosts) -> VirtualDevice:
    return VirtualDevice(fleet.deal(fleet.num_clients, REFS)[index], fleet, costs, seed=1)


def test_bound_of_one_task_on_two_machines_is_the_sum_of_their_speeds() -> None:
    """400 examples at 3/c and 1/c examples per second take 100 c seconds."""
    fleet, costs = pair(), load_costs("cpu-2-cores")
    clients = tuple(true_load(device(fleet, index, costs), {"digits": 400}, 1) for index in (0, 1))
    found = true_bound(clients, {"digits": 400}, min_load=0.1, max_load=2.0, sharing_mode="sequential")
    assert found.bound_s == pytest.approx(100 * costs.tasks["digits"].solo_cost_s, rel=1e-6)
    assert found.optimum_s == pytest.approx(found.bound_s, rel=0.01)
    assert found.idle_fraction == pytest.approx(0.0, abs=0.01)


def test_bound_counts_hidden_errors_and_drift() -> None:
    fleet = parse_fleet("off", 'cost-error = 0.5\ndrift = 0.2\n[[client]]\nname = "one"\n')
    one = device(fleet, 0, load_costs("cpu-2-cores"))
    for server_round in (1, 7):
        load = true_load(one, {"digits": 10}, server_round)
        assert load.tasks["digits"].solo_cost_s == one.true_cost("digits", server_round).solo_cost_s
    assert one.true_cost("digits", 1) != one.true_cost("digits", 7)


def test_without_hidden_errors_the_first_plan_meets_the_bound() -> None:
    played = ProfileGame(pair(), REFS, StrategyOptions()).play(1)
    assert played.optimum is not None
    assert played.record.makespan_s == pytest.approx(played.optimum.bound_s, rel=0.02)


def test_no_round_beats_the_bound_and_learning_comes_near_it() -> None:
    game = ProfileGame(load_fleet("garage"), REFS, StrategyOptions(), seed=3)
    ratios = []
    for server_round in range(1, 13):
        played = game.play(server_round)
        assert played.optimum is not None
        ratios.append(played.record.makespan_s / played.optimum.bound_s)
    assert min(ratios) >= 1 - 1e-9
    assert ratios[-1] <= 1.06
    assert ratios[-1] < ratios[0]


def test_equal_loads_are_far_from_the_bound() -> None:
    played = ProfileGame(load_fleet("garage"), REFS, StrategyOptions(name="fedavg", loads="equal")).play(1)
    assert played.optimum is not None
    assert played.record.makespan_s > 1.5 * played.optimum.bound_s


def test_the_same_seed_gives_the_same_rounds_and_another_seed_others() -> None:
    def makespans(seed: int) -> list[float]:
        game = ProfileGame(load_fleet("garage"), REFS, StrategyOptions(), seed=seed)
        return [game.play(server_round, with_bound=False).record.makespan_s for server_round in (1, 2, 3)]

    assert makespans(1) == makespans(1)
    assert makespans(1) != makespans(2)


def test_lost_replies_are_not_counted_as_idle() -> None:
    game = ProfileGame(pair(dropout=0.5), REFS, StrategyOptions())
    rounds = [game.play(server_round) for server_round in range(1, 9)]
    outcomes = {client.outcome for played in rounds for client in played.record.clients.values()}
    assert outcomes == {"trained", "failed"}
    one_lost = [
        played for played in rounds if [client.busy_s > 0 for client in played.record.clients.values()].count(True) == 1
    ]
    assert one_lost
    assert all(played.busy_idle_fraction == 0.0 for played in one_lost)


def test_a_task_without_recorded_cost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = replace(load_costs("cpu-2-cores"), tasks={})
    monkeypatch.setattr("simulations.profile_rounds.load_costs", lambda name: nothing)
    with pytest.raises(FleetError, match="no task 'digits'"):
        ProfileGame(load_fleet("garage"), REFS, StrategyOptions())


def test_summary_has_the_fields_of_a_runs() -> None:
    options = StrategyOptions()
    game = ProfileGame(load_fleet("garage"), REFS, options)
    rounds = [game.play(server_round) for server_round in (1, 2, 3)]
    summary = summary_of(rounds, fleet="garage", suite="driving", seed=1, options=options)
    assert summary["rounds"][2]["round"] == 3
    assert summary["mean_makespan_s"] == pytest.approx(sum(entry["makespan_s"] for entry in summary["rounds"]) / 3)
    assert summary["makespan_over_bound"] == pytest.approx(
        summary["rounds"][2]["makespan_s"] / summary["rounds"][2]["true_bound_s"]
    )


def test_command_writes_the_summary_and_names_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "2", "--suite", "tiny", "--json", str(tmp_path / "out.json")]) == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["rounds"]) == 2
    assert main(["--fleet", "garag"]) == 1
    assert "garage" in capsys.readouterr().err
