"""The life of a private MPS control daemon, with a fake control program: no process and no folder stays behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runtime import mps_daemon
from gpu_runtime.mps_daemon import MpsDaemon, MpsError

FAKE = Path(__file__).with_name("fake_mps_control.py")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, as MPS needs Linux")


@pytest.fixture
def control(tmp_path: Path) -> str:
    program = tmp_path / "control"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE}" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where daemons make their folders; empty again after each test."""
    with tempfile.TemporaryDirectory(prefix="t-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        yield Path(parent)
        assert not list(Path(parent).iterdir())


def started(control: str, timeout_s: float = 10.0) -> MpsDaemon:
    daemon = MpsDaemon(control=control, timeout_s=timeout_s)
    daemon.start()
    return daemon


def pid_of(daemon: MpsDaemon) -> int:
    pipes = daemon.client_environment()["CUDA_MPS_PIPE_DIRECTORY"]
    return int((Path(pipes) / mps_daemon.PID_FILE).read_text())


def runs(pid: int) -> bool:
    return mps_daemon._process(pid) is not None


def wait_until_gone(pid: int) -> None:
    give_up_s = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_daemon_starts_answers_and_stops(control: str, folders: Path) -> None:
    with MpsDaemon(control=control) as daemon:
        assert daemon.died() == ""
        assert daemon.servers() == ()
        pid = pid_of(daemon)
        assert runs(pid)
        (folder,) = folders.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not runs(pid)
    assert daemon.died() == "the MPS control daemon has not been started"
    daemon.stop()


def test_two_daemons_do_not_know_each_other(control: str) -> None:
    first, second = started(control), started(control)
    assert pid_of(first) != pid_of(second)
    first.stop()
    assert second.died() == ""
    second.stop()


def test_the_daemons_environment_is_its_own(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with MpsDaemon(control=control) as daemon:
        environment = Path(f"/proc/{pid_of(daemon)}/environ").read_text().split("\0")
    names = {line.partition("=")[0] for line in environment}
    assert not names & {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}
    assert "CUDA_MPS_PIPE_DIRECTORY=/nowhere" not in environment


@pytest.mark.parametrize(("share", "percentage"), [(1.0, "100"), (0.25, "25"), (0.001, "1")])
def test_clients_are_told_where_and_how_much(control: str, share: float, percentage: str) -> None:
    with MpsDaemon(control=control) as daemon:
        environment = daemon.client_environment(share)
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage
        assert environment.keys() == {
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_MPS_LOG_DIRECTORY",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        }
        assert all(Path(path).is_dir() for name, path in environment.items() if name.endswith("DIRECTORY"))
        for bad in (0.0, 1.5, float("nan")):
            with pytest.raises(ValueError, match="a share is above 0"):
                daemon.client_environment(bad)


# ------------------------------------------------------------------------------------------------------------ deaths


def test_the_daemon_dies(control: str) -> None:
    daemon = started(control)
    pid = pid_of(daemon)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    assert daemon.died() == f"the MPS control daemon (process {pid}) has gone"
    daemon.stop()


def test_a_server_dies(control: str) -> None:
    daemon = started(control)
    daemon._ask("start_server -uid 0")
    assert daemon.died() == ""
    (server,) = daemon.servers()
    os.kill(server, signal.SIGKILL)
    wait_until_gone(server)
    assert daemon.died() == f"an MPS server (process {server}) has gone, and its clients with it"
    daemon.stop()


def test_stopping_ends_servers_nobody_asked_about(control: str) -> None:
    daemon = started(control)
    daemon._ask("start_server -uid 0")
    (server,) = (int(pid) for pid in daemon._ask("get_server_list").split())
    daemon.stop()
    assert not runs(server)


def test_stopping_ends_servers_whose_daemon_died(control: str) -> None:
    daemon = started(control)
    daemon._ask("start_server -uid 0")
    (server,) = daemon.servers()
    pid = pid_of(daemon)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    assert runs(server)
    daemon.stop()
    assert not runs(server)


def test_a_daemon_that_ignores_orders_is_killed(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    daemon = started(control)
    pid = pid_of(daemon)
    daemon._timeout_s = 0.3
    daemon.stop()
    assert not runs(pid)


def test_a_number_that_another_process_has_now_is_not_killed(control: str) -> None:
    daemon = started(control)
    bystander = os.getpid()
    daemon._servers[bystander] = mps_daemon._Process(bystander, "another start")
    assert daemon.died().startswith(f"an MPS server (process {bystander}) has gone")
    daemon.stop()


# ------------------------------------------------------------------------------------------------------- no beginning


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("refuses", "-d failed with code 1: Failed to initialize: no device"),
        ("vanishes", "the MPS control daemon does not run 2 s after its start"),
        ("mute", "the MPS control daemon has not answered 'get_server_list' in 2 s"),
    ],
)
def test_a_daemon_that_does_not_start(control: str, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str) -> None:
    monkeypatch.setenv("FAKE_MPS", mode)
    with pytest.raises(MpsError) as caught:
        started(control, timeout_s=2.0)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_not_installed() -> None:
    with pytest.raises(MpsError, match=r"^no-such-control is not installed$"):
        MpsDaemon(control="no-such-control").start()


def test_started_twice(control: str) -> None:
    with MpsDaemon(control=control) as daemon, pytest.raises(MpsError, match="started already"):
        daemon.start()


def test_a_long_temporary_folder_is_avoided(control: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folders / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with MpsDaemon(control=control) as daemon:
        assert len(daemon.client_environment()["CUDA_MPS_PIPE_DIRECTORY"]) <= mps_daemon.LONGEST_DIRECTORY
    long.rmdir()
