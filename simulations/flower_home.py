"""A private Flower for one run: its own home, port, environment and SuperLink, gone without a trace afterwards.

Flower's own `flwr run` leaves a SuperLink behind that later runs share, with the working directory and environment
of whoever came first. Here the SuperLink is a child of this process, started in a neutral directory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from server_app.checkpoint import writing
from simulations.process_tree import ProcessTree, end_with_parent, marker_of

# Ray's sockets lie up to 68 characters below the private directory, whose own name has 18, and a socket's path has at
# most 107.
LONGEST_BASE = 20
START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
PORT_ATTEMPTS = 3
COMMANDS_SCRIPT = Path(__file__).parent / "flower_commands.py"
COMMANDS_ENDED = "the process that runs flwr commands has ended"
CONNECTION = "run"
# Programs that a run cannot go on without: the server with Flower's side of the simulation, and Ray's.
VITAL = ("flwr-simulation", "raylet")


class FlowerError(RuntimeError):
    """Flower could not be started or refused a command; the text is one line."""


class FlowerHome:
    """Context manager around the SuperLink of one run.

    Args:
        log_file: where the SuperLink and all that it starts write to; grows while the run goes on.
    """

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        self.root = Path(tempfile.mkdtemp(prefix="paceline-", dir=_short_base()))
        self.tree = ProcessTree(marker_of(str(self.root)))
        self._environment = environment(self.root)
        self._superlink: subprocess.Popen[bytes] | None = None
        self._commands: subprocess.Popen[bytes] | None = None
        self._num_commands = 0
        self._unread = b""
        self._vital_seen: set[str] = set()

    def __enter__(self) -> FlowerHome:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the SuperLink and wait until it answers.

        Raises:
            FlowerError: it cannot be started, ends at once, or does not answer in time.
            OutputError: no room for its files.
        """
        with writing(self.root):
            for folder in ("flwr", "tmp", "cwd", "home"):
                (self.root / folder).mkdir(exist_ok=True)
        try:
            # Loads while the SuperLink starts.
            self._start_commands()
            port = self._start_superlink_somewhere()
        except OSError as error:
            raise FlowerError(f"cannot start Flower's processes: {error.strerror}") from None
        config = f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n'
        config += f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        with writing(self.root / "flwr" / "config.toml"):
            (self.root / "flwr" / "config.toml").write_text(config)

    def _start_superlink_somewhere(self) -> int:
        """The port that it took."""
        for _ in range(PORT_ATTEMPTS):
            port = _free_port()
            if self._start_superlink(port):
                return port
        raise FlowerError(f"flower-superlink ended at once; its log: {self.log_file}")

    def submit(self, app: Path, run_config: Path, federation: Mapping[str, int | float]) -> str:
        """Hand the app over with the TOML file `run_config`; returns the run id.

        Raises:
            FlowerError: Flower refuses the app or its config.
        """
        pairs = " ".join(f"{key}={value}" for key, value in federation.items())
        options = ["--run-config", str(run_config), "--federation-config", pairs, "--format", "json"]
        answer = self.flwr(["run", str(app), CONNECTION, *options])
        run_id = answer.get("run-id")
        if not run_id:
            raise FlowerError(f"Flower did not take the app: {one_line(str(answer.get('error-message', answer)))}")
        return str(run_id)

    def status(self, run_id: str) -> tuple[str, str]:
        """Status such as `running` or `finished:completed`, and details.

        Raises:
            FlowerError: the SuperLink does not answer.
        """
        answer = self.flwr(["ls", CONNECTION, "--run-id", run_id, "--format", "json"], timeout_s=STATUS_TIMEOUT_S)
        try:
            run = answer["runs"][0]
            return str(run["status"]), str(run.get("status-details") or "")
        except (KeyError, IndexError, TypeError):
            raise FlowerError(f"Flower knows nothing of run {run_id}: {one_line(str(answer))}") from None

    def stop(self, run_id: str) -> None:
        """Ask Flower to stop the run."""
        self.flwr(["stop", run_id, CONNECTION, "--format", "json"], timeout_s=STOP_TIMEOUT_S)

    def dead(self) -> list[str]:
        """Those of the programs a run cannot go on without that have been there and are no longer."""
        found = {name for process in self.tree.find() for name in VITAL if _runs(process, name)}
        self._vital_seen |= found
        return [name for name in VITAL if name in self._vital_seen - found]

    def flwr(self, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, Any]:
        """Run a `flwr` command with JSON output.

        Raises:
            FlowerError: it says nothing that is JSON.
        """
        if self._commands is None:
            raise FlowerError("Flower has not been started")
        self.tree.find()
        if self._commands.poll() is not None:  # killed by somebody; the run need not end with it
            self._start_commands()
        commands = self._commands
        assert commands.stdin is not None
        self._num_commands += 1
        files = {name: self.root / f"{self._num_commands}.{name}" for name in ("stdout", "stderr")}
        request = {
            "number": self._num_commands,
            "argv": list(argv),
            **{name: str(file) for name, file in files.items()},
        }
        try:
            commands.stdin.write(json.dumps(request).encode() + b"\n")
            commands.stdin.flush()
            exit_code = self._wait_answer(self._num_commands, f"flwr {argv[0]}", timeout_s)
            # A command that was killed may not have come as far as to open them.
            texts = {name: file.read_text(errors="replace") if file.exists() else "" for name, file in files.items()}
        except BrokenPipeError:
            raise FlowerError(COMMANDS_ENDED) from None
        except OSError as error:
            raise FlowerError(f"flwr {argv[0]}: {error}") from None
        finally:
            for file in files.values():
                file.unlink(missing_ok=True)
        try:
            answer = json.loads(texts["stdout"])
        except json.JSONDecodeError:
            said = one_line(texts["stderr"] or texts["stdout"]) or f"ended with exit code {exit_code} and said nothing"
            raise FlowerError(f"flwr {argv[0]}: {said}") from None
        return answer if isinstance(answer, dict) else {"answer": answer}

    def _wait_answer(self, number: int, what: str, timeout_s: float) -> int:
        """The exit code of command `number`; earlier ones, not waited for to the end, are passed over."""
        assert self._commands is not None
        assert self._commands.stdout is not None
        answers = self._commands.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while True:
            *lines, self._unread = self._unread.split(b"\n")
            for answered, exit_code in (line.split() for line in lines):
                if int(answered) == number:
                    return int(exit_code)
            ready, _, _ = select.select([answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise FlowerError(f"{what} did not end within {timeout_s:g} s")
            found = os.read(answers, 4096)
            if not found:
                raise FlowerError(COMMANDS_ENDED)
            self._unread += found

    def is_alive(self) -> bool:
        """Whether the SuperLink is running."""
        return self._superlink is not None and self._superlink.poll() is None

    def close(self) -> None:
        """End every process of this run and remove its directory."""
        if self._commands is not None and self._commands.stdin is not None:
            with contextlib.suppress(OSError):
                self._commands.stdin.write(b"null\n")
                self._commands.stdin.close()
        self.tree.end()
        for process in (self._superlink, self._commands):
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
        if self._commands is not None and self._commands.stdout is not None:
            self._commands.stdout.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _start_commands(self) -> None:
        """Start the process that runs `flwr` commands, in the place of one that has ended."""
        for pipe in (self._commands.stdin, self._commands.stdout) if self._commands else ():
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._unread = b""
        self._commands = subprocess.Popen(
            [sys.executable, "-P", str(COMMANDS_SCRIPT), str(self.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            cwd=self.root / "cwd",
            start_new_session=True,
        )
        self.tree.roots.add(self._commands.pid)

    def _start_superlink(self, port: int) -> bool:
        """Start a SuperLink on `port`; False if it ends before it answers."""
        command = [_script("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with self.log_file.open("ab") as log:
            self._superlink = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.root / "cwd",
                # Keeps Ctrl-C in the terminal away from Flower's processes: they are ended in order.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.tree.roots.add(self._superlink.pid)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._superlink.poll() is not None:
                return False
            if _answers(port):
                return True
            time.sleep(0.05)
        raise FlowerError(f"flower-superlink does not answer after {START_TIMEOUT_S:g} s; its log: {self.log_file}")


def environment(root: Path) -> dict[str, str]:
    """Environment of all processes of a run: everything they write goes below `root`, nothing is installed or sent."""
    found = dict(os.environ)
    # Flower starts its parts by name.
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    found.update(
        FLWR_HOME=str(root / "flwr"),
        FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
        FLWR_DISABLE_UPDATE_CHECK="1",
        FLWR_TELEMETRY_ENABLED="0",
        FLWR_SUPEREXEC_TASK_POLL_INTERVAL="0.1",
        RAY_TMPDIR=str(root),
        RAY_USAGE_STATS_ENABLED="0",
        TMPDIR=str(root / "tmp"),
        PYTHONUNBUFFERED="1",
    )
    found["NO_PROXY"] = found["no_proxy"] = ",".join(filter(None, [found.get("NO_PROXY"), "127.0.0.1,localhost"]))
    # A Ray cluster of the user's is not ours to join.
    found.pop("RAY_ADDRESS", None)
    if not _is_writable(found.get("HOME", "")):
        found["HOME"] = str(root / "home")
    return found


def one_line(text: str) -> str:
    """Text without line breaks and terminal colours."""
    return " ".join(strip_colours(text).split())


def strip_colours(text: str) -> str:
    """Text without ANSI escape sequences."""
    parts = text.split("\x1b[")
    return parts[0] + "".join(part.lstrip("0123456789;?")[1:] for part in parts[1:])


def _short_base() -> Path:
    """Where a private directory may lie: the usual temporary folder, or /tmp if that one's path is long."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= LONGEST_BASE else Path("/tmp")


def _is_writable(folder: str) -> bool:
    return bool(folder) and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def _script(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise FlowerError(f"{name} is not installed; install the project's dependencies")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _runs(process: psutil.Process, program: str) -> bool:
    """Whether a process runs `program`, be it a script of an interpreter."""
    try:
        return any(os.path.basename(word) == program for word in process.cmdline()[:3])
    except psutil.Error:
        return False


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
