"""What clients measured: means by hand, and who is left out of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from strategies.evaluation import average_metrics
from tests.in_process_grid import set_task_identity
from tests.strategies.rounds import new_game

HELD = {"ada": {"red": 10, "blue": 10}, "bob": {"red": 30}}
GOOD: dict[str, Any] = {"red/num-examples": 30, "red/loss": 1.0, "red/accuracy": 0.5}


def reply(metrics: dict[str, Any] | None) -> Message:
    set_task_identity()
    asked = Message(RecordDict(), dst_node_id=7, message_type="evaluate")
    if metrics is None:
        return Message(Error(2, "boom"), reply_to=asked)
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=asked)


def averaged(ada: dict[str, Any] | None, bob: dict[str, Any] | None = GOOD) -> tuple[dict[str, Any], tuple[str, ...]]:
    found, notes = average_metrics({"bob": reply(bob), "ada": reply(ada)}, ("red", "blue"), HELD)
    return dict(found or {}), notes


def test_means_by_hand() -> None:
    found, notes = averaged({"red/num-examples": 10, "red/loss": 5.0, "red/accuracy": 0.9, "num-examples": 10})
    assert found == pytest.approx({"red/loss": 2.0, "red/accuracy": 0.6, "red/num-examples": 40})
    assert notes == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"red/num-examples": -10}, "num-examples is -10 where it holds 10"),
        ({"red/num-examples": 10**9}, "num-examples is 1e+09 where it holds 10"),
        ({"red/num-examples": 2.5}, "num-examples is 2.5 where it holds 10"),
        ({"red/num-examples": math.nan}, "num-examples is nan, no finite number"),
        ({"red/num-examples": [1, 2]}, "num-examples is [1, 2], no finite number"),
        ({"red/accuracy": math.nan}, "accuracy is nan, no finite number"),
        ({"red/loss": math.inf}, "loss is inf, no finite number"),
        ({"red/accuracy": [0.5, 0.5]}, "accuracy is [0.5, 0.5], no finite number"),
    ],
)
def test_a_client_with_bad_numbers_is_left_out_of_that_task(changes: dict[str, Any], words: str) -> None:
    ada = {"red/num-examples": 10, "red/loss": 5.0, "red/accuracy": 0.9}
    blue = {"blue/num-examples": 10, "blue/accuracy": 0.25}
    found, notes = averaged({**ada, **changes, **blue})
    assert found == {**GOOD, **blue}
    assert notes == (f"client 'ada', task 'red': evaluation left out: {words}",)


def test_counts_without_metrics_and_metrics_without_counts_do_not_count() -> None:
    assert averaged({"red/num-examples": 10})[0] == GOOD
    found, notes = averaged({"red/accuracy": 0.9})
    assert found == GOOD
    assert "num-examples is None" in notes[0]


def test_a_client_without_examples_has_nothing_to_say() -> None:
    assert averaged({"blue/num-examples": 0}) == (GOOD, ())


def test_errors_are_noted_and_nothing_is_left_of_nothing() -> None:
    assert averaged(None) == (GOOD, ("client 'ada': no evaluation: error 2",))
    assert averaged(None, None)[0] == {}
    assert average_metrics({}, ("red",), {}) == (None, ())


def test_huge_values_do_not_overflow() -> None:
    assert averaged({"red/num-examples": 10, "red/loss": 1.7e308}, {**GOOD, "red/loss": 1.7e308})[0][
        "red/loss"
    ] == pytest.approx(1.7e308)


def test_the_strategy_says_whom_it_left_out() -> None:
    game = new_game(client_evaluation=True)
    asked = list(game.strategy.configure_evaluate(1, game.arrays, ConfigRecord(), game.grid))
    replies = list(game.grid.send_and_receive(asked))
    replies[0].content["metrics"] = MetricRecord({"red/num-examples": -1, "red/accuracy": 1.0})
    found = game.strategy.aggregate_evaluate(1, [*replies, replies[0]])
    assert found is not None
    assert found["red/num-examples"] == 20
    assert game.strategy.evaluation_notes == (
        "client 'ada', task 'red': evaluation left out: num-examples is -1 where it holds 40",
    )
