"""The whole program in one process: settings, run loop, strategy, virtual fleet, ClientApp, runtime, tasks."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from client_app.app import app as client_app
from gpu_runtime.settings import flatten
from server_app import app as server_app
from server_app import run_loop
from server_app.checkpoint import load_weights
from server_app.evaluation import Evaluator
from server_app.exchange import NoClientsError
from server_app.history import RunHistory
from server_app.settings import Settings
from strategies.options import StrategyError
from tasks.data import Once
from tasks.errors import TaskError
from tests.in_process_grid import InProcessGrid

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
DEFAULTS = flatten(PYPROJECT["tool"]["flwr"]["app"]["config"])
GARAGE = ["workstation", "desktop", "laptop", "old-laptop"]
TINY = {"suite": "tiny", "rounds": 2, "deterministic": True, "join-timeout-s": 1.5, "round-timeout-s": 5.0}

Answer = Callable[[Message, Context], Message]


def federate(
    folder: Path,
    *,
    nodes: int = 4,
    spoil: Callable[[InProcessGrid], None] | None = None,
    app: Any = client_app,
    shuffle: bool = False,
    grid_seed: int = 0,
    **changes: Any,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run a federation in this process; last weights and summary. Underscores in `changes` are dashes, two are dots."""
    config = {**DEFAULTS, **TINY, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}}
    settings = Settings.from_run_config(config)
    grid = InProcessGrid([app] * nodes, seed=grid_seed, shuffle=shuffle, run_config=config)
    if spoil:
        spoil(grid)
    folder.mkdir(parents=True, exist_ok=True)
    history = RunHistory(folder, settings)
    arrays = server_app.federate(grid, settings, history)
    history.finish()
    return run_loop.to_numpy(arrays), json.loads((folder / "summary.json").read_text())


def assert_equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert value.tobytes() == two[key].tobytes(), key


