"""The run wrapper's parts, without Flower: requests, causes, progress, private environment."""

import io
import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpu_runtime.settings import SettingsError
from simulations import outcome, run
from simulations.fleet import FleetError
from simulations.flower_home import FlowerError, environment, strip_colours
from simulations.progress import Follower, JsonLines, Quiet, Spoken, round_lines
from simulations.signals import Interrupted, signals_raise

ENTRY = {
    "round": 2,
    "makespan_s": 2.0,
    "plan_s": 1.5,
    "bound_s": 1.25,
    "idle_fraction": 0.25,
    "clock": "virtual",
    "clients": {
        "fast": {"busy_s": 2.0, "outcome": "trained", "tasks": {"digits": {"examples": 10}}},
        "slow": {"busy_s": 1.0, "outcome": "trained", "tasks": {"digits": {"examples": 5}}},
        "gone": {"busy_s": 0.0, "outcome": "lost", "tasks": {}},
    },
    "tasks": {"digits": {"loss": 0.5, "metrics": {"accuracy": 0.9375}}},
}


def request_for(*argv: str) -> run.RunRequest:
    return run.build_request(run._parser().parse_args(argv))


# ------------------------------------------------------------------------------------------------------- requests


def test_defaults_are_the_fleets_clients_and_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = request_for()
    assert request.num_supernodes == 4
    assert request.cpus_per_client == run.num_cores()
    assert request.out_dir == tmp_path / "runs"
    assert request.run_config["out-dir"] == str(tmp_path / "runs")
    assert request.federation()["num-supernodes"] == 4


def test_options_win_over_run_config(tmp_path: Path) -> None:
    config = 'fleet.name="garage" out-dir="/nowhere" rounds=2'
    request = request_for("--fleet", "uniform", "--out-dir", str(tmp_path), "--run-config", config)
    assert request.run_config == {"fleet.name": "uniform", "out-dir": str(tmp_path), "rounds": 2}


def test_all_faults_of_the_config_come_before_anything_starts() -> None:
    with pytest.raises(SettingsError) as caught:
        request_for("--run-config", 'rounds=0 sede=3 strategy.name="fedavgg"')
    text = "\n".join(caught.value.faults)
    assert all(word in text for word in ("rounds", "sede", "fedavgg"))


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--fleet", "garag"], "did you mean 'garage'"),
        (
            ["--run-config", 'tasks="digits,segmentation"', "--num-supernodes", "1", "--fleet", "{lacking}"],
            "nobody holds",
        ),
    ],
)
def test_a_fleet_that_cannot_work_is_refused(argv: list[str], fault: str, tmp_path: Path) -> None:
    lacking = tmp_path / "lacking.toml"
    lacking.write_text('[[client]]\nname = "a"\nskip-tasks = [2]\n')
    with pytest.raises(FleetError, match=fault):
        request_for(*(part.replace("{lacking}", str(lacking)) for part in argv))


def test_bad_config_exits_with_2_and_one_line_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--run-config", "rounds=-1 sede=1"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2


# --------------------------------------------------------------------------------------------------------- causes

LOG = """\x1b[92mINFO \x1b[0m:      Starting
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ValueError: no such thing
2026-01-01T00:00:00Z INFO [uvicorn.error] Shutting down
"""


@pytest.mark.parametrize(
    ("summary", "details", "expected"),
    [
        ({"cause": "digits:\n NaN"}, "Simulation failed", "digits: NaN"),
        ({}, "Simulation failed with exception: boom", "Simulation failed with exception: boom"),
        ({}, "Task failed with unknown error.", "ValueError: no such thing"),
        ({"status": "failed"}, None, "ValueError: no such thing"),
    ],
)
def test_the_cause_is_the_summarys_then_flowers_then_the_logs(
    summary: dict[str, str], details: str | None, expected: str, tmp_path: Path
) -> None:
    log_file = tmp_path / "superlink.log"
    log_file.write_text(LOG)
    assert outcome.find_cause(summary, details, log_file) == expected


