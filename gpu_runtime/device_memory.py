"""How much memory of a device is free, and how much was used. Every read may fail and then means unknown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_runtime.device import CUDA, Device

# cgroup v2 and v1: where the groups are, and names of limit, usage and of what the kernel can take back at once.
CGROUPS = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(device: Device, cuda: Any = torch.cuda, root: Path = Path("/")) -> int | None:
    """Bytes that a task starting now could use; None where that cannot be read.

    Args:
        device: the device.
        cuda: `torch.cuda`, or a fake of it in tests.
        root: where the file system starts, for tests.
    """
    return _cuda_free(device, cuda) if device.kind == CUDA else host_free_bytes(root)


def host_free_bytes(root: Path = Path("/")) -> int | None:
    """Memory available on the host, cut to what the process's control groups leave."""
    known = [left for left in (_system_free(root), *_left_in_groups(root)) if left is not None]
    return max(0, min(known)) if known else None


class PeakMemory:
    """Most bytes allocated on a CUDA device by this process, above what was when this was made.

    torch counts by process: this is one task's memory only while no other runs.

    Args:
        device: the device.
        cuda: `torch.cuda`, or a fake of it in tests.
    """

    def __init__(self, device: Device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._before: int | None = None
        if device.kind == CUDA:
            with contextlib.suppress(Exception):
                cuda.reset_peak_memory_stats(device.index)
                self._before = cuda.memory_allocated(device.index)

    def read(self) -> int:
        """Bytes; 0 for unknown."""
        if self._before is None:
            return 0
        try:
            return max(0, int(self._cuda.max_memory_allocated(self._device.index)) - self._before)
        except Exception:  # as for every read
            return 0


def _cuda_free(device: Device, cuda: Any) -> int | None:
    """What the driver has left, and what torch's cache holds and can give back."""
    try:
        free, _ = cuda.mem_get_info(device.index)
        stats = cuda.memory_stats(device.index)
        cached = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        # Parts of blocks in use cannot be given back, and serve the stream that cached them only.
        return int(free + max(0, cached - stats.get("inactive_split_bytes.all.current", 0)))
    except Exception:  # no driver, no permission, an allocator without statistics: all mean "unknown"
        return None


def _system_free(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group from the process's own up to the root still allows it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        for mount, controller, limit, usage, reclaimable in CGROUPS:
            if controller not in controllers.split(","):
                continue
            # In a container the path may be that of the host: the parents up to the mount are looked at too.
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                left = _left(root / mount / "/".join(parts[:depth]), limit, usage, reclaimable)
                if left is not None:
                    yield left


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """None for a group without a limit, or one that cannot be read."""
    try:
        text = (group / limit).read_text(encoding="ascii").strip()
        if text == "max":
            return None
        left = int(text) - int((group / usage).read_text(encoding="ascii"))
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:
                left += int(value)
        return left
    except (OSError, ValueError):
        return None
