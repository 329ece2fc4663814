"""A request to end as KeyboardInterrupt, so that a command line that is terminated cleans up as after Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside this block: the first one, further ones let the cleaning go on.

    Only for the main thread.
    """
    numbers = [signal.SIGTERM, signal.SIGHUP]
    # Whoever started this under nohup wants it to outlive the terminal.
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def interrupt(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