def test_a_run_without_summary_and_log_says_so(tmp_path: Path) -> None:
    assert outcome.find_cause({}, None, tmp_path / "none.log") == "the run left no summary.json"


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_broken_summary_is_no_summary(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert outcome.read_summary(tmp_path) == {}


def test_completed_needs_both_words(tmp_path: Path) -> None:
    log_file = tmp_path / "superlink.log"
    log_file.write_text("")
    assert outcome.outcome_of(None, tmp_path, log_file).cause == "the run left no summary.json"
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert outcome.outcome_of(None, tmp_path, log_file).cause is None
    assert (
        outcome.outcome_of("Flower says finished:stopped", tmp_path, log_file).cause == "Flower says finished:stopped"
    )


# ------------------------------------------------------------------------------------------------------ following


class FakeHome:
    """A Flower that answers by a script; the last answer is repeated."""

    def __init__(self, *answers: tuple[str, str] | Exception, alive: bool = True) -> None:
        self.answers = list(answers)
        self.alive = alive
        self.stopped: list[str] = []

    def status(self, run_id: str) -> tuple[str, str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)

    def is_alive(self) -> bool:
        return self.alive


class Heard(Quiet):
    def __init__(self) -> None:
        super().__init__(Console(stderr=True))
        self.rounds: list[int] = []

    def round(self, entry: Mapping[str, Any]) -> None:
        self.rounds.append(entry["round"])


def follow(home: FakeHome, folder: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> tuple[Any, Heard]:
    for name in ("LOOK_S", "ASK_S", "ASK_SOON_S"):
        monkeypatch.setattr(run, name, 0.0)
    heard = Heard()
    deadline = time.monotonic() + timeout_s
    return run._follow(home, "7", folder, heard, deadline, timeout_s), heard  # type: ignore[arg-type]


RUNNING = ("running", "")
GONE = FlowerError("no answer")


@pytest.mark.parametrize(
    ("home", "cause"),
    [
        (FakeHome(RUNNING, RUNNING, ("finished:completed", "")), None),
        (FakeHome(RUNNING, ("finished:failed", "server\nboom")), "server boom"),
        (FakeHome(("finished:stopped", "")), "Flower says finished:stopped"),
        (FakeHome(RUNNING, GONE, GONE, RUNNING, ("finished:completed", "")), None),
        (FakeHome(GONE), "no answer"),
        (FakeHome(RUNNING, alive=False), "the SuperLink ended before the run"),
    ],
)
def test_a_run_is_followed_to_its_end(
    home: FakeHome, cause: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "history.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    found, heard = follow(home, tmp_path, monkeypatch)
    assert found == cause
    assert heard.rounds == [1, 2]


def test_a_run_that_does_not_end_is_stopped_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = FakeHome(RUNNING)
    found, _ = follow(home, tmp_path, monkeypatch, timeout_s=0.0)
    assert found == "not finished after 0 s (--timeout-s)"
    assert home.stopped == ["7"]


# ------------------------------------------------------------------------------------------------------- progress


def test_a_follower_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    follower = Follower(path)
    assert list(follower.read()) == []
    path.write_text('{"round": 1}\nnot json\n{"rou')
    assert list(follower.read()) == [{"round": 1}]
    with path.open("a") as file:
        file.write('nd": 2}\n[3]\n')
    assert list(follower.read()) == [{"round": 2}]
    assert list(follower.read()) == []


def test_round_lines_tell_makespan_metrics_and_idle_time() -> None:
    first, second, third = round_lines(ENTRY)
    assert "makespan 2 virtual s (plan 1.5, bound 1.25)" in first
    assert "digits loss 0.500 accuracy 0.938" in second
    assert third.split("  ")[1:] == ["idle: fast 0%", "slow 50%", "gone lost"]


def test_round_lines_name_what_was_not_used() -> None:
    lines = list(round_lines({**ENTRY, "refused": ["client 'gone': lost"]}))
    assert lines[3].endswith("client 'gone': lost")


def test_round_lines_bear_missing_numbers() -> None:
    lines = list(round_lines({"round": 1, "makespan_s": 0.0, "tasks": {"digits": {"loss": None, "metrics": {}}}}))
    assert "loss -" in lines[1]


def test_spoken_progress_has_no_escape_codes_outside_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    spoken = Spoken(Console(file=out, width=200), Console(file=out))
    spoken.stage("starting")
    spoken.event({"event": "note", "text": "[odd] text"})
    spoken.round(ENTRY)
    summary = {"strategy": "fedavg", "fleet": "garage", "clock": "virtual", "rounds": [ENTRY], "mean_makespan_s": 2.0}
    spoken.finished({**summary, "final": {"digits": {"accuracy": 0.9375}}}, tmp_path)
    text = out.getvalue()
    assert "\x1b" not in text
    assert all(part in text for part in ("[odd] text", str(tmp_path), " 15 ", "mean makespan 2 virtual s"))


def test_json_lines_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = JsonLines(Console(stderr=True))
    lines.stage("starting")
    lines.round(ENTRY)
    lines.failed("boom", tmp_path)
    captured = capsys.readouterr()
    kinds = [json.loads(line)["kind"] for line in captured.out.splitlines()]
    assert kinds == ["stage", "round", "finished"]
    assert "boom" in captured.err


# ---------------------------------------------------------------------------------------------------- environment


def test_the_environment_is_private_and_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setenv("NO_PROXY", "intranet")
    found = environment(tmp_path)
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert {Path(found[key]).is_relative_to(tmp_path) for key in ("FLWR_HOME", "TMPDIR", "RAY_TMPDIR", "HOME")} == {
        True
    }
    assert "RAY_ADDRESS" not in found
    assert found["NO_PROXY"] == found["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_a_good_home_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment(tmp_path / "run")["HOME"] == str(tmp_path)


def test_signals_raise_inside_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), signals_raise():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_colours_are_stripped() -> None:
    assert strip_colours("\x1b[91mERROR \x1b[0m: x\x1b[2K") == "ERROR : x"
