"""Names, options and strategies of the user's own."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from strategies.base import StrategyError, StrategyOptions
from strategies.registry import STRATEGIES, build, check_name
from tests.strategies.rounds import new_game

OWN = "tests.strategies.own_strategies"


@pytest.mark.parametrize("name", STRATEGIES)
def test_registered_names_are_built(name: str) -> None:
    check_name(name)
    strategy = build(StrategyOptions(name=name), ["blue"])
    strategy.summary()
    assert strategy.tasks == ("blue",)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fedavgg", "strategy.name 'fedavgg' is unknown (did you mean 'fedavg'?); use one of arch-sync, fedavg"),
        ("ArchSync", "strategy.name 'ArchSync' is unknown (did you mean 'arch-sync'?)"),
        ("", "strategy.name '' is unknown; use one of"),
        ("no_such_module:X", "strategy.name 'no_such_module:X': cannot import no_such_module"),
        (f"{OWN}:MyMedia", f"strategy.name '{OWN}:MyMedia': {OWN} has no MyMedia (did you mean 'MyMedian'?)"),
        (f"{OWN}:NoStrategy", f"strategy.name '{OWN}:NoStrategy' is no class derived from flwr.serverapp.strategy"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        build(StrategyOptions(name=name), ["blue"])
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("os:path", "strategy.name 'os:path' is no class derived from flwr.serverapp.strategy.Strategy"),
        ("os:getcwd", "strategy.name 'os:getcwd' is no class derived from"),
        (f"{OWN}:NoStrategy", f"strategy.name '{OWN}:NoStrategy' is no class derived from"),
        ("os:pth", "strategy.name 'os:pth': os has no pth"),
        ("no_such_module:X", "strategy.name 'no_such_module:X': cannot import no_such_module"),
        ("flwr.serverapp.strategy:Strategy", "strategy.name 'flwr.serverapp.strategy:Strategy' does not implement"),
    ],
)
def test_what_is_no_strategy_is_refused_with_the_options(name: str, text: str) -> None:
    (fault,) = StrategyOptions(name=name).faults()
    assert fault.startswith(text)
    assert fault.isprintable()
    assert StrategyOptions(name=f"{OWN}:MyMedian").faults() == []


@pytest.mark.parametrize("name", ["NeedsMore", "OwnNeedsMore"])
def test_a_strategy_that_cannot_be_made_is_said_in_one_line(name: str) -> None:
    with pytest.raises(StrategyError, match=f"strategy.name '{OWN}:{name}' cannot be made: .*flavour") as caught:
        build(StrategyOptions(name=f"{OWN}:{name}"), ["blue"])
    assert str(caught.value).isprintable()


def test_names_are_checked_without_importing_flower() -> None:
    code = (
        "import sys; from strategies.options import StrategyOptions; from strategies import registry; "
        "assert StrategyOptions(name='krum').faults() == []; "
        "assert not {'flwr', 'torch', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"min_load": math.nan}, ["strategy.min-load must be at least 0 and at most 1, not nan"]),
        ({"q": -1.0, "loads": "x"}, ["strategy.loads must be one of auto, proportional, equal, not 'x'",
                                     "strategy.q must be at least 0, not -1.0"]),
        ({"trim_fraction": 0.5}, ["strategy.trim-fraction must be at least 0 and at most 0.499, not 0.5"]),
        ({"examples_per_round": 3.0}, ["examples-per-round 3 must lie between strategy.min-load 0.1 and "
                                       "strategy.max-load 2, or no loads can meet it"]),
        ({"min_load": 0.9, "max_load": 0.5}, ["strategy.min-load 0.9 is above strategy.max-load 0.5"]),
    ],
)  # fmt: skip
def test_all_faults_of_options_are_named(changes: dict, texts: list[str]) -> None:
    options = StrategyOptions(**changes)
    assert options.faults() == texts
    with pytest.raises(StrategyError):
        build(options, ["blue"])


def test_a_stock_subclass_of_the_users_runs_per_task() -> None:
    mine, stock = new_game(f"{OWN}:MyMedian"), new_game("fedmedian")
    for game in (mine, stock):
        assert game.play(1).refused == ()
    for key, value in stock.weights.items():
        np.testing.assert_array_equal(mine.weights[key], value)


def test_a_strategy_that_samples_is_obeyed_and_repeats() -> None:
    games = [new_game(f"{OWN}:HalfOfThem", seed=seed, shuffle=True) for seed in range(3)]
    for game in games:
        for server_round in (1, 2):
            record = game.play(server_round)
            for task in game.strategy.tasks:
                assert sum(task in client.tasks for client in record.clients.values()) == 1  # half of three
    for key, value in games[0].weights.items():
        assert {game.weights[key].tobytes() for game in games} == {value.tobytes()}


def test_a_strategy_that_raises_costs_the_round_not_the_run() -> None:
    game = new_game(f"{OWN}:Raises")
    before = game.weights
    record = game.play(1)
    assert len(record.refused) == 3
    assert record.refused[0].endswith(
        "weights stay: tests.strategies.own_strategies:Raises: ZeroDivisionError: no luck"
    )
    np.testing.assert_array_equal(game.weights["blue/w"], before["blue/w"])


def test_a_multi_task_strategy_of_the_users() -> None:
    game = new_game(f"{OWN}:LastByName")
    record = game.play(1)
    assert record.refused == ()
    assert {entry.tasks["blue"].examples for entry in record.clients.values() if "blue" in entry.tasks} == {33, 34}
