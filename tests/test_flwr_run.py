"""Whole runs by the wrapper, through Flower and Ray: success, failure, Ctrl-C; nothing stays behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
DEADLINE_S = 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]


def start(out_dir: Path, *run_config: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "simulations.run", "--out-dir", str(out_dir)]
    for item in run_config:
        command += ["--run-config", item]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [process.cmdline() for process in alive if process.is_running()]


def wait_for(path: Path, pattern: str, process: subprocess.Popen[str]) -> Path:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = list(path.glob(pattern))
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(
        f"no {pattern}: {process.stdout.read() if process.stdout and process.poll() is not None else ''}"
    )


def test_a_run_trains_reports_and_ends(tmp_path: Path) -> None:
    process = start(tmp_path, 'suite="tiny" rounds=2')
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    (folder,) = tmp_path.iterdir()
    assert str(folder) in output

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["clock"] == "virtual"
    assert [entry["round"] for entry in summary["rounds"]] == [1, 2]
    assert set(summary["final"]) == {"tiny-digits", "tiny-faces", "tiny-scenes"}
    for entry in summary["rounds"]:
        assert set(entry["clients"]) == {"workstation", "desktop", "laptop", "old-laptop"}
        assert entry["refused"] == []
        assert 0 < entry["bound_s"] <= entry["plan_s"] * (1 + 1e-6)
        assert entry["makespan_s"] == max(client["busy_s"] for client in entry["clients"].values())
        assert 0 <= entry["idle_fraction"] < 1
    assert summary["notes"] == []
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == summary["rounds"]

    from server_app.checkpoint import load_weights

    for name in ("last", "best"):
        tasks = {key.partition("/")[0] for key in load_weights(folder / "checkpoint", name)}
        assert tasks == set(summary["final"])

    trace = json.loads((folder / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert any(
        one["pid"] == two["pid"]
        and one["name"] != two["name"]
        and max(one["ts"], two["ts"]) < min(one["ts"] + one["dur"], two["ts"] + two["dur"])
        for i, one in enumerate(spans)
        for two in spans[i + 1 : i + 50]
    ), "no two tasks of a client overlap in time"


def test_a_run_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, 'tasks="tiny-digits" min-clients=9 join-timeout-s=3')
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, output
    causes = [line for line in output.splitlines() if line.startswith("run failed: ")]
    assert len(causes) == 1, output
    assert "of at least 9 clients joined within 3 s; start more SuperNodes" in causes[0]
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "summary.json").read_text())["cause"] == causes[0].removeprefix("run failed: ")


def test_bad_settings_fail_before_anything_starts(tmp_path: Path) -> None:
    process = start(tmp_path, 'rounds=0 strategy.name="fedavgg" nonsense=1')
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    for fragment in ("rounds must be", "did you mean 'fedavg", "unknown key 'nonsense'"):
        assert fragment in output
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    process = start(tmp_path, 'suite="tiny" rounds=100000')
    wait_for(tmp_path, "*/history.jsonl", process)
    relatives = family(process)
    assert any("ray" in " ".join(relative.cmdline()) for relative in relatives)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert_gone(relatives)
