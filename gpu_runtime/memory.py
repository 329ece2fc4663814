"""Which tasks may hold memory at the same time: admission from measured peaks and free memory. Plain Python.

The step queue asks at the start and whenever a task ends. A task that is not admitted yet takes no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Of the free memory, kept back when several tasks run: for workspaces and for what fragmentation makes unusable.
HEADROOM_FRACTION = 0.1


class MemoryNeedError(RuntimeError):
    """A task that does not fit into free memory even alone; the text names what it needs and what is free."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A task that may start. `fraction` below 1: it fits alone, with that part of its memory only."""

    task: str
    fraction: float = 1.0
    need: str = ""


class Admission:
    """Lets tasks start as long as their peaks fit into free memory together; the others wait until one ends.

    What is free is read when asked, but a task that has started may not have reached its peak yet, and how much of what
    is taken is its own cannot be told. So while tasks run, what is left for others is what was free before any of them
    started, less their peaks; never more than is free now, and never less than what is free now less their peaks.

    Args:
        peaks: measured peak memory of each task in bytes; 0 for unknown. Unknown ones are admitted and count nothing.
        read_free: bytes free now, None for unknown: then everything is admitted.
        at_once: most tasks that will run at the same time; the others hold nothing yet.
    """

    def __init__(
        self, peaks: Mapping[str, int], read_free: Callable[[], int | None], *, at_once: int | None = None
    ) -> None:
        self._peaks, self._read_free = dict(peaks), read_free
        self._at_once = len(self._peaks) if at_once is None else at_once
        self._held: dict[str, int] = {}
        self._budget = 0
        self._waited: dict[str, str] = {}

    def admit(self, waiting: Sequence[str]) -> tuple[Admitted, ...]:
        """Those of `waiting`, who goes first first, that may start now. At least one if nothing runs."""
        known = any(self._peaks.get(task, 0) for task in waiting)
        free = self._read_free() if known else None
        room = self._room(free)
        margin = HEADROOM_FRACTION * self._budget
        running = [*self._held]
        admitted = []
        for task in waiting:
            if len(self._held) >= self._at_once:
                break
            peak = self._peaks.get(task, 0)
            if room is None or peak == 0 or peak + (margin if self._held else 0) <= room:
                self._held[task] = peak
                room = None if room is None else room - peak
                admitted.append(Admitted(task=task))
        if not self._held and waiting and free is not None:
            task = waiting[0]
            peak = self._peaks[task]
            self._held[task] = free
            need = f"needs {as_text(peak)}, {as_text(free)} are free"
            admitted.append(Admitted(task=task, fraction=max(0.0, free / peak), need=need))
        if free is not None and len(self._held) < self._at_once:
            self._note_waiting([task for task in waiting if task not in self._held], free, running)
        return tuple(admitted)

    def release(self, task: str) -> None:
        """A task has ended and let its memory go."""
        self._held.pop(task, None)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each task that had to wait."""
        return tuple(self._waited.values())

    def _room(self, free: int | None) -> float | None:
        """Bytes for tasks that are to start now."""
        if free is None:
            return None
        if not self._held:
            self._budget = free
            return free
        taken = sum(self._held.values())
        return max(free - taken, min(self._budget - taken, free))

    def _note_waiting(self, waiting: Sequence[str], free: int, running: Sequence[str]) -> None:
        others = ", ".join(self._held)
        when = "were free while they ran" if running else "were free"
        for task in waiting:
            need = as_text(self._peaks[task])
            self._waited.setdefault(
                task, f"{task}: waited for memory beside {others}: needs {need}, {as_text(free)} {when}"
            )


def as_text(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
