"""`python -m gpu_runtime`: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_runtime import __main__ as program
from gpu_runtime.bench import competitive
from gpu_runtime.device import discover

ROOT = Path(__file__).resolve().parents[2]


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program.main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    printed = capsys.readouterr().out
    for word in ("device", "driver", "nvml", "sequential: available", "cpu: ", "streams: ", "(auto)"):
        assert word in printed
    assert "green: " in printed
    assert "mps: not available: it bounds whole processes" in printed
    assert json.loads((tmp_path / "doctor.json").read_text())["auto"] in ("cpu", "streams")


def test_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["profile", "--factory", "runtime_fakes:build", "--tasks", "rows,pictures", "--budget", "0.1"]
    assert program.main([*arguments, "--json", str(tmp_path / "profile.json")]) == 0
    printed = capsys.readouterr().out
    assert "rows" in printed
    assert "pictures" in printed
    costs = [task["cost"] for task in json.loads((tmp_path / "profile.json").read_text())["tasks"]]
    assert all(cost["solo_cost_s"] > 0 for cost in costs)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["profile", "--tasks", ",", "--factory", "runtime_fakes:build"], 2, "error: --tasks names no task"),
        (["profile", "--tasks", "a", "--factory", "nowhere"], 2, "error: factory 'nowhere' is not of the form"),
        (["profile", "--tasks", "a", "--factory", "runtime_fakes:build"], 1, "error: a: ValueError: there is no task"),
        (["bench", "--mixes", "cocktail"], 2, "error: unknown mixes ['cocktail']; there are driving"),
        (["doctor", "--json", "/nowhere/at/all.json"], 1, "error: FileNotFoundError"),
    ],
)
def test_faults_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, complaint: str
) -> None:
    assert program.main(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(complaint)


@pytest.mark.parametrize("arguments", [[], ["dance"], ["bench", "--pairs", "4"], ["doctor", "--cores", "-1"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(arguments)
    assert caught.value.code == 2


def test_bench(tmp_path: Path) -> None:
    result = competitive.run(discover(2, "cpu"), ["small"], seconds=0.05)
    (row,) = result["rows"]
    assert row["ratios"].keys() == {"sequential", "sequential-one-thread", "competitive"}
    assert {len(seconds) for seconds in row["seconds"].values()} == {5}
    assert result["headline"]["speedup"]["small"] == 1 / row["ratios"]["competitive"]["median"]
    assert json.dumps(result, allow_nan=False)


def test_paired_ratios_by_hand() -> None:
    interval = competitive.paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 10.0])
    assert (interval.median, interval.low, interval.high) == (0.5, 0.5, 0.5)
    interval = competitive.paired_ratio([1.0, 1.0, 2.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0, 1.0])
    assert interval.median == 1.0
    assert interval.low <= 1.0 <= interval.high


def test_synthetic_models_have_the_sizes_of_the_suites() -> None:
    from gpu_runtime.bench.models import KINDS

    sizes = {name: sum(p.numel() for p in kind.build().parameters()) for name, kind in KINDS.items()}
    assert 55_000 < sizes["lenet"] < 65_000
    assert 70_000 < sizes["resnet8"] < 85_000
    assert 50_000 < sizes["grid-detector"] < 75_000
    assert 25_000 < sizes["unet"] < 35_000


def test_without_flower_and_without_pynvml(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('flwr', 'ray', 'pynvml', 'tasks', 'grpc'): sys.modules[name] = None\n"
        "from gpu_runtime.__main__ import main\n"
        "factory = ['--factory', 'gpu_runtime.bench.models:build']\n"
        "code = main(['profile', *factory, '--tasks', 'perceptron', '--budget', '0.1'])\n"
        "sys.exit(code or main(['doctor']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PACELINE_CACHE_DIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "perceptron" in done.stdout
