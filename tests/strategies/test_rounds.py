"""Whole rounds, for arch-sync and every stock strategy by one suite."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from gpu_runtime.contracts import Plan, from_json
from strategies.base import StrategyError, StrategyOptions
from strategies.registry import STOCK, STRATEGIES, build
from tests.in_process_grid import InProcessGrid
from tests.strategies.fakes import HOLDINGS, TASKS, FakeClient, fake_fleet, initial_arrays, profile_of
from tests.strategies.rounds import new_game

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_stock = pytest.mark.parametrize("name", STOCK)


def plans_of(messages: Iterable[Message]) -> dict[str, Plan]:
    plans = [from_json(Plan, str(message.content.config_records["config"]["plan"])) for message in messages]
    return {plan.client: plan for plan in plans}


@every_strategy
def test_three_rounds_train_every_task_whatever_the_order_of_replies_and_node_ids(name: str) -> None:
    results = []
    for seed in range(3):
        game = new_game(name, seed=seed, shuffle=True)
        for server_round in (1, 2, 3):
            record = game.play(server_round)
            assert record.refused == ()
            assert {client.outcome for client in record.clients.values()} == {"trained"}
        results.append(game.weights)
    start = new_game(name).weights
    for key, value in start.items():
        found = results[0][key]
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert np.isfinite(found).all()
        assert not np.array_equal(found, value), f"{key} did not change"
        assert {result[key].tobytes() for result in results} == {found.tobytes()}
    assert list(results[0]) == list(start)


@every_strategy
def test_all_strategies_train_the_same_totals_within_what_clients_hold(name: str) -> None:
    game = new_game(name)
    record = game.play(1)
    totals = dict.fromkeys(TASKS, 0)
    for client, entry in record.clients.items():
        assert set(entry.tasks) == {task for task, (number, _) in HOLDINGS[client].items() if number}
        for task, done in entry.tasks.items():
            totals[task] += done.examples
            assert 0.1 * HOLDINGS[client][task][0] <= done.examples <= 2 * HOLDINGS[client][task][0]
    assert totals == {"blue": 100, "green": 80, "red": 75}


@every_strategy
def test_a_client_gets_one_message_with_its_own_tasks_only(name: str) -> None:
    game = new_game(name, seed=3, trace=True, learning_rates={"blue": 0.5}, batch_sizes={"red": 4})
    game.play(1)
    plans = plans_of(game.sent)
    assert sorted(plans) == ["ada", "bob", "cyd", "dan"]
    for message, plan in zip(game.sent, plans.values(), strict=True):
        assert message.metadata.message_type == "train"
        assert message.content.config_records["config"]["server-round"] == 1
        planned = {task.task for task in plan.tasks}
        assert {key.partition("/")[0] for key in message.content.array_records["arrays"]} == planned
        assert {task.learning_rate for task in plan.tasks if task.task == "blue"} <= {0.5}
        assert {task.batch_size for task in plan.tasks if task.task == "red"} <= {4}
        assert plan.trace
    contents = [id(message.content.config_records["config"]) for message in game.sent]
    assert len(set(contents)) == len(contents)


def test_the_record_adds_up_and_is_json() -> None:
    game = new_game()
    record = game.play(1)
    assert record.makespan_s == max(client.busy_s for client in record.clients.values())
    busy = sum(client.busy_s for client in record.clients.values())
    assert record.idle_fraction == pytest.approx(1 - busy / (4 * record.makespan_s))
    assert record.plan_s is not None
    assert record.bound_s is not None
    assert record.makespan_s == pytest.approx(record.plan_s)
    assert record.bound_s <= record.plan_s <= 1.2 * record.bound_s
    assert record.clock == "virtual"
    text = json.dumps(dataclasses.asdict(record), allow_nan=False)
    assert json.loads(text)["clients"]["ada"]["tasks"]["blue"]["outcome"] == "trained"


def test_arch_sync_is_faster_and_less_idle_than_the_same_totals_by_data() -> None:
    planned, stock = new_game("arch-sync").play(1), new_game("fedavg").play(1)
    assert stock.makespan_s > 1.5 * planned.makespan_s
    assert planned.idle_fraction < 0.1 < stock.idle_fraction
    assert stock.bound_s == pytest.approx(planned.bound_s)


def test_fedavg_is_the_weighted_mean_of_what_clients_sent() -> None:
    game = new_game("fedavg")
    sent: dict[str, np.ndarray] = {}
    for client in game.fleet:
        client.bend = lambda plan, arrays, report: (sent.__setitem__(plan.client, arrays["red/w"]) or arrays, report)  # type: ignore[func-returns-value]
    record = game.play(1)
    examples = {client: entry.tasks["red"].examples for client, entry in record.clients.items() if "red" in entry.tasks}
    assert set(sent) >= set(examples) == {"ada", "bob", "cyd"}
    expected = sum(sent[client] * (number / 75) for client, number in examples.items())
    np.testing.assert_allclose(game.weights["red/w"], expected, rtol=1e-6)


def test_fedprox_tells_clients_to_pull() -> None:
    game = new_game("fedprox", proximal_mu=0.3)
    game.play(1)
    assert {task.proximal_mu for plan in plans_of(game.sent).values() for task in plan.tasks} == {0.3}
    game = new_game("fedavg", proximal_mu=0.3)
    game.play(1)
    assert {task.proximal_mu for plan in plans_of(game.sent).values() for task in plan.tasks} == {0.0}


def test_server_optimisers_keep_state_per_task() -> None:
    """FedAvgM without momentum is FedAvg; with it, the second round differs and the first does not."""
    plain, still, moving = (new_game(*args, **more) for args, more in (
        (("fedavg",), {}), (("fedavgm",), {"server_momentum": 0.0}), (("fedavgm",), {"server_momentum": 0.9}),
    ))  # fmt: skip
    for game in (plain, still, moving):
        game.play(1)
    np.testing.assert_allclose(moving.weights["blue/w"], plain.weights["blue/w"], rtol=1e-5)
    for game in (plain, still, moving):
        game.play(2)
    np.testing.assert_allclose(still.weights["blue/w"], plain.weights["blue/w"], rtol=1e-5)
    assert not np.allclose(moving.weights["blue/w"], plain.weights["blue/w"], rtol=1e-3)


@pytest.mark.parametrize("name", ["arch-sync", "fedadam"])
def test_flowers_own_start_works_too(name: str) -> None:
    grid = InProcessGrid(fake_fleet(), seed=1, shuffle=True)
    strategy = build(StrategyOptions(name=name, client_evaluation=True), TASKS)
    result = strategy.start(grid, initial_arrays(), num_rounds=2, timeout=10)
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.train_metrics_clientapp[2]["blue/num-examples"] == 100
    assert result.evaluate_metrics_clientapp[2]["red/accuracy"] == pytest.approx(0.9)
    assert result.evaluate_metrics_clientapp[2]["red/num-examples"] == 30


def test_clients_do_not_evaluate_unless_asked() -> None:
    game = new_game()
    assert list(game.strategy.configure_evaluate(1, game.arrays, ConfigRecord(), game.grid)) == []
    assert game.strategy.aggregate_evaluate(1, []) is None


def test_clients_without_examples_get_no_work() -> None:
    fleet = [*fake_fleet(), FakeClient(profile_of("eve", {"blue": (0, 0.01)})), FakeClient(profile_of("fay", {}))]
    game = new_game(fleet=fleet)
    assert set(game.play(1).clients) == {"ada", "bob", "cyd", "dan"}


def test_without_any_cost_loads_follow_the_data_and_seconds_are_not_claimed() -> None:
    fleet = [FakeClient(profile_of(name, {"blue": (size, 0.0)})) for name, size in (("a", 100), ("b", 100))]
    game = new_game(fleet=fleet, tasks=("blue",))
    record = game.play(1)
    assert {client: entry.tasks["blue"].examples for client, entry in record.clients.items()} == {"a": 50, "b": 50}
    assert record.plan_s is None
    assert record.bound_s is None


def test_clients_come_and_go() -> None:
    game = new_game(fleet=fake_fleet())
    game.play(1)
    game.grid.remove(0)
    record = game.play(2)
    assert set(record.clients) == {"bob", "cyd", "dan"}
    game.grid.remove(2)
    game.grid.remove(3)
    record = game.play(3)
    assert set(record.clients) == {"bob"}
    assert record.refused == ("task 'green': no client that is here holds it; its weights stay",)
    game.grid.remove(1)
    record = game.play(4)
    assert record.clients == {}
    assert record.makespan_s == 0.0


def test_a_repeated_round_is_a_new_attempt() -> None:
    game = new_game()
    game.play(1)
    game.play(1)
    assert {plan.attempt for plan in plans_of(game.sent).values()} == {1}
    game.play(2)
    assert {plan.attempt for plan in plans_of(game.sent).values()} == {0}


@pytest.mark.parametrize(
    ("holdings", "text"),
    [
        ({}, "no client holds an example of any task (blue, green, red)"),
        ({"a": {"blue": (0, 0.1)}}, "no client holds an example of any task"),
        ({"a": {"blue": (5, 0.1), "red": (5, 0.1)}}, "task 'green': no client holds an example of it"),
    ],
)
@pytest.mark.parametrize("name", ["arch-sync", "fedavg"])
def test_nothing_to_train_is_said_before_the_first_round(name: str, holdings: dict, text: str) -> None:
    strategy = build(StrategyOptions(name=name), TASKS)
    with pytest.raises(StrategyError) as caught:
        strategy.prepare({index: profile_of(client, tasks) for index, (client, tasks) in enumerate(holdings.items())})
    assert str(caught.value).startswith(text)


def test_two_nodes_of_one_name_are_refused() -> None:
    strategy = build(StrategyOptions(), TASKS)
    with pytest.raises(StrategyError, match="two nodes call themselves 'ada'"):
        strategy.prepare({1: profile_of("ada", HOLDINGS["ada"]), 2: profile_of("ada", HOLDINGS["bob"])})


@every_stock
@pytest.mark.parametrize("loads", ["proportional", "equal"])
def test_stock_loads_by_data_or_equal(name: str, loads: str) -> None:
    record = new_game(name, loads=loads).play(1)
    blue = {client: entry.tasks["blue"].examples for client, entry in record.clients.items() if "blue" in entry.tasks}
    assert blue == ({"ada": 50, "bob": 30, "dan": 20} if loads == "proportional" else {"ada": 34, "bob": 33, "dan": 33})


def test_too_few_clients_for_a_robust_strategy() -> None:
    # bulyan needs 4 * 0 + 3 clients; green is given to ada and cyd only.
    holdings = {client: dict(tasks) for client, tasks in HOLDINGS.items()}
    del holdings["dan"]["green"]
    game = new_game("bulyan", fake_fleet(holdings))
    before = game.weights
    record = game.play(1)
    assert record.refused == ("task 'green': weights stay: bulyan needs at least 3 usable replies, there are 2",)
    np.testing.assert_array_equal(game.weights["green/w"], before["green/w"])
    assert not np.array_equal(game.weights["blue/w"], before["blue/w"])
    with pytest.raises(StrategyError, match=r"krum needs at least 5 clients a task; clients: blue 3, green 3, red 3"):
        new_game("krum", num_malicious_nodes=1)


def test_clients_that_can_be_given_no_more_are_known() -> None:
    game = new_game("arch-sync", examples_per_round=2.0)
    assert game.strategy.at_their_limit() == []
    game.play(1)
    assert game.strategy.at_their_limit() == ["ada", "bob", "cyd", "dan"]
    game = new_game("fedavg", examples_per_round=0.5)
    game.play(1)
    assert game.strategy.at_their_limit() == []
