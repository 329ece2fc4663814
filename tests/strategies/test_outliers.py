"""Updates out of all proportion are refused by client, task and key; honest ones, however odd, are not."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_runtime.contracts import Plan, Report
from strategies.outliers import MAX_RATIO, without_outliers
from strategies.per_task import PerTask
from strategies.records import ClientRecord, ClientTaskRecord
from strategies.registry import STRATEGIES
from strategies.replies import CheckedReply, Update
from tests.strategies.fakes import bent_task
from tests.strategies.rounds import Game, new_game

Arrays = dict[str, np.ndarray]
OWN = "tests.strategies.own_strategies"


def game_with_liar(name: str, key: str, value: float, element: int = 0) -> Game:
    """A game in which one element of one array of ada's reply is `value`, in round 1."""

    def bend(plan: Plan, arrays: Arrays, report: Report) -> tuple[Arrays, Report]:
        array = np.array(arrays[key])
        if plan.server_round == 1:
            array.flat[element] = value
        return {**arrays, key: array}, report

    game = new_game(name)
    game.fleet[0].bend = bend
    return game


def game_without_ada(name: str) -> Game:
    def drop(plan: Plan, arrays: Arrays, report: Report) -> tuple[Arrays, Report]:
        return arrays, bent_task(report, "red", outcome="failed") if plan.server_round == 1 else report

    game = new_game(name)
    game.fleet[0].bend = drop
    return game


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("value", [1e38, -1e20, 1e6])
def test_a_giant_update_is_refused_by_name_and_the_task_trains_on_as_without_it(name: str, value: float) -> None:
    game, expected = game_with_liar(name, "red/w", value), game_without_ada(name)
    record = game.play(1)
    assert record.refused[0].startswith("client 'ada', task 'red': array 'red/w' moved by")
    assert record.clients["ada"].tasks["red"].outcome == "refused"
    assert record.clients["ada"].tasks["red"].examples == 0
    assert record.clients["ada"].tasks["blue"].outcome == "trained"
    assert record.clients["ada"].outcome == "partial"
    expected.play(1)
    for server_round in (2, 3):
        before = game.weights["red/w"]
        assert game.play(server_round).refused == ()
        expected.play(server_round)
        assert not np.array_equal(game.weights["red/w"], before)
    for key, array in expected.weights.items():
        np.testing.assert_array_equal(game.weights[key], array)


@pytest.mark.parametrize("key", ["red/scale", "red/bn.running_var"])
def test_scalars_and_statistics_are_looked_at_too(key: str) -> None:
    record = game_with_liar("arch-sync", key, 3e30).play(1)
    assert len(record.refused) == 1
    assert f"array {key!r} moved by 3e+30" in record.refused[0]


# ------------------------------------------------------------------------------------------------- honest updates


def checked(start: float, moves: dict[str, float], key: str = "t/w", dtype: type = np.float32) -> list[str]:
    """Lines refused of clients that move an array of `start` by so much."""
    replies = [
        CheckedReply(
            client=client,
            record=ClientRecord(outcome="trained", tasks={"t": ClientTaskRecord(examples=8, outcome="trained")}),
            updates=(
                Update(
                    client=client,
                    task="t",
                    arrays={key: np.full(4, start + move, dtype=dtype)},
                    num_examples=8,
                    num_steps=1,
                    num_held=8,
                ),
            ),
        )
        for client, move in moves.items()
    ]
    kept = without_outliers(replies, {key: np.full(4, start, dtype=dtype)})
    for reply in kept:
        assert bool(reply.updates) == (not reply.refused)
    return [line for reply in kept for line in reply.refused]


@pytest.mark.parametrize(
    ("start", "moves"),
    [
        (0.0, {"a": 1e-3, "b": 2.0, "c": 1e-6}),  # weights that start at zero
        (0.0, {"a": 5e5, "b": 3e5, "c": 4e4}),  # and go far: targets in the millions
        (0.0, {"a": 5e5, "b": 1e3}),  # after very different loads
        (1e-20, {"a": 1.0, "b": 0.0, "c": 0.0}),  # only one client has examples that matter
        (0.01, {"a": 500.0, "b": 0.1, "c": 0.1}),  # a rate at which one client diverges, not yet beyond use
        (0.0, {"a": 1e12}),  # one client only: nothing to compare with, nobody else to harm
        (1e9, {"a": 1e11, "b": 0.0}),  # large weights
        (0.0, {"a": 0.0, "b": 0.0}),  # nothing moves
    ],
)
def test_honest_updates_are_never_refused(start: float, moves: dict[str, float]) -> None:
    assert checked(start, moves) == []


def test_variances_of_unscaled_features_are_honest() -> None:
    key = "t/bn.running_var"
    assert checked(1.0, {"a": 1e18}, key) == []
    assert checked(1.0, {"a": 1e18, "b": 3e17}, key) == []
    assert checked(1.0, {"a": 65025.0, "b": 0.1, "c": 0.1}, key) == []


def test_half_floats_that_are_far_apart_are_compared_in_a_wider_type() -> None:
    assert checked(-6e4, {"a": 1.2e5, "b": 0.0}, dtype=np.float16) == []


@pytest.mark.parametrize(
    ("moves", "names"),
    [
        ({"a": 1e38}, ["a"]),  # alone, but no second moment could hold it
        ({"a": 1e30, "b": 1.0}, ["a"]),  # one of two
        ({"a": 1e30, "b": 1e20, "c": 1.0, "d": 1.0}, ["a", "b"]),  # two of four
        ({"a": 2 * MAX_RATIO, "b": 0.5, "c": 0.5}, ["a"]),
    ],
)
def test_what_is_refused(moves: dict[str, float], names: list[str]) -> None:
    lines = checked(0.5, moves)
    assert [line.partition(",")[0] for line in lines] == [f"client {name!r}" for name in names]
    assert all("task 't': array 't/w' moved by" in line for line in lines)


# ----------------------------------------------------------------------------------- state of a stock strategy


def test_a_state_that_overflows_is_put_back_and_says_who_moved_furthest() -> None:
    game = new_game(f"{OWN}:Overflows")
    game.play(1)
    before = game.weights
    record = game.play(2)
    assert len(record.refused) == 3
    assert "weights stay: the strategy's own state holds values that are not finite; client" in record.refused[0]
    assert "moved furthest, by" in record.refused[0]
    for key, array in before.items():
        np.testing.assert_array_equal(game.weights[key], array)
    assert isinstance(game.strategy, PerTask)
    state = vars(game.strategy._strategies["red"])
    np.testing.assert_array_equal(state["velocity"]["w"], np.ones(3))
    assert state["rounds_aggregated"] == 1
    assert "late" not in state
    assert game.play(3).refused == ()


def test_the_records_of_others_stay_as_they_are() -> None:
    reply = CheckedReply(client="z", record=ClientRecord(outcome="lost"), refused=("client 'z': no reply",))
    assert without_outliers([reply], {}) == [reply]
