"""Keeps freed memory in the process: else every large tensor may cost page faults, which a slowdown multiplies."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt, and the largest values it takes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_NEVER, _LARGEST_MMAP_THRESHOLD, _PAD = 2**31 - 1, 32 << 20, 64 << 20


def keep_freed_memory() -> bool:
    """For the rest of the process; False where the C library has no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, _NEVER),
        (_TOP_PAD, _PAD),
        (_ARENA_MAX, 1),
    )
    accepted = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings]
    return all(accepted)
