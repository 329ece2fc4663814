"""Settings: every fault at once, each with what is allowed; pyproject.toml and Settings say the same."""

import math
import tomllib
from pathlib import Path

import pytest

from gpu_runtime.settings import SettingsError, flatten
from server_app.settings import Settings, describe

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
CONFIG = flatten(PYPROJECT["tool"]["flwr"]["app"]["config"])


def faults_of(**changes: object) -> list[str]:
    flat = {**CONFIG, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}}
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(flat)
    return list(caught.value.faults)


def test_pyproject_lists_exactly_the_settings_with_their_defaults() -> None:
    defaults = {key: 0.0 if default is None else default for key, default, _ in describe()}
    assert defaults == CONFIG


def test_every_key_is_documented_in_pyproject() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for key in CONFIG:
        name = key.rpartition(".")[2]
        assert any(line.startswith(f"{name} = ") and "#" in line for line in text.splitlines()), key


def test_defaults_parse() -> None:
    settings = Settings.from_run_config(CONFIG)
    assert settings.task_refs == ("digits", "detection", "segmentation")
    assert settings.strategy.seed == settings.data.seed == 1
    assert settings.flat() == CONFIG


def test_all_faults_are_reported_together() -> None:
    faults = faults_of(
        rounds=-3, seed=math.nan, strategy__name="fedavgg", stratgy__name="x", out_dir="here", fleet__clock=1
    )
    assert faults == [
        "unknown key 'stratgy.name' (did you mean 'strategy.name'?)",
        "rounds must be a whole number at least 1 and at most 100000, not -3",
        "fleet.clock must be one of virtual, measured, not 1",
        "seed must be a whole number at least 0 and at most 9.22337e+18, not nan",
        "out-dir must be an absolute path, since Flower's processes run elsewhere; not 'here'",
        faults[-1],
    ]
    assert "did you mean 'fedavg" in faults[-1]


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"rounds": True}, "rounds must be a whole number"),
        ({"rounds": 2.0}, "rounds must be a whole number"),
        ({"rounds": "5"}, "rounds must be a whole number"),
        ({"join_timeout_s": math.inf}, "join-timeout-s must be a finite number above 0"),
        ({"examples_per_round": math.nan}, "examples-per-round must be a finite number above 0"),
        ({"examples_per_round": 0}, "examples-per-round must be a finite number above 0"),
        ({"sharing__mode": "compete"}, "did you mean 'competitive'?"),
        ({"data__partitioner": "dirichelt"}, "did you mean 'dirichlet'?"),
        ({"suite": "drivin"}, "driving"),
        ({"tasks": "digits,segmentatio"}, "segmentation"),
        ({"tasks": "digits,digits"}, "digits"),
        ({"tasks": "no_such_pkg.task:Task"}, "no_such_pkg"),
        ({"strategy__min_load": 0.5, "strategy__max_load": 0.2}, "strategy.min-load"),
        ({"strategy__name": "os:path"}, "strategy.name 'os:path' is no class derived from"),
        ({"task_options": "digits.lr=3"}, "task-options"),
        ({"task_options": "digitz.learning-rate=0.1"}, "no task 'digitz' (did you mean 'digits'?)"),
        ({"task_options": "digits.learning-rate=-1"}, "task-options"),
        ({"task_options": "digits.batch-size=nan"}, "task-options"),
    ],
)
def test_a_fault_is_one_clear_line(changes: dict[str, object], fragment: str) -> None:
    (fault,) = faults_of(**changes)
    assert fragment in fault
    assert "\n" not in fault


def test_whole_numbers_serve_as_floats() -> None:
    settings = Settings.from_run_config({**CONFIG, "round-timeout-s": 60, "strategy.round-deadline-s": 5})
    assert settings.run.round_timeout_s == 60.0
    assert settings.strategy.round_deadline_s == 5.0


def test_task_options_reach_the_strategy() -> None:
    settings = Settings.from_run_config(
        {**CONFIG, "task-options": "digits.learning-rate=0.5, segmentation.batch-size=8"}
    )
    assert settings.strategy.learning_rates == {"digits": 0.5}
    assert settings.strategy.batch_sizes == {"segmentation": 8}
