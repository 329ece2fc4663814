"""Bad replies cost what is bad in them and nothing else, and the record names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from gpu_runtime.contracts import Plan, Report
from strategies.registry import STRATEGIES
from tests.strategies.fakes import bent_task, fake_fleet
from tests.strategies.rounds import Game, new_game

Arrays = dict[str, np.ndarray]
Bend = Callable[[Plan, Arrays, Report], tuple[Arrays, Report]]
ADA = 0


def game_without_ada(name: str, tasks: set[str], server_round: int = 1) -> Game:
    """What a bad reply must come to: a game in which ada's updates of `tasks` never were."""

    def drop(plan: Plan, arrays: Arrays, report: Report) -> tuple[Arrays, Report]:
        for task in tasks:
            report = bent_task(report, task, outcome="failed", error="left out")
        return {key: value for key, value in arrays.items() if key.partition("/")[0] not in tasks}, report

    game = new_game(name)
    game.fleet[ADA].bend = drop
    game.play(server_round)
    return game


def arrays_bent(key: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Bend:
    def bend(plan: Plan, arrays: Arrays, report: Report) -> tuple[Arrays, Report]:
        value = change(arrays[key])
        rest = {other: array for other, array in arrays.items() if other != key}
        return (rest if value is None else {**rest, key: value}), report

    return bend


def report_bent(**changes: object) -> Bend:
    return lambda plan, arrays, report: (arrays, replace(report, **changes))


def task_bent(task: str, /, **changes: object) -> Bend:
    return lambda plan, arrays, report: (arrays, bent_task(report, task, **changes))


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[0] = value
        return array

    return change


TASK_FAULTS: list[tuple[Bend, str]] = [
    (arrays_bent("red/w", with_value(np.nan)), "array 'red/w' holds 1 values that are not finite"),
    (arrays_bent("red/w", with_value(np.inf)), "array 'red/w' holds 1 values that are not finite"),
    (arrays_bent("red/w", lambda array: None), "missing array 'red/w'"),
    (arrays_bent("red/w", lambda array: array[:2]), "array 'red/w' has shape (2, 2) instead of (3, 2)"),
    (arrays_bent("red/w", lambda array: array.reshape(6)), "array 'red/w' has shape (6,) instead of (3, 2)"),
    (arrays_bent("red/w", lambda array: array.astype(float)), "array 'red/w' has dtype float64 instead of float32"),
    (arrays_bent("red/w", lambda array: array.astype("U8")), "array 'red/w' has dtype <U8 instead of float32"),
    (lambda plan, arrays, report: ({**arrays, "red/extra": arrays["red/w"]}, report), "unknown array 'red/extra'"),
    (task_bent("red", outcome="failed", error="out of memory"), "failed: out of memory"),
    (task_bent("red", outcome="cancelled", num_examples=0), "cancelled before anything was trained: deadline"),
    (task_bent("red", outcome="dreamt"), "unknown outcome 'dreamt'"),
    (task_bent("red", num_examples=0), "reports 0 examples where 1 to"),
    (task_bent("red", num_examples=10**6), "reports 1000000 examples where 1 to"),
    (task_bent("red", num_steps=0), "reports 0 steps where"),
    (task_bent("red", num_steps=1), "reports 1 steps where"),
    (task_bent("red", num_steps=10**18), "reports 1000000000000000000 steps where"),
    (task_bent("red", seconds=-1.0), "reports -1 seconds where 0 to 1e+09 can have passed"),
    (task_bent("red", seconds=1e300), "reports 1e+300 seconds where 0 to 1e+09 can have passed"),
    (task_bent("red", outcome="failed", error="\x1b[31mout\nof\x00memory\r\x1b[0m"), "failed: out of memory"),
    (task_bent("red", outcome="failed", error="x" * 10**6), "failed: " + 289 * "x" + "..."),
    (task_bent("red", task="rad"), "report has 0 entries for it instead of one"),
]  # fmt: skip


@pytest.mark.parametrize(("bend", "text"), TASK_FAULTS, ids=[text for _, text in TASK_FAULTS])
@pytest.mark.parametrize("name", ["arch-sync", "fedavg"])
def test_a_bad_task_costs_that_task_only(name: str, bend: Bend, text: str) -> None:
    game = new_game(name)
    game.fleet[ADA].bend = bend
    record = game.play(1)
    assert len(record.refused) == 1
    assert record.refused[0].startswith(f"client 'ada', task 'red': {text}")
    assert record.clients["ada"].outcome == "partial"
    assert record.clients["ada"].tasks["blue"].outcome == "trained"
    assert record.clients["ada"].tasks["red"].examples == 0
    assert record.clients["ada"].tasks["red"].error.startswith(text)
    expected = game_without_ada(name, {"red"})
    for key, value in expected.weights.items():
        np.testing.assert_array_equal(game.weights[key], value)


def no_record(name: str) -> Callable[[RecordDict], RecordDict]:
    return lambda content: RecordDict({key: record for key, record in content.items() if key != name})


def other_report(text: str) -> Callable[[RecordDict], RecordDict]:
    return lambda content: RecordDict({**content, "report": ConfigRecord({"json": text})})


REPLY_FAULTS: list[tuple[Bend | None, Callable[[RecordDict], RecordDict] | None, str]] = [
    (None, no_record("report"), "reply without ConfigRecord 'report' {'json'}"),
    (None, no_record("arrays"), "reply without ArrayRecord 'arrays'"),
    (None, other_report("{"), "report not understood: Report is not JSON"),
    (None, other_report('{"schema": 99, "kind": "Report"}'), "report not understood: Report has schema version 99"),
    (report_bent(server_round=7), None, "report has server_round 7 where 1 was asked"),
    (report_bent(attempt=3), None, "report has attempt 3 where 0 was asked"),
    (report_bent(client="eve"), None, "report has client 'eve' where 'ada' was asked"),
    (report_bent(seconds=-1.0), None, "reports -1 seconds where 0 to 1e+09 can have passed"),
    (report_bent(seconds=1e300), None, "reports 1e+300 seconds where 0 to 1e+09 can have passed"),
    (report_bent(clock="sun\ndial"), None, "report is in sun dial seconds, others of this round in virtual seconds"),
]


@pytest.mark.parametrize(("bend", "wrap", "text"), REPLY_FAULTS, ids=[text for _, _, text in REPLY_FAULTS])
@pytest.mark.parametrize("name", ["arch-sync", "fedavg"])
def test_a_bad_reply_costs_that_reply_only(
    name: str, bend: Bend | None, wrap: Callable[[RecordDict], RecordDict] | None, text: str
) -> None:
    game = new_game(name)
    game.fleet[ADA].bend, game.fleet[ADA].wrap = bend, wrap
    record = game.play(1)
    assert len(record.refused) == 1
    assert record.refused[0].startswith(f"client 'ada': {text}")
    assert record.clients["ada"].outcome == "refused"
    assert record.clients["ada"].busy_s == 0.0
    expected = game_without_ada(name, {"blue", "green", "red"})
    for key, value in expected.weights.items():
        np.testing.assert_array_equal(game.weights[key], value)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("how", "outcome", "text"),
    [
        ("raise", "failed", "error reply: RuntimeError('injected failure')"),
        ("unavailable", "failed", "error reply: Node unavailable"),
        ("silent", "lost", "no reply"),
    ],
)
def test_a_lost_client_costs_its_own_work_only(name: str, how: str, outcome: str, text: str) -> None:
    game = new_game(name, seed=5, shuffle=True)
    game.grid.fail_at(1, ADA, how)
    record = game.play(1)
    assert record.clients["ada"].outcome == outcome
    assert f"client 'ada': {text}" in record.refused
    if name != "bulyan":  # which needs three replies and now has two
        expected = game_without_ada(name, {"blue", "green", "red"})
        for key, value in expected.weights.items():
            np.testing.assert_array_equal(game.weights[key], value)
    assert game.play(2).clients["ada"].outcome == "trained"


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_reply_at_all_keeps_all_weights(name: str) -> None:
    game = new_game(name)
    before = game.weights
    for client in range(4):
        game.grid.fail_at(1, client, "silent")
    record = game.play(1)
    assert len(record.refused) == 4
    assert record.makespan_s == 0.0
    assert record.idle_fraction == 0.0
    for key, value in before.items():
        np.testing.assert_array_equal(game.weights[key], value)
    assert game.play(2).refused == ()


