"""The run wrapper's parts, without Flower: requests, causes, progress, private environment."""

import io
import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gpu_runtime.settings import SettingsError
from server_app.checkpoint import OutputError
from simulations import flower_home, outcome, run
from simulations.fleet import FleetError
from simulations.flower_home import FlowerError, FlowerHome, environment, strip_colours
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


@pytest.mark.parametrize(
    "argv",
    [
        ["--out-dir", "a\0b"],
        ["--out-dir", "x" * 300],
        ["--run-config", 'out-dir="a\\u0000b"'],
        ["--run-config", 'fleet.name="a\\u0000b"'],
        ["--run-config", 'fleet.name="' + "x" * 300 + '"'],
        ["--run-config", 'fleet.name="~nobody-of-that-name/a.toml"'],
        ["--run-config", 'tasks="a\\u0000b"'],
        ["--app", "a\0b"],
        ["--app", "x" * 300],
    ],
)
def test_paths_that_cannot_be_exit_with_2_and_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line


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

    def __init__(
        self, *answers: tuple[str, str] | Exception, alive: bool = True, dead: Sequence[Sequence[str]] = ((),)
    ) -> None:
        self.answers = list(answers)
        self.alive = alive
        self.dead_ones = list(dead)
        self.stopped: list[str] = []

    def dead(self) -> Sequence[str]:
        return self.dead_ones.pop(0) if len(self.dead_ones) > 1 else self.dead_ones[0]

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
        self.notes: list[str] = []

    def event(self, event: Mapping[str, Any]) -> None:
        self.notes += [event["text"]] if event["event"] == "note" else []

    def round(self, entry: Mapping[str, Any]) -> None:
        self.rounds.append(entry["round"])


def follow(home: FakeHome, folder: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> tuple[Any, Heard]:
    for name in ("LOOK_S", "ASK_S", "ASK_SOON_S", "SUMMARY_GRACE_S", "DEATH_GRACE_S"):
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


def test_a_run_whose_client_never_returns_ends_with_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    home = FakeHome(RUNNING)
    found, heard = follow(home, tmp_path, monkeypatch)
    assert found is None
    assert home.stopped == ["7"]
    assert "does a client never return?" in heard.notes[0]


@pytest.mark.parametrize(
    ("home", "timeout_s"),
    [
        (FakeHome(GONE), 60.0),
        (FakeHome(RUNNING, alive=False), 60.0),
        (FakeHome(RUNNING, dead=[["raylet"]]), 60.0),
        (FakeHome(RUNNING), 0.0),
    ],
)
def test_a_summary_counts_whatever_becomes_of_flower_afterwards(
    home: FakeHome, timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert follow(home, tmp_path, monkeypatch, timeout_s)[0] is None


def test_flowers_own_word_of_a_failure_counts_beside_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert follow(FakeHome(("finished:failed", "boom")), tmp_path, monkeypatch)[0] == "boom"


def test_a_dead_simulation_is_noticed_before_flower_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = FakeHome(RUNNING, dead=[[], ["flwr-simulation", "raylet"]])
    found, _ = follow(home, tmp_path, monkeypatch)
    assert found == ("a process of the simulation has died (killed, or out of memory?): flwr-simulation and raylet")


def test_processes_that_end_with_the_run_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = FakeHome(RUNNING, ("finished:completed", ""), dead=[["raylet"]])
    monkeypatch.setattr(run, "DEATH_GRACE_S", 60.0)
    for name in ("LOOK_S", "ASK_S", "ASK_SOON_S"):
        monkeypatch.setattr(run, name, 0.0)
    assert run._follow(home, "7", tmp_path, Heard(), time.monotonic() + 60, 60.0) is None  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- what is left


class FakeFlower(FakeHome):
    """As FlowerHome for `run.run`; `act` is what happens when it is asked how the run goes."""

    def __init__(self, root: Path, act: Callable[[], tuple[str, str]], refuse: Exception | None = None) -> None:
        super().__init__(RUNNING)
        self.root = root
        self.root.mkdir()
        self.act = act
        self.refuse = refuse

    def start(self) -> None:
        if self.refuse:
            raise self.refuse

    def submit(self, *_: Any) -> str:
        return "7"

    def status(self, run_id: str) -> tuple[str, str]:
        return self.act() if not self.stopped else ("finished:stopped", "")

    def close(self) -> None: ...


def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], tuple[str, str]], **kwargs: Any
) -> outcome.RunOutcome:
    monkeypatch.setattr(run, "FlowerHome", lambda log_file: FakeFlower(tmp_path / "private", act, **kwargs))
    for name in ("LOOK_S", "ASK_S", "ASK_SOON_S"):
        monkeypatch.setattr(run, name, 0.0)
    return run.run(request_for("--out-dir", str(tmp_path / "out")), Heard())


def interrupted() -> tuple[str, str]:
    raise Interrupted("SIGINT")


