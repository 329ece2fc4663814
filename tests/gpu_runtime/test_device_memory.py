"""What is read of a device's memory, and that nothing breaks where it cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.device import Device
from gpu_runtime.device_memory import PeakMemory, free_bytes, host_free_bytes

CPU = Device(name="test", kind="cpu", num_cores=2)
CUDA = Device(name="test", kind="cuda", num_cores=132, index=1)


def system(root: Path, available_kib: int) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable:   {available_kib} kB\n")
    return root


def group(root: Path, path: str, limit: str, usage: int, reclaimable: int, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {reclaimable}\nfile 7\n")


def test_this_machine() -> None:
    free = host_free_bytes()
    assert free is None or free > 2**20


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert host_free_bytes(system(tmp_path, 1000)) == 1000 * 1024


@pytest.mark.parametrize("limit", ["max", "1000000000"])
def test_a_group_that_leaves_more_than_the_machine_has(tmp_path: Path, limit: str) -> None:
    system(tmp_path, 1000)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    group(tmp_path, "job", limit, usage=0, reclaimable=0)
    assert host_free_bytes(tmp_path) == 1000 * 1024


def test_the_tightest_group_counts_and_its_cache_is_free(tmp_path: Path) -> None:
    system(tmp_path, 1000)
    (tmp_path / "proc/self/cgroup").write_text("0::/user/job\n")
    group(tmp_path, "user", "90000", usage=50000, reclaimable=10000)
    group(tmp_path, "user/job", "max", usage=40000, reclaimable=0)
    assert host_free_bytes(tmp_path) == 50000


def test_version_one_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    system(tmp_path, 1000)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    group(tmp_path, "memory", "5000", usage=2000, reclaimable=500, version=1)
    assert host_free_bytes(tmp_path) == 3500


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    system(tmp_path, 1000)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    group(tmp_path, "", "1000", usage=3000, reclaimable=0)
    assert host_free_bytes(tmp_path) == 0


@pytest.mark.parametrize("damage", ["", "what", "0::"])
def test_groups_that_cannot_be_read_are_ignored(tmp_path: Path, damage: str) -> None:
    system(tmp_path, 1000)
    (tmp_path / "proc/self/cgroup").write_text(damage)
    group(tmp_path, "", "lots", usage=0, reclaimable=0)
    assert host_free_bytes(tmp_path) == 1000 * 1024


def test_no_proc_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 10}[name])
    assert host_free_bytes(tmp_path) == 40960

    def fails(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr("os.sysconf", fails)
    assert host_free_bytes(tmp_path) is None


# ------------------------------------------------------------------------------------------------------------- CUDA


class FakeCuda:
    """A device with 50 bytes free, 30 in torch's cache and 4 of those in the gaps of used blocks."""

    def __init__(self, **broken: Any) -> None:
        self.indices: set[int] = set()
        self.allocated, self.peak = 100, 100
        self._broken = broken

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self._note("mem_get_info", index)
        return 50, 1000

    def memory_stats(self, index: int) -> dict[str, int]:
        self._note("memory_stats", index)
        return {
            "reserved_bytes.all.current": 130,
            "allocated_bytes.all.current": 100,
            "inactive_split_bytes.all.current": 4,
        }

    def reset_peak_memory_stats(self, index: int) -> None:
        self._note("reset_peak_memory_stats", index)
        self.peak = self.allocated

    def memory_allocated(self, index: int) -> int:
        self._note("memory_allocated", index)
        return self.allocated

    def max_memory_allocated(self, index: int) -> int:
        self._note("max_memory_allocated", index)
        return self.peak

    def _note(self, name: str, index: int) -> None:
        self.indices.add(index)
        if name in self._broken:
            raise self._broken[name]


def test_free_on_cuda_is_what_the_driver_and_the_cache_can_give() -> None:
    cuda = FakeCuda()
    assert free_bytes(CUDA, cuda) == 50 + 30 - 4
    assert cuda.indices == {1}


@pytest.mark.parametrize("name", ["mem_get_info", "memory_stats"])
def test_free_on_cuda_unknown(name: str) -> None:
    assert free_bytes(CUDA, FakeCuda(**{name: RuntimeError("no")})) is None


def test_peak_on_cuda() -> None:
    cuda = FakeCuda()
    cuda.peak = 700
    meter = PeakMemory(CUDA, cuda)
    assert meter.read() == 0
    cuda.peak = 150
    assert meter.read() == 50


@pytest.mark.parametrize("name", ["reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"])
def test_peak_on_cuda_unknown(name: str) -> None:
    assert PeakMemory(CUDA, FakeCuda(**{name: RuntimeError("no")})).read() == 0


def test_peak_elsewhere_is_unknown() -> None:
    assert PeakMemory(CPU, FakeCuda()).read() == 0