def test_no_reply_for_one_task_keeps_its_weights() -> None:
    game = new_game()
    for client in (0, 2, 3):  # all who hold green
        game.fleet[client].bend = task_bent("green", outcome="failed", error="boom")
    before = game.weights
    record = game.play(1)
    assert [line for line in record.refused if "'green'" in line] == list(record.refused)
    assert len(record.refused) == 3
    for key, value in before.items():
        assert np.array_equal(game.weights[key], value) == key.startswith("green/")


def test_a_cancelled_task_counts_for_what_it_trained() -> None:
    game = new_game()
    game.fleet[ADA].bend = task_bent("red", outcome="cancelled", num_examples=3, num_steps=1)
    record = game.play(1)
    assert record.refused == ()
    assert record.clients["ada"].tasks["red"].outcome == "cancelled"
    assert record.clients["ada"].tasks["red"].examples == 3


def test_clocks_are_never_mixed() -> None:
    game = new_game()
    game.fleet[3].bend = report_bent(clock="measured")
    record = game.play(1)
    assert record.refused == ("client 'dan': report is in measured seconds, others of this round in virtual seconds",)
    assert record.clock == "virtual"


def test_strays_and_second_replies_are_named_and_ignored() -> None:
    game = new_game()
    late = list(game.grid.send_and_receive(game.strategy.configure_train(1, game.arrays, ConfigRecord(), game.grid)))
    arrays, _ = game.strategy.aggregate_train(1, [*late, late[0]])
    assert game.strategy.round_record().refused == ("client 'ada': second reply in one round; ignored",)
    game.strategy.configure_train(2, game.arrays, ConfigRecord(), game.grid)
    game.strategy.aggregate_train(2, late)
    assert all("server_round 1 where 2 was asked" in line for line in game.strategy.round_record().refused)
    assert arrays is not None


