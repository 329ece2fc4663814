"""What a channel has under way: micro-batches from being sent until their gradients are there. Knows no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_runtime.pipeline.frames import Frame
from gpu_runtime.pipeline.session import ProtocolError


@dataclass(frozen=True, slots=True)
class Sending:
    """A message on its way out: its frames, when it was queued, and when it may leave (emulated links: would arrive).

    `place` is (step, index) of a micro-batch.
    """

    place: tuple[int, int]
    frames: Sequence[Frame]
    num_bytes: int
    queued_s: float
    due_s: float


class Ledger:
    """Micro-batches in order; each is kept until its gradient has come, so that it can be sent again.

    `num_sent` counts those that the stream under way has taken or the service is known to have, `num_gradients` those
    whose gradients have come.
    """

    def __init__(self) -> None:
        self.num_gradients = 0
        self.num_sent = 0
        self._kept: deque[Sending] = deque()

    @property
    def num_under_way(self) -> int:
        """Micro-batches without gradient."""
        return len(self._kept)

    @property
    def num_unsent(self) -> int:
        """Micro-batches that wait to be sent."""
        return self.num_gradients + len(self._kept) - self.num_sent

    @property
    def next_unsent(self) -> Sending | None:
        """The micro-batch that is to be sent next."""
        return self._kept[self.num_sent - self.num_gradients] if self.num_unsent > 0 else None

    def add(self, sending: Sending) -> None:
        """A new micro-batch."""
        self._kept.append(sending)

    def resume(self, num_micro_batches: int) -> None:
        """The service has so many; what comes after them is to be sent (again).

        Raises:
            ProtocolError: it cannot have that many or that few.
        """
        if not 0 <= num_micro_batches - self.num_gradients <= len(self._kept):
            raise ProtocolError(
                f"the service says that it has {num_micro_batches} micro-batches; {self.num_gradients} have come back, "
                f"{len(self._kept)} are under way"
            )
        self.num_sent = num_micro_batches

    def settle(self, place: tuple[int, int]) -> Sending:
        """The gradient of a micro-batch has come.

        Raises:
            ProtocolError: it was not due.
        """
        if not self._kept or self._kept[0].place != place or self.num_gradients >= self.num_sent:
            raise ProtocolError(f"the gradient of micro-batch {place[1]} of step {place[0]} was not due")
        self.num_gradients += 1
        return self._kept.popleft()
