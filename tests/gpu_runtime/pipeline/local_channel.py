"""A channel without a network: the service's half is called in the sender's thread, and may be told to fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    LinkError,
    LinkStatistics,
    SessionEnd,
    SessionSpec,
    StageHost,
    StageSession,
)


class LocalChannel(Channel):
    """Trains on `host` at once.

    Args:
        host: the service.
        fault: called with "open", "send", "receive" or "finish" before each; what it raises is the channel's failure.
        change: what becomes of each activation on its way.
    """

    def __init__(
        self,
        host: StageHost,
        *,
        fault: Callable[[str], None] = lambda call: None,
        change: Callable[[Activation], Activation] = lambda activation: activation,
    ) -> None:
        self._host, self._fault, self._change = host, fault, change
        self._session: StageSession | None = None
        self._gradients: deque[Gradient] = deque()
        self._closed = False
        self.num_sent = self.num_opened = 0

    def open(self, spec: SessionSpec) -> None:
        self._check("open")
        self._session = self._host.open(spec)
        self.num_opened += 1

    def send(self, activation: Activation) -> None:
        self._check("send")
        assert self._session is not None
        self.num_sent += 1
        self._gradients.append(self._session.train(self._change(activation)))

    def receive(self) -> Gradient:
        self._check("receive")
        return self._gradients.popleft()

    def finish(self, end: SessionEnd) -> None:
        self._check("finish")
        assert self._session is not None
        self._session.finish(end)

    def close(self) -> None:
        self._closed = True
        if self._session is not None:
            self._session.abandon()

    @property
    def statistics(self) -> LinkStatistics:
        return LinkStatistics(bytes_up=100 * self.num_sent, bytes_down=50 * self.num_sent)

    def _check(self, call: str) -> None:
        self._fault(call)
        if self._closed:
            raise LinkError("the channel is closed")


def failing_at(call: str, number: int, error: Exception) -> Callable[[str], None]:
    """A fault for `LocalChannel`: the `number`-th such call (from 1) raises `error`, and all after it."""
    calls = 0

    def fault(made: str) -> None:
        nonlocal calls
        calls += made == call
        if made == call and calls >= number:
            raise error

    return fault
