"""Runs something in a thread of its own, so that the OpenMP threads it needs go when it is done.

libgomp lets idle threads spin for a few milliseconds, which is what makes two threads on short loops worthwhile, until
the process owns more OpenMP threads than there are cores; then it puts them to sleep at once. A thread that has once
computed on all cores keeps its team for life. In one process with such a thread, every other thread's wide steps take
about 1.3 times as long: one variant must not leave that to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

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