def test_an_interrupted_run_that_wrote_nothing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted) as caught:
        made(tmp_path, monkeypatch, interrupted)
    assert caught.value.folder is None
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupted_run_says_where_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out" / "7"

    def act() -> tuple[str, str]:
        (folder / "history.jsonl").write_text('{"round": 1}\n')
        return interrupted()

    with pytest.raises(Interrupted) as caught:
        made(tmp_path, monkeypatch, act)
    assert caught.value.folder == folder
    assert {path.name for path in folder.iterdir()} == {"history.jsonl", "summary.json", "superlink.log"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {"status": "failed", "cause": "interrupted by SIGINT", "rounds": [{"round": 1}]}


def test_a_run_whose_server_left_no_summary_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> tuple[str, str]:
        (tmp_path / "out" / "7" / "history.jsonl").write_text('{"round": 1}\n{"rou')
        return "finished:failed", "boom"

    assert made(tmp_path, monkeypatch, act).cause == "boom"
    summary = json.loads((tmp_path / "out" / "7" / "summary.json").read_text())
    assert summary == {"status": "failed", "cause": "boom", "rounds": [{"round": 1}]}


def test_a_disk_too_full_for_any_summary_is_still_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> tuple[str, str]:
        folder = tmp_path / "out" / "7"
        (folder / f".summary.json.{os.getpid()}.partial").symlink_to("/dev/full")
        return "finished:failed", f"cannot write {folder}/history.jsonl: No space left on device"

    found = made(tmp_path, monkeypatch, act)
    assert found.cause is not None
    assert found.cause.endswith("history.jsonl: No space left on device")


def test_a_private_folder_without_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    refuse = OutputError("cannot write /tmp/x: No space left on device")
    found = made(tmp_path, monkeypatch, interrupted, refuse=refuse)
    assert found.cause == str(refuse)
    assert list((tmp_path / "out").iterdir()) == []


def test_outputs_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text("a file")
    found = made(tmp_path, monkeypatch, interrupted)
    assert found.cause == f"cannot write {tmp_path}/out: File exists"


# ------------------------------------------------------------------------------------------------- flwr commands


def script(tmp_path: Path, body: str) -> FlowerHome:
    """A home whose command server is a fake in Python: `body` is run for each command, with `request` at hand."""
    home = FlowerHome(tmp_path / "log")
    (home.root / "cwd").mkdir()
    server = tmp_path / "flower_commands.py"
    server.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request is None: break\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return home


@pytest.fixture
def commands_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flower_home, "COMMANDS_SCRIPT", tmp_path / "flower_commands.py")


def test_vital_processes_are_missed_once_they_were_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def process(*command: str) -> Any:
        return SimpleNamespace(cmdline=lambda: list(command))

    server = process("/x/python3", "/x/bin/flwr-simulation", "--token", "raylet")
    raylet = process("/x/ray/raylet", "--raylet_socket_name=/tmp/raylet")
    ended = process()
    with FlowerHome(tmp_path / "log") as home:
        looks = iter([[ended], [server, ended], [server, raylet], [server], [raylet, server]])
        monkeypatch.setattr(home.tree, "find", lambda: next(looks, []))
        assert [home.dead() for _ in range(6)] == [[], [], [], ["raylet"], [], ["flwr-simulation", "raylet"]]


@pytest.mark.usefixtures("commands_from")
def test_commands_go_on_after_their_process_was_killed(tmp_path: Path) -> None:
    body = """
        open(request["stdout"], "w").write(json.dumps({"pid": os.getpid()}))
        print(request["number"], 0, flush=True)
    """
    with script(tmp_path, body) as home:
        home._start_commands()
        first = home.flwr(["ls"])["pid"]
        os.kill(first, signal.SIGKILL)
        assert home._commands is not None
        home._commands.wait()
        assert home.flwr(["ls"])["pid"] != first


@pytest.mark.usefixtures("commands_from")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "print(request['number'], -9, flush=True)\n",
            "flwr ls: ended with exit code -9 and said nothing",
        ),
        ("os._exit(0)\n", "the process that runs flwr commands has ended"),
    ],
)
def test_a_command_that_is_killed_says_so(body: str, said: str, tmp_path: Path) -> None:
    with script(tmp_path, body) as home:
        home._start_commands()
        with pytest.raises(FlowerError, match=said):
            home.flwr(["ls"])


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


def test_round_lines_say_who_splits_what() -> None:
    split = {"split_point": 2, "micro_batches": 8, "encoding": "int8"}
    client = {"busy_s": 1.0, "tasks": {"digits": {"split": split}, "faces": {"split": None}}}
    tasks = {name: {"loss": 1.0, "metrics": {}} for name in ("digits", "faces")}
    lines = list(round_lines({"round": 1, "makespan_s": 1.0, "tasks": tasks, "clients": {"slow": client}}))
    assert lines[-1] == "  split: digits slow after block 2, 8 x int8"


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