def spoiled(change: Callable[[Message], None], *, server_round: int = 1, client: str = "desktop") -> Answer:
    """The ClientApp, except that the reply of `client` in `server_round` is changed before it is sent."""

    def answer(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        config = message.content.config_records.get("config", {})
        now = message.metadata.message_type == "train" and config.get("server-round") == server_round
        if now and json.loads(str(config["plan"]))["client"] == client:
            change(reply)
        return reply

    return answer


def edit_array(key: str, edit: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        arrays = dict(reply.content["arrays"].items())
        new = edit(arrays.pop(key).numpy().copy())
        if new is not None:
            arrays[key] = Array(new)
        reply.content["arrays"] = ArrayRecord(arrays)

    return change


def first_key(task: str) -> str:
    settings = Settings.from_run_config({**DEFAULTS, **TINY})
    arrays = Evaluator(settings.task_refs, settings.data, settings.sharing).initial_arrays(1)
    return next(key for key in arrays if key.startswith(f"{task}/"))


@pytest.mark.parametrize("strategy", ["arch-sync", "fedavg", "fedadam", "fedprox"])
def test_all_tasks_of_the_garage_train(tmp_path: Path, strategy: str) -> None:
    weights, summary = federate(tmp_path, strategy__name=strategy)
    start = Evaluator(("tiny-digits",), Settings.from_run_config({**DEFAULTS, **TINY}).data, _sharing()).initial_arrays(
        1
    )
    assert any(not np.array_equal(weights[key], value) for key, value in start.items())
    assert summary["strategy"] == strategy
    for entry in summary["rounds"]:
        assert sorted(entry["clients"]) == sorted(GARAGE)
        assert entry["refused"] == []
        assert {client["outcome"] for client in entry["clients"].values()} == {"trained"}
        assert set(entry["tasks"]) == {"tiny-digits", "tiny-faces", "tiny-scenes"}
        assert entry["makespan_s"] >= entry["bound_s"] * 0.5
    assert summary["examples_per_s"] > 0
    assert summary["bytes_up"] > 0


def _sharing() -> Any:
    return Settings.from_run_config({**DEFAULTS, **TINY}).sharing


def test_all_strategies_train_the_same_number_of_examples(tmp_path: Path) -> None:
    totals = []
    for strategy, loads in (("arch-sync", "auto"), ("fedavg", "proportional"), ("fedavg", "equal")):
        _, summary = federate(
            tmp_path / f"{strategy}-{loads}", strategy__name=strategy, strategy__loads=loads, rounds=1
        )
        clients = summary["rounds"][0]["clients"].values()
        totals.append(
            {
                task: sum(client["tasks"].get(task, {"examples": 0})["examples"] for client in clients)
                for task in summary["final"]
            }
        )
    assert totals[0] == totals[1] == totals[2]
    assert all(total > 0 for total in totals[0].values())


def test_weights_do_not_depend_on_reply_order_node_ids_or_cores(tmp_path: Path) -> None:
    one, _ = federate(tmp_path / "one")
    two, _ = federate(tmp_path / "two", shuffle=True, grid_seed=7, sharing__cores=1)
    three, _ = federate(tmp_path / "three", shuffle=True, grid_seed=8, sharing__mode="sequential")
    other, _ = federate(tmp_path / "other", seed=2)
    assert_equal(one, two)
    assert one.keys() == three.keys()
    assert any(not np.array_equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("how", ["raise", "unavailable", "silent"])
def test_a_client_that_fails_costs_its_own_round_only(tmp_path: Path, how: str) -> None:
    _, summary = federate(tmp_path, spoil=lambda grid: grid.fail_at(1, 1, how), round_timeout_s=2.0)
    first, second = summary["rounds"]
    assert first["clients"]["desktop"]["outcome"] in ("lost", "failed")
    assert any("desktop" in line for line in first["refused"]) or first["clients"]["desktop"]["error"]
    assert {first["clients"][name]["outcome"] for name in GARAGE if name != "desktop"} == {"trained"}
    assert {client["outcome"] for client in second["clients"].values()} == {"trained"}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda array: np.full_like(array, np.nan), "finite"),
        (lambda array: None, "lacks"),
        (lambda array: array[:1], "shape"),
        (lambda array: array.astype(np.float64), "dtype"),
    ],
    ids=["nan", "missing-key", "odd-shape", "odd-dtype"],
)
def test_a_bad_reply_is_refused_by_name_and_the_run_goes_on(
    tmp_path: Path, edit: Callable[[np.ndarray], np.ndarray | None], words: str
) -> None:
    key = first_key("tiny-digits")
    weights, summary = federate(tmp_path, app=spoiled(edit_array(key, edit)))
    (line,) = summary["rounds"][0]["refused"]
    assert "desktop" in line
    assert "tiny-digits" in line
    assert words in line or key.partition("/")[2] in line
    assert summary["rounds"][0]["clients"]["desktop"]["tasks"]["tiny-faces"]["outcome"] == "trained"
    assert summary["rounds"][1]["refused"] == []
    assert all(np.isfinite(value).all() for value in weights.values())


def test_a_wrong_primary_metric_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tiny.TinyDigits.primary_metric", "acc")
    asked: list[InProcessGrid] = []
    with pytest.raises(TaskError, match="primary_metric 'acc' is not among what its metrics compute: accuracy"):
        federate(tmp_path, rounds=1, spoil=asked.append)
    assert asked[0].sent == []


def test_a_round_1_without_any_score_ends_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.metrics.ClassAccuracy.compute", lambda self: {"accuracy": float("nan")})
    with pytest.raises(TaskError, match="task 'tiny-digits': no score: metric 'accuracy' must be a finite number"):
        federate(tmp_path, tasks="tiny-digits", rounds=1)


