"""What others do on this machine while something is measured: busy CPU time that is not of this process tree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")
# Fields of /proc/<pid>/stat after the command, which may hold blanks: state is 0, the parent 1.
_PARENT, _TIMES = 1, slice(11, 15)
# Fields of the first line of /proc/stat: user nice system idle iowait irq softirq steal (guest time is part of user).
_IDLE, _IOWAIT, _NUM_FIELDS = 3, 4, 8


class ForeignLoad:
    """Cores that others kept busy, on average, since `start`. CPU time stolen by the hypervisor counts as theirs.

    Args:
        read: (CPU seconds busy on the whole machine, CPU seconds of the own process tree), None where unknown.
        clock: seconds.
    """

    def __init__(
        self,
        read: Callable[[], tuple[float, float] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read or cpu_seconds
        self._clock = clock
        self._before: tuple[float, tuple[float, float] | None] = (0.0, None)

    def start(self) -> None:
        self._before = (self._clock(), self._read())

    @property
    def cores(self) -> float | None:
        """None where the system does not tell."""
        (began_s, before), after = self._before, self._read()
        if before is None or after is None:
            return None
        foreign_s = (after[0] - before[0]) - (after[1] - before[1])
        return max(0.0, foreign_s) / max(self._clock() - began_s, 1e-9)


def cpu_seconds(proc: Path = PROC, pid: int = 0) -> tuple[float, float] | None:
    """Busy CPU seconds since boot, of the whole machine and of process `pid` (0: this one) with all its descendants.

    A descendant's time stays counted after it was waited for: the kernel adds it to its parent's.
    None on systems without /proc.
    """
    try:
        machine = [int(field) for field in (proc / "stat").read_text().split("\n", 1)[0].split()[1:]][:_NUM_FIELDS]
    except (OSError, ValueError):
        return None
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
        ticks[int(entry.name)] = sum(int(field) for field in fields[_TIMES])
    own, queue = 0, [pid or os.getpid()]
    while queue:
        current = queue.pop()
        own += ticks.get(current, 0)
        queue.extend(parents.get(current, []))
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(machine) - machine[_IDLE] - machine[_IOWAIT]) / per_s, own / per_s
