"""Warm worker processes, kept from one round to the next. None outlives its pool, or the process that owns it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_runtime.mps_daemon import MpsDaemon
from gpu_runtime.socket_wire import Frame, WireError, receive, send
from gpu_runtime.work import RemoteError
from gpu_runtime.workload import WorkloadFactory
from gpu_runtime.workload_cache import resolve_factory

# A worker imports torch before it says that it is there.
START_S = 120.0
NO_ENVIRONMENT: Mapping[str, str] = {}
END_S = 2.0


class WorkerLostError(RuntimeError):
    """A worker process that has ended or does not start; the text says how."""


class WorkerProcess:
    """One worker, in a session of its own: Ctrl-C reaches the parent only, which ends it in order.

    Args:
        factory: of workloads, "package.module:function".
        environment: variables beside those of this process.
    """

    def __init__(self, factory: str, environment: Mapping[str, str] = NO_ENVIRONMENT) -> None:
        self.environment = dict(environment)
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "gpu_runtime.workers.worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    factory,
                ],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(_import_path())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise WorkerLostError(f"a worker process cannot be started: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._asking = threading.Lock()
        self._is_there = False
        self.lost = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether it is carrying out an order."""
        return self._asking.locked()

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, as far as one can see without asking it."""
        return bool(self.lost) or self._process.poll() is not None

    def wait_until_there(self, timeout_s: float = START_S) -> None:
        """Wait for its first word, if that has not come yet. Raises WorkerLostError."""
        if self._is_there:
            return
        self._socket.settimeout(timeout_s)
        try:
            receive(self._socket)
        except TimeoutError:
            raise self._gone(f"has not started within {timeout_s:g} s") from None
        except WireError:
            raise self._gone("has ended while it started") from None
        self._socket.settimeout(None)
        self._is_there = True

    def ask(
        self,
        header: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        descriptors: Sequence[int] = (),
    ) -> Frame:
        """Give an order and wait for the answer.

        Raises:
            WorkerLostError: the process has ended.
            RemoteError: what it was asked to do failed.
        """
        with self._asking:
            if self.lost:
                raise WorkerLostError(self.lost)
            try:
                send(self._socket, Frame(header=header, arrays=arrays or {}, descriptors=descriptors))
                answer = receive(self._socket)
            except WireError:
                raise self._gone("has ended") from None
        if "error" in answer.header:
            raise RemoteError(str(answer.header["error"]))
        return answer

    def end(self, patience_s: float = END_S) -> None:
        """End it: by the end of its input, else by SIGTERM, else by SIGKILL, each to its whole group."""
        self.lost = self.lost or f"worker process {self.pid} was ended"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for order in (None, signal.SIGTERM, signal.SIGKILL):
            if order is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, order)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1 if order is None and self.is_busy else patience_s)
                break
        self._socket.close()

    def _gone(self, how: str) -> WorkerLostError:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_S)
        self.lost = f"worker process {self.pid} {how}" + ("" if code is None else f" ({_code_in_words(code)})")
        return WorkerLostError(self.lost)


class WorkerPool:
    """Workers by number. They are started when first wanted, and those that have ended since again.

    Args:
        factory: of workloads; a function must be importable under its own name.

    Attributes:
        mps: a daemon for workers on CUDA; not started until a backend does.
    """

    def __init__(self, factory: WorkloadFactory | str) -> None:
        self._factory = factory if isinstance(factory, str) else reference_of(factory)
        self._workers: list[WorkerProcess] = []
        self._starting = threading.Lock()
        self.mps = MpsDaemon()

    @property
    def unavailable(self) -> str:
        """Why there can be no workers; empty when there can."""
        return "" if self._factory else "the workload factory is no function that another process could import"

    def workers(self, count: int, environments: Sequence[Mapping[str, str]] = ()) -> list[WorkerProcess]:
        """The first `count` workers, all of them there.

        Args:
            count: how many.
            environments: variables for each; a worker with others is replaced. Without them all get none.

        Raises:
            WorkerLostError: one does not start, twice.
        """
        with self._starting:
            deadline = time.monotonic() + START_S
            try:
                return self._there(count, environments, deadline)
            except WorkerLostError:
                # One that dies while it starts may have been killed by accident.
                return self._there(count, environments, deadline)

    @property
    def pids(self) -> list[int]:
        """Of the workers that are thought to live."""
        return [worker.pid for worker in self._workers if not worker.lost]

    def forget_trainings(self) -> None:
        """Let all workers drop what they hold of the last execution; end those still busy with a step of it."""
        for worker in self._workers:
            if worker.is_busy:
                worker.end()
            elif not worker.lost:
                with contextlib.suppress(WorkerLostError):
                    worker.ask({"order": "forget"})

    def end_busy(self) -> None:
        """End those that are carrying out an order."""
        for worker in self._workers:
            if worker.is_busy:
                worker.end()

    def close(self) -> None:
        """End all workers and their daemon. Later calls of `workers` start new ones."""
        with self._starting:
            while self._workers:
                self._workers.pop().end()
            self.mps.stop()

    # ------------------------------------------------------------------------------------------------------ internals

    def _there(self, count: int, environments: Sequence[Mapping[str, str]], deadline: float) -> list[WorkerProcess]:
        """One attempt; waits until `time.monotonic()` is `deadline`."""
        for index in range(count):
            wanted = dict(environments[index]) if environments else {}
            if index < len(self._workers):
                known = self._workers[index]
                if not known.has_ended and known.environment == wanted:
                    continue
                known.end()
            worker = WorkerProcess(self._factory, wanted)
            self._workers[index : index + 1] = [worker]
        for worker in self._workers[:count]:
            worker.wait_until_there(max(0.1, deadline - time.monotonic()))
        return self._workers[:count]


def reference_of(factory: WorkloadFactory) -> str:
    """ "package.module:function" of a function that can be found there; else the empty string."""
    reference = f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', '')}"
    try:
        return reference if resolve_factory(reference) is factory else ""
    except ValueError:
        return ""


def _import_path() -> list[str]:
    """Where this process finds modules: a worker must find the same."""
    return [os.path.abspath(entry) for entry in sys.path]


def _code_in_words(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