def scores_of_digits(*computed: Any) -> Callable[[Any], Any]:
    """`TinyDigits.metrics` whose `compute` gives, time after time, what stands in `computed`; errors are raised."""
    left = list(computed)

    class Scores:
        def update(self, outputs: Any, targets: Any) -> None:
            pass

        def compute(self) -> Any:
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    return lambda self: Scores()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"accuracy": float("nan")}, "metric 'accuracy' must be a finite number, not nan"),
        ({"accuracy": np.zeros(2)}, "metric 'accuracy' must be a number, not array"),
        ({"precision": 0.5}, "primary_metric 'accuracy' is not among what its metrics compute: precision"),
        (ValueError("no\nluck"), "ValueError: no"),
        (0.5, "must return a dict, not float"),
    ],
    ids=["nan", "two-elements", "primary-lost", "raises", "no-dict"],
)
def test_a_task_without_a_score_costs_that_score_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, words: str
) -> None:
    good = {"accuracy": 0.5}
    monkeypatch.setattr("tasks.tiny.TinyDigits.metrics", scores_of_digits(good, good, bad, {"accuracy": 0.75}))
    weights, summary = federate(tmp_path, tasks="tiny-digits,tiny-faces", rounds=3)
    first, second, third = summary["rounds"]
    score = second["tasks"]["tiny-digits"]
    assert (score["loss"], score["metrics"]) == (None, {})
    assert words in score["error"]
    (line,) = second["refused"]
    assert line == f"task 'tiny-digits': no score: {score['error']}"
    assert second["tasks"]["tiny-faces"]["metrics"].keys() == {"accuracy"}
    assert [first["refused"], third["refused"]] == [[], []]
    best = json.loads((tmp_path / "checkpoint" / "best.json").read_text())
    assert (best["rounds"]["tiny-digits"], best["metrics"]["tiny-digits"]) == (3, 0.75)
    assert_equal(weights, load_weights(tmp_path / "checkpoint", "last"))


def test_best_weights_of_a_task_without_a_score_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once, _ = federate(tmp_path / "once", tasks="tiny-digits,tiny-faces", rounds=1)
    good = {"accuracy": 0.5}
    monkeypatch.setattr("tasks.tiny.TinyDigits.metrics", scores_of_digits(good, good, ValueError("boom")))
    weights, _ = federate(tmp_path, tasks="tiny-digits,tiny-faces", rounds=2)
    best = load_weights(tmp_path / "checkpoint", "best")
    digits = [key for key in weights if key.startswith("tiny-digits/")]
    assert_equal({key: best[key] for key in digits}, {key: once[key] for key in digits})
    assert any(not np.array_equal(weights[key], once[key]) for key in digits)


@pytest.mark.parametrize(
    ("target", "fault", "words"),
    [
        (
            "load",
            OSError("disk\nfull"),
            "task 'tiny-faces': its held-out examples cannot be loaded: OSError: disk full",
        ),
        ("metrics", ValueError("no metrics"), "task 'tiny-faces': ValueError: no metrics"),
        ("loss", KeyError("logits"), "task 'tiny-faces': KeyError: 'logits'"),
    ],
)
def test_a_task_that_cannot_be_evaluated_ends_the_run_before_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, fault: Exception, words: str
) -> None:
    def fail(self: Any, *arguments: Any) -> Any:
        raise fault

    asked: list[InProcessGrid] = []
    monkeypatch.setattr("tasks.data._loaded", Once())
    monkeypatch.setattr(f"tasks.tiny.TinyFaces.{target}", fail)
    with pytest.raises(TaskError) as caught:
        federate(tmp_path, spoil=asked.append)
    assert str(caught.value) == words
    assert asked[0].sent == []


def test_metrics_that_need_many_examples_are_tried_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"accuracy": 0.5}
    few = ValueError("64 examples are too few")
    monkeypatch.setattr("tasks.tiny.TinyDigits.metrics", scores_of_digits(few, good, good))
    _, summary = federate(tmp_path, tasks="tiny-digits,tiny-faces", rounds=1)
    assert summary["final"]["tiny-digits"] == good


def test_a_backend_that_no_client_has_is_the_cause_before_round_1(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("clients have CUDA here")
    words = "no client holds an example of any task .* says: sharing backend 'streams' cannot be used: torch.cuda"
    with pytest.raises(StrategyError, match=words):
        federate(tmp_path, sharing__backend="streams")


def told(change: Callable[[dict[str, Any]], None], *, client: str = "1") -> Answer:
    """The ClientApp, except that the profile of `client` is changed before it is sent."""

    def answer(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type == "query.profile":
            body = json.loads(str(reply.content.config_records["profile"]["json"]))
            if body["client"] == client:
                change(body)
            reply.content["profile"] = ConfigRecord({"json": json.dumps(body)})
        return reply

    return answer


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("capacity", -1.0, "client '1' has a bad profile: capacity must be"),
        ("fixed_s", float("nan"), "client '1' has a bad profile: Profile.fixed_s must be finite, not nan"),
        ("uplink_bytes_per_s", 0.0, "client '1' has a bad profile: uplink_bytes_per_s must be"),
        ("client", "0", "client '0': 2 nodes call themselves so and none of them takes part"),
    ],
)
def test_a_bad_profile_costs_its_client_only(tmp_path: Path, field: str, value: object, words: str) -> None:
    app = told(lambda body: body.update({field: value}))
    _, summary = federate(tmp_path, nodes=3, app=app, fleet__name="", rounds=1)
    assert sorted(summary["rounds"][0]["clients"]) == (["2"] if field == "client" else ["0", "2"])
    assert any(words in note for note in summary["notes"])


