"""Find and end every process that a run started, also those that moved to a session of their own or lost their parent.

A process belongs to a run if it descends from one of the run's own children or carries the run's marker in its
environment. Nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
KILL_TIMEOUT_S = 10.0


def adopt_orphans(wanted: bool = True) -> None:
    """On Linux: make descendants whose parent ended children of this process, so that they can be seen and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def end_with_parent() -> None:
    """On Linux: let the calling process be terminated when its parent dies, even by SIGKILL. For `preexec_fn`."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def marker_of(root: str) -> tuple[str, str]:
    """What the environment of every process of a run has: Flower's home below the run's private directory."""
    return "FLWR_HOME", os.path.join(root, "flwr")


class ProcessTree:
    """The processes of one run.

    Look now and then while the run goes on: what was seen alive is also found while it is dying.

    Args:
        marker: (variable, value) that is in the environment of the run's processes and of no others.

    Attributes:
        roots: pids of the run's own children.
    """

    def __init__(self, marker: tuple[str, str]) -> None:
        self._marker = marker
        self.roots: set[int] = set()
        self._before = {child.pid for child in psutil.Process().children()}
        self._seen: set[psutil.Process] = set()

    def find(self) -> set[psutil.Process]:
        """Living processes of the run. Zombies that are ours to reap are reaped on the way, and so are those that
        their end makes ours."""
        while True:
            num_reaped = 0
            living = set()
            for process in self._scan():
                if not _is_zombie(process):
                    living.add(process)
                    continue
                try:
                    # 0 while other threads of the process are still ending.
                    if os.waitpid(process.pid, os.WNOHANG)[0] == 0:
                        living.add(process)
                    else:
                        num_reaped += 1
                except ChildProcessError:
                    pass
            self._seen = living
            if not num_reaped:
                return set(living)

    def _scan(self) -> set[psutil.Process]:
        own = os.getpid()
        parents: dict[int, list[psutil.Process]] = {}
        found = {process for process in self._seen if process.is_running()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                parents.setdefault(process.ppid(), []).append(process)
                if process.pid in self.roots or self._is_marked(process):
                    found.add(process)
        queue = list(found)
        while queue:
            for child in parents.get(queue.pop().pid, []):
                if child not in found:
                    found.add(child)
                    queue.append(child)
        # Adopted orphans that were never seen alive.
        found |= {child for child in parents.get(own, []) if child.pid not in self._before and _is_dying(child)}
        return {process for process in found if process.pid != own}

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until no process of the run is left; False if some are after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.find():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def end(self, grace_s: float = 1.0) -> set[psutil.Process]:
        """Terminate what is left, kill what does not obey within `grace_s`, and return what even then remains."""
        for ask, patience_s in ((psutil.Process.terminate, grace_s), (psutil.Process.kill, KILL_TIMEOUT_S)):
            for process in self.find():
                with contextlib.suppress(psutil.Error):
                    ask(process)
            deadline = time.monotonic() + patience_s
            while left := self.find():
                if time.monotonic() >= deadline:
                    break
                if ask is psutil.Process.kill:
                    # Also those born since the last look.
                    for process in left:
                        with contextlib.suppress(psutil.Error):
                            process.kill()
                time.sleep(_POLL_S)
        return self.find()

    def _is_marked(self, process: psutil.Process) -> bool:
        name, value = self._marker
        return bool(process.environ().get(name) == value)


def _is_dying(process: psutil.Process) -> bool:
    """Whether a process is a zombie, or past the point where it still has an environment."""
    try:
        return _is_zombie(process) or not process.environ()
    except psutil.Error:
        return _is_zombie(process)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
