"""Tensors in memory that several processes share: anonymous, so that nothing is left behind however they end.

Linux only (`memfd_create`): the file descriptor travels over a Unix socket, and the memory goes with its last user.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Enough for any vector instruction, and a whole line of any cache.
ALIGNMENT = 64


def unavailable() -> str:
    """Why this system has no such memory; empty where it has."""
    return "" if hasattr(os, "memfd_create") else "anonymous shared memory (memfd_create) exists on Linux only"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor lies: bytes from the start of its memory, dtype by name ("float32"), shape and strides."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """From the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * dtype_of(self.dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    """Inverse of the names in `Slot.dtype`. Raises ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return found


def slots_for(tensors: Sequence[torch.Tensor], start: int = 0) -> tuple[Slot, ...]:
    """Places for tensors like these, one after the other from `start`; dense ones keep their memory format."""
    slots: list[Slot] = []
    offset = start
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")
        slot = Slot(
            offset=-(-offset // ALIGNMENT) * ALIGNMENT,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(like.shape),
            stride=tuple(like.stride()),
        )
        slots.append(slot)
        offset = slot.offset + slot.num_bytes
    return tuple(slots)


def new_memory(name: str) -> int:
    """The file descriptor of empty anonymous memory. `name` is for people who look at /proc."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def tensors_at(descriptor: int, slots: Sequence[Slot]) -> tuple[torch.Tensor, ...]:
    """Tensors over the memory itself, which grows if it is too small (new memory is zero).

    The tensors keep the memory alive; the descriptor may be closed.
    """
    end = max((slot.offset + slot.num_bytes for slot in slots), default=0)
    if os.fstat(descriptor).st_size < end:
        os.ftruncate(descriptor, end)
    if end == 0:
        return tuple(torch.empty(slot.shape, dtype=dtype_of(slot.dtype)) for slot in slots)
    base = torch.frombuffer(mmap.mmap(descriptor, end), dtype=torch.uint8)
    return tuple(
        base[slot.offset : slot.offset + slot.num_bytes].view(dtype_of(slot.dtype)).as_strided(slot.shape, slot.stride)
        for slot in slots
    )