def test_arrays_of_a_task_that_was_not_planned_are_ignored() -> None:
    game, expected = new_game(), new_game()
    game.fleet[1].bend = lambda plan, arrays, report: ({**arrays, "green/w": arrays["blue/w"]}, report)
    record = game.play(1)
    expected.play(1)
    assert record.refused == ("client 'bob': array 'green/w' belongs to no planned task; ignored",)
    for key, value in expected.weights.items():
        np.testing.assert_array_equal(game.weights[key], value)


def test_garbage_bytes_are_refused() -> None:
    def garble(content: RecordDict) -> RecordDict:
        arrays = dict(content.array_records["arrays"])
        arrays["red/w"] = Array(dtype="float32", shape=(3, 2), stype="numpy.ndarray", data=b"nonsense")
        return RecordDict({**content, "arrays": ArrayRecord(arrays)})

    game = new_game()
    game.fleet[ADA].wrap = garble
    record = game.play(1)
    assert len(record.refused) == 1
    assert record.refused[0].startswith("client 'ada', task 'red': array 'red/w' cannot be decoded")


def test_qfedavg_refuses_only_updates_without_a_loss() -> None:
    game = new_game("qfedavg")
    game.fleet[ADA].bend = task_bent("red", mean_loss=None)
    record = game.play(1)
    assert len(record.refused) == 1
    assert record.refused[0].startswith("client 'ada', task 'red': the strategy needs its mean training loss")
    assert not np.array_equal(game.weights["red/w"], new_game("qfedavg").weights["red/w"])


def test_fakes_train_what_they_are_told() -> None:
    """The fleet these tests stand on: names in order, as `ADA` expects."""
    assert [client.profile.client for client in fake_fleet()] == ["ada", "bob", "cyd", "dan"]


def test_no_single_client_decides_on_the_clock() -> None:
    game = new_game()
    game.fleet[ADA].bend = report_bent(clock="measured")  # the first by name
    record = game.play(1)
    assert record.refused == ("client 'ada': report is in measured seconds, others of this round in virtual seconds",)
    assert {record.clients[name].outcome for name in ("bob", "cyd", "dan")} == {"trained"}
    assert record.clock == "virtual"


def test_measured_seconds_are_no_more_than_have_passed() -> None:
    fleet = fake_fleet()
    for client in fleet:
        client.profile = replace(client.profile, clock="measured")
        client.bend = lambda plan, arrays, report: (
            arrays,
            replace(report, seconds=0.5, tasks=tuple(replace(task, seconds=0.5) for task in report.tasks)),
        )
    fleet[ADA].bend = report_bent(seconds=1e5)
    record = new_game(fleet=fleet).play(1)
    assert len(record.refused) == 1
    assert record.refused[0].startswith("client 'ada': reports 100000 seconds where 0 to ")
    assert record.makespan_s == 0.5


def test_error_replies_and_keys_are_one_short_line() -> None:
    def garble(content: RecordDict) -> RecordDict:
        arrays = dict(content.array_records["arrays"])
        arrays["pink/" + "\n\x1b[31m" * 10_000] = arrays["red/w"]
        return RecordDict({**content, "arrays": ArrayRecord(arrays)})

    game = new_game()
    game.fleet[ADA].wrap = garble
    game.fleet[1].wrap = other_report('{"schema": 2, "kind": "Report", "' + "\\u001b[2J" * 9999 + '": 1}')
    record = game.play(1)
    assert len(record.refused) == 2
    for line in record.refused:
        assert line.isprintable()
        assert len(line) < 400


def test_what_was_overcome_on_a_client_is_recorded() -> None:
    game = new_game("arch-sync")
    notes = ("red: micro-batch 8 -> 4\nafter \x1b[31mout of memory", *(f"note {index}" for index in range(50)))
    game.fleet[ADA].bend = report_bent(backend="processes", notes=notes)
    ada = game.play(1).clients["ada"]
    assert ada.backend == "processes"
    assert ada.notes[:2] == ("red: micro-batch 8 -> 4 after out of memory", "note 0")
    assert len(ada.notes) == 20
