"""Ending a run's processes: a dummy tree with children, grandchildren in sessions of their own, and orphans."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from simulations.process_tree import ProcessTree, adopt_orphans, marker_of

# Starts a sleeping child in this session, one in a session of its own that ignores SIGTERM, and one that loses its
# parent; tells their pids; then sleeps or, with "die", ends at once.
FAMILY = """
import subprocess, sys, time
SLEEP = "import time; print(flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
PARENT = (
    "import subprocess, sys; "
    "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, start_new_session=True); "
    "child.stdout.readline(); print(child.pid, flush=True)"
)
python = [sys.executable, "-c"]
child = subprocess.Popen([*python, SLEEP], stdout=subprocess.PIPE)
deaf = subprocess.Popen([*python, DEAF], stdout=subprocess.PIPE, start_new_session=True)
orphan = subprocess.run([*python, PARENT, *python, SLEEP], stdout=subprocess.PIPE).stdout
child.stdout.readline(), deaf.stdout.readline()
print(child.pid, deaf.pid, int(orphan), flush=True)
if "die" not in sys.argv:
    time.sleep(60)
"""


@pytest.fixture
def _adoption() -> Iterator[None]:
    adopt_orphans()
    yield
    adopt_orphans(False)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "paceline-test")


def start_family(root: str, *arguments: str, marked: bool = True) -> tuple[subprocess.Popen[str], list[int]]:
    environment = dict(os.environ)
    if marked:
        name, value = marker_of(root)
        environment[name] = value
    family = subprocess.Popen(
        [sys.executable, "-c", FAMILY, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert family.stdout is not None
    pids = [int(pid) for pid in family.stdout.readline().split()]
    family.stdout.close()
    return family, pids


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to nobody's run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("_adoption")
def test_a_whole_tree_is_ended_and_nothing_else(root: str, bystander: subprocess.Popen[bytes]) -> None:
    tree = ProcessTree(marker_of(root))
    family, pids = start_family(root)
    tree.roots.add(family.pid)
    assert {process.pid for process in tree.find()} == {family.pid, *pids}
    assert tree.end(grace_s=0.3) == set()
    assert not any(map(is_running, [family.pid, *pids]))
    assert is_running(bystander.pid)
    family.wait()


def test_a_tree_without_its_head_is_found_by_its_environment(root: str, bystander: subprocess.Popen[bytes]) -> None:
    tree = ProcessTree(marker_of(root))
    family, pids = start_family(root, "die")
    family.wait()
    assert {process.pid for process in tree.find()} == set(pids)
    assert tree.end(grace_s=0.3) == set()
    assert not any(map(is_running, pids))
    assert is_running(bystander.pid)


@pytest.mark.usefixtures("_adoption")
def test_a_tree_without_the_mark_is_found_through_its_head(root: str) -> None:
    tree = ProcessTree(marker_of(root))
    family, pids = start_family(root, marked=False)
    tree.roots.add(family.pid)
    try:
        assert {family.pid, *pids[:2]} <= {process.pid for process in tree.find()}
        assert tree.end(grace_s=0.3) == set()
    finally:
        for pid in pids:
            if is_running(pid):
                os.kill(pid, 9)
    family.wait()


def test_other_runs_are_left_alone(root: str) -> None:
    other, pids = start_family(root)
    try:
        tree = ProcessTree(marker_of(root + "-2"))
        assert tree.find() == set()
        assert tree.end() == set()
        assert all(map(is_running, pids))
    finally:
        assert ProcessTree(marker_of(root)).end(grace_s=0.0) == set()
        other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can adopt orphans")
@pytest.mark.usefixtures("_adoption")
def test_adopted_orphans_leave_no_zombie(root: str) -> None:
    tree = ProcessTree(marker_of(root))
    family, pids = start_family(root, "die")
    family.wait()
    tree.find()
    for pid in pids:
        os.kill(pid, 9)
    deadline = time.monotonic() + 10
    while tree.find() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(psutil.pid_exists(pid) for pid in pids)
