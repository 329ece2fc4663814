"""Keeps OpenMP threads from staying behind: wide work in a thread that ends, narrow work in one that stays.

libgomp lets idle threads spin for a few milliseconds, which is what makes two threads on short loops worthwhile, until
the process owns more OpenMP threads than there are cores; then it puts them to sleep at once. A thread that has once
computed on all cores keeps its team for life. In one process with such a thread, every other thread's wide steps take
about 1.3 times as long: one variant must not leave that to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread that has ended by then."""
    results: list[T] = []
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            results.append(work())
        except BaseException as error:  # it must reach the caller, whatever it is
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def narrow() -> Iterator[None]:
    """In the block this thread computes on one core, and so gets no team; threads started there set their own width."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