def test_only_bad_profiles_are_the_cause(tmp_path: Path) -> None:
    app = told(lambda body: body.update(capacity=0), client="0")
    words = "no client sent a usable profile: node .* client '0' has a bad profile: capacity must be"
    with pytest.raises(NoClientsError, match=words):
        federate(tmp_path, nodes=1, app=app, fleet__name="", rounds=1)


def test_who_was_left_out_is_part_of_the_cause(tmp_path: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["fixed_s"] = -1

    def answer(message: Message, context: Context) -> Message:
        return told(change, client="0")(message, context)

    def spoil(grid: InProcessGrid) -> None:
        for context in list(grid.contexts.values())[1:]:
            context.node_config["tasks"] = "tiny-digits"

    words = "task 'tiny-faces': no client holds an example of it; .*client '0' has a bad profile: fixed_s"
    with pytest.raises(StrategyError, match=words):
        federate(tmp_path, nodes=2, app=answer, spoil=spoil, fleet__name="", tasks="tiny-digits,tiny-faces")


def test_bad_client_evaluations_are_named(tmp_path: Path) -> None:
    def answer(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type == "evaluate" and context.node_config["partition-id"] == 1:
            reply.content["metrics"] = MetricRecord({"tiny-digits/num-examples": -5, "tiny-digits/accuracy": 1.0})
        return reply

    _, summary = federate(
        tmp_path, nodes=2, app=answer, fleet__name="", rounds=1, tasks="tiny-digits", strategy__client_evaluation=True
    )
    (entry,) = summary["rounds"]
    (line,) = entry["refused"]
    assert line.startswith("client '1', task 'tiny-digits': evaluation left out: num-examples is -5")
    assert entry["client_metrics"]["tiny-digits/num-examples"] == 700


def test_no_clients_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoClientsError, match=r"0 of at least 1 clients joined within 1\.5 s"):
        federate(tmp_path, nodes=0)


def test_a_round_that_nobody_finishes_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    def spoil(grid: InProcessGrid) -> None:
        for client in range(4):
            grid.fail_at(2, client, "raise")

    with pytest.raises(RuntimeError, match="round 2: no client trained anything"):
        federate(tmp_path, spoil=spoil)


def test_real_nodes_hold_what_their_config_says(tmp_path: Path) -> None:
    _, summary = federate(tmp_path, nodes=2, fleet__name="", rounds=1)
    assert summary["clock"] == "measured"
    assert sorted(summary["rounds"][0]["clients"]) == ["0", "1"]
    assert summary["rounds"][0]["bound_s"] > 0


def test_clients_evaluate_where_asked(tmp_path: Path) -> None:
    _, summary = federate(tmp_path, rounds=1, strategy__client_evaluation=True)
    assert 0 <= summary["rounds"][0]["client_metrics"]["tiny-digits/accuracy"] <= 1


def test_more_nodes_than_the_fleet_has_clients(tmp_path: Path) -> None:
    _, summary = federate(tmp_path, nodes=6, rounds=1)
    assert len(summary["rounds"][0]["clients"]) == 6


def test_one_node_alone(tmp_path: Path) -> None:
    _, summary = federate(tmp_path, nodes=1, rounds=1)
    assert list(summary["rounds"][0]["clients"]) == ["workstation"]


def test_an_impossible_demand_names_the_constraint(tmp_path: Path) -> None:
    with pytest.raises((StrategyError, ValueError), match="examples-per-round"):
        federate(tmp_path, examples_per_round=3.0)
