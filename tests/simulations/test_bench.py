"""The benchmarks' command line, with the benchmark itself replaced."""

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.bench import competitive as measuring
from gpu_runtime.bench.scratch import scratch_folder
from gpu_runtime.bench.variants import VariantError
from simulations.bench import __main__ as bench
from simulations.bench import competitive

RESULT = {"name": "competitive", "headline": {"speedup": {"small": 2.0}}}


def test_the_table_is_printed_and_the_json_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def measured(device: Any, mixes: Any, *, size: Any, say: Any) -> dict[str, Any]:
        asked.update(device=device.kind, mixes=mixes, size=size)
        say("on the way")
        return RESULT

    monkeypatch.setattr(measuring, "run", measured)
    monkeypatch.setattr(competitive, "table", lambda result: f"a table of {result['name']}")
    file = tmp_path / "result.json"
    arguments = ["competitive", "--device", "cpu", "--quick", "--mixes", "small,eight", "--json", str(file)]
    assert bench.main(arguments) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a table of competitive\n", "on the way\n")
    assert json.loads(file.read_text()) == RESULT
    assert asked == {"device": "cpu", "mixes": ("small", "eight"), "size": measuring.QUICK}


def test_the_full_size_and_all_mixes_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(measuring, "run", lambda *args, **kwargs: asked.append((args[1], kwargs["size"])) or RESULT)
    monkeypatch.setattr(competitive, "table", lambda result: "")
    assert bench.main(["competitive", "--device", "cpu"]) == 0
    assert asked == [(tuple(measuring.MIXES), measuring.FULL)]


def test_the_limits_of_the_sizes() -> None:
    assert measuring.QUICK.total_s <= 180 - 20
    assert measuring.FULL.total_s <= 45 * 60 - 120
    assert min(measuring.QUICK.pairs, measuring.FULL.pairs) >= 5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["competitive", "--device", "cuda"], "error: a cuda device was asked for"),
        (["competitive", "--mixes", "cocktail"], "error: unknown mixes ['cocktail']; there are imbalanced"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(complaint)


def test_a_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise VariantError("sequential: it broke")

    monkeypatch.setattr(measuring, "run", failing)
    assert bench.main(["competitive", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "error: sequential: it broke\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_that_is_ended_leaves_no_folder(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(number)

    def ended(*args: Any, **kwargs: Any) -> Any:
        with measuring.fresh_profiles():
            (folder,) = tmp_path.glob("paceline-*")  # libraries that are imported late make folders of their own
            assert Path(os.environ["PACELINE_CACHE_DIR"]).is_relative_to(folder)
            signal.raise_signal(number)

    monkeypatch.setattr(measuring, "run", ended)
    assert bench.main(["competitive", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == f"interrupted by {number.name}\n"
    assert list(tmp_path.glob("paceline-*")) == []
    assert signal.getsignal(number) is before


def test_folders_of_killed_benchmarks_are_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, foreign = tmp_path / "paceline-bench-killed", tmp_path / "paceline-bench-of-others"
    for folder in (killed, foreign):
        folder.mkdir()
    (killed / "lock").touch()
    with scratch_folder() as first, scratch_folder() as second:
        assert {path.name for path in tmp_path.iterdir()} == {foreign.name, first.parent.name, second.parent.name}
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_result_that_cannot_be_written_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "run", lambda *args, **kwargs: RESULT)
    monkeypatch.setattr(competitive, "table", lambda result: "a table")
    file = tmp_path / "missing" / "result.json"
    assert bench.main(["competitive", "--device", "cpu", "--json", str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "a table\n"
    assert captured.err == f"error: cannot write {file}: No such file or directory\n"
