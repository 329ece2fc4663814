"""A private MPS control daemon: started, watched and stopped; nothing else on the machine sees or shares it.

CUDA's Multi-Process Service lets the kernels of several processes run at once and caps the part of the SMs that each
may use. The cap is fixed when a process starts its CUDA: it takes worker processes to make use of it. Standard library
only; Linux, as MPS is.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

CONTROL = "nvidia-cuda-mps-control"
PID_FILE = "nvidia-cuda-mps-control.pid"
# The daemon makes Unix sockets in its pipe directory, whose whole path has to fit into 107 bytes.
LONGEST_DIRECTORY = 80
POLL_S = 0.02


class MpsError(RuntimeError):
    """The daemon cannot be started, reached or stopped; one line that says why."""


@dataclass(frozen=True)
class _Process:
    """A process by number and start time: numbers are used again."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        return _process(self.pid) == self


class MpsDaemon:
    """A control daemon with directories of its own. Also a context manager.

    Args:
        control: name or path of the control program.
        timeout_s: the longest wait for any answer, start or end.
    """

    def __init__(self, *, control: str = CONTROL, timeout_s: float = 10.0) -> None:
        self._control, self._timeout_s = control, timeout_s
        self._directory: Path | None = None
        self._daemon: _Process | None = None
        self._servers: dict[int, _Process] = {}

    def __enter__(self) -> MpsDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_started(self) -> bool:
        """Whether `start` has succeeded and `stop` has not been called since."""
        return self._daemon is not None

    def start(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            MpsError: it is not installed, does not start, or does not answer in time. Nothing of it stays behind.
        """
        if self._directory is not None:
            raise MpsError("the MPS control daemon has been started already")
        if shutil.which(self._control) is None:
            raise MpsError(f"{self._control} is not installed")
        self._directory = _short_directory()
        atexit.register(self.stop)
        try:
            for folder in (self._pipes, self._logs):
                folder.mkdir()
            self._launch()
            self._daemon = self._wait_for_daemon()
            self.servers()
        except BaseException:
            self.stop()
            raise

    def client_environment(self, share: float = 1.0) -> dict[str, str]:
        """What a worker process needs in its environment, before its first CUDA call, to run under this daemon.

        Args:
            share: cap on its part of the SMs; reserves nothing.
        """
        if not 0 < share <= 1:
            raise ValueError(f"a share is above 0 and at most 1, not {share}")
        return self._directories() | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, round(100 * share)))}

    def servers(self) -> tuple[int, ...]:
        """Process numbers of the servers that run now; there is one as soon as a client has come.

        Raises:
            MpsError: the daemon does not answer.
        """
        listed = tuple(int(word) for word in self._ask("get_server_list").split() if word.isdecimal())
        for pid in listed:
            process = _process(pid)
            if process is not None:
                self._servers.setdefault(pid, process)
        return listed

    def died(self) -> str:
        """Why clients cannot go on; empty while daemon and servers are well."""
        if self._daemon is None:
            return "the MPS control daemon has not been started"
        if not self._daemon.alive:
            return f"the MPS control daemon (process {self._daemon.pid}) has gone"
        try:
            listed = self.servers()
        except MpsError as error:
            return str(error)
        for pid, server in self._servers.items():
            if pid not in listed or not server.alive:
                return f"an MPS server (process {pid}) has gone, and its clients with it"
        return ""

    def stop(self) -> None:
        """End the daemon and its servers, by force if need be, and remove the directories. May be called again.

        Raises:
            MpsError: a process could not be ended.
        """
        if self._directory is None:
            return
        if self._daemon is None:  # died in the middle of its start, or the start was cut short
            self._daemon = self._read_pid()
        asked = False
        if self._daemon is not None and self._daemon.alive:
            with contextlib.suppress(MpsError):  # then by force
                self.servers()
                self._ask("quit")
                asked = True
        mine = [process for process in (self._daemon, *self._servers.values()) if process is not None]
        if asked:
            self._wait_for_end(mine)
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [process for process in mine if process.alive]
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
            self._wait_for_end(left)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self._daemon, self._servers = None, None, {}
        atexit.unregister(self.stop)
        if survivors := [process.pid for process in mine if process.alive]:
            raise MpsError(f"MPS processes {survivors} could not be ended")

    # ------------------------------------------------------------------------------------------------------ internals

    @property
    def _pipes(self) -> Path:
        assert self._directory is not None, "the daemon has not been started"
        return self._directory / "pipe"

    @property
    def _logs(self) -> Path:
        assert self._directory is not None, "the daemon has not been started"
        return self._directory / "log"

    def _directories(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipes), "CUDA_MPS_LOG_DIRECTORY": str(self._logs)}

    def _environment(self) -> dict[str, str]:
        """Of the daemon: nothing of another daemon's, and all devices, or clients would have to renumber theirs."""
        dropped = ("CUDA_MPS_", "CUDA_VISIBLE_DEVICES")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return kept | self._directories()

    def _launch(self) -> None:
        """`-d` returns when the daemon runs in the background. It may hold on to its output: that goes to a file."""
        output = self._logs / "start.log"
        with output.open("wb") as file:
            try:
                done = subprocess.run(
                    [self._control, "-d"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    timeout=self._timeout_s,
                    start_new_session=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise MpsError(f"{self._control} -d has not returned within {self._timeout_s:g} s") from None
            except OSError as error:
                raise MpsError(f"{self._control} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            said = output.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
            raise MpsError(f"{self._control} -d failed with code {done.returncode}: {said[0]}")

    def _wait_for_daemon(self) -> _Process:
        give_up_s = time.monotonic() + self._timeout_s
        while (daemon := self._read_pid()) is None:
            if time.monotonic() >= give_up_s:
                raise MpsError(f"the MPS control daemon does not run {self._timeout_s:g} s after its start")
            time.sleep(POLL_S)
        return daemon

    def _read_pid(self) -> _Process | None:
        try:
            return _process(int((self._pipes / PID_FILE).read_text()))
        except (OSError, ValueError):
            return None

    def _ask(self, command: str) -> str:
        """Answer of the daemon to one command."""
        try:
            done = subprocess.run(
                [self._control],
                input=command + "\n",
                capture_output=True,
                text=True,
                errors="replace",
                env=self._environment(),
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MpsError(f"the MPS control daemon has not answered {command!r} in {self._timeout_s:g} s") from None
        except OSError as error:
            raise MpsError(f"{self._control} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            said = (done.stderr + done.stdout).strip().splitlines() or ["it says nothing"]
            raise MpsError(f"the MPS control daemon cannot be asked {command!r}: {said[0]}")
        return done.stdout

    def _wait_for_end(self, processes: list[_Process]) -> None:
        give_up_s = time.monotonic() + self._timeout_s
        while any(process.alive for process in processes) and time.monotonic() < give_up_s:
            time.sleep(POLL_S)


def _process(pid: int) -> _Process | None:
    """The running process of this number; None if there is none, or only what is left of a dead one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # After the name, which is in brackets and may hold anything: state, ..., start time (fields 3 and 22 of proc(5)).
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else _Process(pid, fields[19])


def _short_directory() -> Path:
    """A new folder of this user alone, with a path short enough for sockets in it."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if os.path.isdir(parent) and len(os.fsencode(parent)) <= LONGEST_DIRECTORY - len("/mps-12345678/pipe"):
            return Path(tempfile.mkdtemp(prefix="mps-", dir=parent))
    raise MpsError(f"{tempfile.gettempdir()} is too long a path for the sockets of MPS; set TMPDIR to a shorter one")
