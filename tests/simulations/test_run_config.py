"""Merging the config of a run as Flower does, with absolute paths and all faults."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_runtime.settings import SettingsError, flatten
from simulations.run_config import absolute_paths, defaults, parse_overrides, to_toml

ROOT = Path(__file__).parent.parent.parent


def test_overrides_read_like_flowers() -> None:
    texts = ['rounds=3 strategy.name="fedavg"', "data.alpha=0.25 trace=false", "suite='tiny mix'"]
    assert parse_overrides(texts) == {
        "rounds": 3,
        "strategy.name": "fedavg",
        "data.alpha": 0.25,
        "trace": False,
        "suite": "tiny mix",
    }


def test_later_overrides_win() -> None:
    assert parse_overrides(["rounds=3", "rounds=4"]) == {"rounds": 4}


def test_a_toml_file_is_read_and_flattened(tmp_path: Path) -> None:
    file = tmp_path / "preset.toml"
    file.write_text('rounds = 2\n[strategy]\nname = "fedprox"\n')
    assert parse_overrides([str(file)]) == {"rounds": 2, "strategy.name": "fedprox"}


def test_all_unreadable_overrides_are_named() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_overrides(["suite=driving", "rounds 3", "nowhere.toml", "rounds=3"])
    first, second, third = caught.value.faults
    assert "'suite=driving'" in first
    assert "strings need quotes" in first
    assert "'rounds 3' is not of the form key=value" in second
    assert "nowhere.toml" in third


def test_relative_paths_become_absolute_and_fleet_names_stay(tmp_path: Path) -> None:
    config = {"out-dir": "runs", "data.directory": "", "fleet.name": "garage", "suite": "tiny"}
    assert absolute_paths(config, tmp_path) == {**config, "out-dir": str(tmp_path / "runs")}
    assert absolute_paths({"fleet.name": "my.toml"}, tmp_path) == {"fleet.name": str(tmp_path / "my.toml")}


@pytest.mark.parametrize("key", ["out-dir", "data.directory", "resume-from", "fleet.name"])
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("a/\0b", "it has a NUL character"),
        ("a/" + "x" * 300, "a name in it is longer than 255 bytes"),
        ("a/" + "é" * 200, "a name in it is longer than 255 bytes"),
        ("long/" * 1000, "it is longer than 3840 bytes"),
        ("~nobody-of-that-name/x", "home"),
        ("a/\udcff", "it is not UTF-8 text"),
    ],
)
def test_a_path_that_cannot_be_one_is_one_short_line(key: str, value: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        absolute_paths({key: value, "rounds": 1}, tmp_path)
    (line,) = caught.value.faults
    assert line.startswith(f"{key} cannot be a path: ")
    assert fault in line
    assert len(line) < 200
    assert "\n" not in line


def test_links_in_a_circle_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SettingsError, match="out-dir cannot be a path: "):
        absolute_paths({"out-dir": "loop/x"}, tmp_path)


@pytest.mark.parametrize("text", ["a\0.toml", "x" * 300 + ".toml", "~nobody-of-that-name/a.toml"])
def test_a_file_of_overrides_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="--run-config "):
        parse_overrides([text])


def test_an_unquoted_string_is_answered_with_what_to_write_also_through_make() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_overrides(["rounds=2 strategy.name=fedavg"])
    (line,) = caught.value.faults
    assert line.endswith(
        """: --run-config 'strategy.name="fedavg"', or make run ARGS="--run-config 'strategy.name=\\"fedavg\\"'\""""
    )


def test_defaults_are_those_of_pyproject() -> None:
    found = defaults(ROOT)
    assert found["fleet.name"] == "garage"
    assert all(not isinstance(value, dict) for value in found.values())


def test_a_folder_without_an_app_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no Flower app in"):
        defaults(tmp_path)


words = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=5)
values = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(words, values, max_size=5))
def test_toml_gives_back_what_went_in(config: dict[str, bool | int | float | str]) -> None:
    assert flatten(tomllib.loads(to_toml(config))) == config
