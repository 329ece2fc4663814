"""Ctrl-C and requests to end, as an exception while work goes on and as nothing while it is cleaned up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


class Interrupted(BaseException):
    """Ctrl-C, or a signal that asks this process to end. `folder` is where outputs were left, once that is known."""

    folder: Path | None = None


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise Interrupted inside this block."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise Interrupted(signal.Signals(number).name)

    with _handlers(interrupt):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    with _handlers(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handlers(handler: Any) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # Whoever started this under nohup wants it to outlive the terminal.
    numbers = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
