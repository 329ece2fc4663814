"""Recorded costs: those checked in, reading, writing and scaling."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_runtime.contracts import BlockCost, TaskCost
from gpu_runtime.device import Device
from simulations import record_costs
from simulations.fleet import fleet_names, load_fleet
from simulations.task_costs import CostsError, load_costs
from tasks.registry import SUITES

COST = TaskCost(
    demand=0.5,
    solo_cost_s=0.123456789,
    speed_curve=((0.5, 0.75), (1.0, 1.0)),
    blocks=(
        BlockCost(forward_s=0.1, backward_s=0.2, boundary_bytes=12345678, forward_call_s=0.25, backward_call_s=0.5),
    ),
    update_s=0.125,
    target_bytes=8,
)
DEVICE = Device(name="some cpu", kind="cpu", num_cores=2)


@pytest.mark.parametrize("name", fleet_names())
def test_shipped_fleets_have_costs_of_all_tasks_of_all_suites(name: str) -> None:
    recorded = load_costs(load_fleet(name).costs)
    assert {task for suite in SUITES.values() for task in suite} <= set(recorded.tasks)
    for cost in recorded.tasks.values():
        assert cost.speed_curve[-1] == (1.0, 1.0)
        assert 1e-7 < cost.solo_cost_s < 1.0


def test_scaling_changes_seconds_only() -> None:
    double = COST.scaled(2.0)
    assert double.solo_cost_s == 2 * COST.solo_cost_s
    assert double.blocks[0] == BlockCost(
        forward_s=0.2, backward_s=0.4, boundary_bytes=12345678, forward_call_s=0.5, backward_call_s=1.0
    )
    assert double.update_s == 0.25
    assert replace(double, solo_cost_s=COST.solo_cost_s, blocks=COST.blocks, update_s=COST.update_s) == COST


def test_what_is_written_is_read_rounded_to_what_was_measured(tmp_path: Path) -> None:
    path = record_costs.write("mine", DEVICE, {"digits": COST}, "by hand", tmp_path)
    assert path == tmp_path / "mine.json"
    recorded = load_costs("mine", tmp_path)
    assert (recorded.device, recorded.num_cores, recorded.provenance) == ("some cpu", 2, "by hand")
    assert recorded.tasks["digits"] == replace(COST, solo_cost_s=0.1235)


def test_other_tasks_of_the_same_machine_are_kept_and_those_of_another_dropped(tmp_path: Path) -> None:
    record_costs.write("mine", DEVICE, {"digits": COST}, "by hand", tmp_path)
    record_costs.write("mine", DEVICE, {"detection": COST}, "by hand", tmp_path)
    assert set(load_costs("mine", tmp_path).tasks) == {"digits", "detection"}
    record_costs.write("mine", replace(DEVICE, name="another cpu"), {"detection": COST}, "by hand", tmp_path)
    assert set(load_costs("mine", tmp_path).tasks) == {"detection"}


def test_unknown_costs_name_the_nearest(tmp_path: Path) -> None:
    record_costs.write("cpu-2-cores", DEVICE, {"digits": COST}, "by hand", tmp_path)
    with pytest.raises(CostsError, match="did you mean 'cpu-2-cores'"):
        load_costs("cpu-2-core", tmp_path)


@pytest.mark.parametrize(
    "damage", [{"tasks": {"digits": {"demand": 2.0}}}, {"tasks": 3}, {"tasks": {"digits": {"demand": 0.5}}}]
)
def test_damaged_costs_are_named(damage: dict[str, object], tmp_path: Path) -> None:
    record_costs.write("mine", DEVICE, {"digits": COST}, "by hand", tmp_path)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(CostsError, match="recorded costs 'mine'"):
        load_costs("mine", tmp_path)
    path.write_text("{")
    with pytest.raises(CostsError, match="recorded costs 'mine'"):
        load_costs("mine", tmp_path)


def test_an_unknown_task_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert record_costs.main(["--tasks", "digitz"]) == 2
    assert "digitz" in capsys.readouterr().err
