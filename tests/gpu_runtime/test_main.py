"""`python -m gpu_runtime`: what it prints, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime import __main__ as program
from gpu_runtime.bench import competitive
from gpu_runtime.mix_trial import MixTrials
from gpu_runtime.profile_cache import MixResult

ROOT = Path(__file__).resolve().parents[2]


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program.main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    printed = capsys.readouterr().out
    for word in (
        "device",
        "driver",
        "nvml",
        "sequential: available",
        "cpu: ",
        "processes: ",
        "streams: ",
        "(until measured)",
        "auto: measures",
    ):
        assert word in printed
    assert "green: " in printed
    assert "mps: " in printed
    assert json.loads((tmp_path / "doctor.json").read_text())["auto"] in ("cpu", "streams")


def test_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["profile", "--factory", "runtime_fakes:build", "--tasks", "rows,pictures", "--budget", "0.1"]
    assert program.main([*arguments, "--operators", "3", "--json", str(tmp_path / "profile.json")]) == 0
    printed = capsys.readouterr().out
    for word in ("rows", "pictures", "pictures: operator", "aten::convolution_backward"):
        assert word in printed
    written = json.loads((tmp_path / "profile.json").read_text())
    assert all(task["cost"]["solo_cost_s"] > 0 for task in written["tasks"])
    assert written["operators"].keys() == {"rows", "pictures"}


def test_profile_says_what_serves_the_tasks_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        MixTrials, "_measured", lambda *_: MixResult(capacities={"sequential": 0.7, "cpu": 0.9}, best="cpu")
    )
    arguments = ["profile", "--factory", "runtime_fakes:build", "--tasks", "rows,pictures", "--budget", "0.1"]
    assert program.main([*arguments, "--json", str(tmp_path / "profile.json")]) == 0
    assert "together: capacity sequential 0.70, cpu 0.90; auto takes cpu" in capsys.readouterr().out
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["together"] == {"capacities": {"sequential": 0.7, "cpu": 0.9}, "best": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["profile", "--tasks", ",", "--factory", "runtime_fakes:build"], 2, "error: --tasks names no task"),
        (["profile", "--tasks", "a", "--factory", "nowhere"], 2, "error: factory 'nowhere' is not of the form"),
        (["profile", "--tasks", "a", "--factory", "runtime_fakes:build"], 1, "error: a: ValueError: there is no task"),
        (["bench", "--mixes", "cocktail"], 2, "error: unknown mixes ['cocktail']; there are imbalanced"),
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


def test_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measured(device: Any, mixes: Any, *, size: competitive.Size, say: Any) -> dict[str, Any]:
        asked.update(device=device.kind, mixes=mixes, size=size)
        say("on the way")
        empty = {"rows": [], "not_measured": {}, "predictions": [], "targets": []}
        return {"device": "x", "versions": {}, "settings": {"num_cores": 1}, **empty}

    monkeypatch.setattr(competitive, "run", measured)
    arguments = ["bench", "--device", "cpu", "--mixes", "small,alone", "--quick", "--pairs", "7", "--budget", "100"]
    assert program.main([*arguments, "--json", str(tmp_path / "bench.json")]) == 0
    size = dataclasses.replace(competitive.QUICK, pairs=7, total_s=100.0)
    assert asked == {"device": "cpu", "mixes": ("small", "alone"), "size": size}
    captured = capsys.readouterr()
    assert captured.err == "on the way\n"
    assert captured.out.startswith("x, 1 cores")
    assert json.loads((tmp_path / "bench.json").read_text())["device"] == "x"


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
