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
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
KILL_TIMEOUT_S = 10.0


def adopt_orphans() -> None:
    """On Linux: make processes whose parent ended children of this one, so that they can be seen and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """On Linux: let the calling process be terminated when its parent dies, even by SIGKILL. For `preexec_fn`."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ProcessTree:
    """The processes of one run.

    Args:
        marker: (variable, value) that is in the environment of the run's processes and of no others.
    """

    def __init__(self, marker: tuple[str, str]) -> None:
        self._marker = marker
        self._before = {child.pid for child in psutil.Process().children()}
        self._seen: set[psutil.Process] = set()

    def find(self, roots: Iterable[int] = ()) -> set[psutil.Process]:
        """Living processes of the run. Zombies that are ours to reap are reaped on the way, and so are those that
        their end makes ours."""
        wanted = set(roots)
        while True:
            found = self._scan(wanted)
            zombies = {process for process in found if _is_zombie(process)}
            self._seen = found - zombies
            num_reaped = sum(_reap(zombie) for zombie in zombies)
            if not num_reaped:
                return set(self._seen)

    def _scan(self, wanted: set[int]) -> set[psutil.Process]:
        own = os.getpid()
        parents: dict[int, list[psutil.Process]] = {}
        found = {process for process in self._seen if process.is_running()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                parents.setdefault(process.ppid(), []).append(process)
                if process.pid in wanted or self._is_marked(process):
                    found.add(process)
        queue = list(found)
        while queue:
            for child in parents.get(queue.pop().pid, []):
                if child not in found:
                    found.add(child)
                    queue.append(child)
        # An orphan that was adopted and died before it was ever seen.
        found |= {child for child in parents.get(own, []) if child.pid not in self._before and _is_zombie(child)}
        return {process for process in found if process.pid != own}

    def wait_gone(self, timeout_s: float, roots: Iterable[int] = ()) -> bool:
        """Wait until no process of the run is left; False if some are after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.find(roots):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def end(self, roots: Iterable[int] = (), grace_s: float = 1.0) -> set[psutil.Process]:
        """Terminate what is left, kill what does not obey within `grace_s`, and return what even then remains."""
        roots = list(roots)
        for ask, patience_s in ((psutil.Process.terminate, grace_s), (psutil.Process.kill, KILL_TIMEOUT_S)):
            for process in self.find(roots):
                with contextlib.suppress(psutil.Error):
                    ask(process)
            deadline = time.monotonic() + patience_s
            while left := self.find(roots):
                if time.monotonic() >= deadline:
                    break
                if ask is psutil.Process.kill:
                    # Also those born since the last look.
                    for process in left:
                        with contextlib.suppress(psutil.Error):
                            process.kill()
                time.sleep(_POLL_S)
        return self.find(roots)

    def _is_marked(self, process: psutil.Process) -> bool:
        name, value = self._marker
        return bool(process.environ().get(name) == value)


def _reap(process: psutil.Process) -> bool:
    """Take a zombie off the process table; False if it is not this process's child."""
    try:
        return os.waitpid(process.pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
