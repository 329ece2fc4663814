"""The synchronisation benchmark: shape, headline and faults."""

import argparse

import pytest

from simulations.bench import synchronisation
from simulations.bench.synchronisation import CONDITIONS, SUITE_OF, VARIANTS, Size
from simulations.fleet import load_fleet


def options(fleets: str) -> argparse.Namespace:
    return argparse.Namespace(fleets=fleets, quick=True)


def test_rows_headline_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronisation, "QUICK", Size(num_seeds=1, num_rounds=3))
    said: list[str] = []
    result = synchronisation.run(options("campus"), said.append)
    assert len(result["rows"]) == len(CONDITIONS) * len(VARIANTS)
    assert said == [f"campus, {condition}" for condition in CONDITIONS]
    calm = {row["variant"]: row for row in result["rows"] if row["condition"] == "calm"}
    assert calm["arch-sync"]["makespan_over_bound"] >= 1 - 1e-9
    assert calm["arch-sync"]["makespan_s"] < calm["fedavg-equal"]["makespan_s"]
    assert result["headline"]["round_speedup_over_equal"]["campus/calm"] == pytest.approx(
        calm["fedavg-equal"]["makespan_s"] / calm["arch-sync"]["makespan_s"]
    )
    assert len(synchronisation.table(result).splitlines()) == 1 + len(result["rows"])


def test_an_unknown_fleet_is_named() -> None:
    with pytest.raises(ValueError, match="no fleet 'campsu'"):
        synchronisation.run(options("campsu"), print)


def test_fleets_have_the_sizes_that_the_docs_say() -> None:
    assert {name: load_fleet(name).num_clients for name in SUITE_OF} == {"campus": 8, "workshop": 32, "district": 100}
