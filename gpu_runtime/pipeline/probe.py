"""What a client's link to the split service can do, measured before the first round: a session that trains nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gpu_runtime.pipeline.encoding import EncodedTensor, encode
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    ProtocolError,
    SessionEnd,
    SessionKey,
    SessionSpec,
    StageSession,
)

# No task of a run has this name: a task's begins with a letter.
PROBE_TASK = "-probe"
WARM_UP, MESSAGES = 8, 48
NUMBERS = 16


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Rates in bytes per second and one-way latency, None where not measured.

    `message_s` is what a message takes beside its bytes: the work of both ends on it that cannot overlap.
    """

    uplink_bytes_per_s: float | None
    downlink_bytes_per_s: float | None
    latency_s: float | None
    message_s: float


class ProbeSession(StageSession):
    """Sends back what it was sent, a limited number of times."""

    def __init__(self) -> None:
        self._num_left = WARM_UP + MESSAGES

    def train(self, activation: Activation) -> Gradient:
        self._num_left -= 1
        if self._num_left < 0 or sum(len(tensor.data) for tensor in activation.tensors) > 4 * NUMBERS:
            raise ProtocolError("a probe of the link sends a few small messages only")
        return Gradient(
            step=activation.step, index=activation.index, loss=0.0, server_s=0.0, tensors=activation.tensors
        )

    def finish(self, end: SessionEnd) -> SessionEnd:
        return end

    def abandon(self) -> None:
        pass


def measure_link(channel: Channel, run: str, client: str) -> MeasuredLink:
    """Probe the link of a channel that is not open yet; it is closed afterwards. Takes about half a second.

    Raises:
        SplitError: the service cannot be reached, or refuses.
    """
    key = SessionKey(run=run, server_round=0, attempt=0, client=client, task=PROBE_TASK)
    spec = SessionSpec(
        key=key,
        split_point=1,
        micro_batches=max(WARM_UP, MESSAGES),
        encoding="fp32",
        num_examples=WARM_UP + MESSAGES,
        batch_size=max(WARM_UP, MESSAGES),
        seed=0,
    )
    numbers = encode(torch.zeros(NUMBERS), "fp32")
    try:
        channel.open(spec)
        _exchange(channel, 0, WARM_UP, numbers)
        seconds = _exchange(channel, 1, MESSAGES, numbers)
        found = channel.statistics
    finally:
        channel.close()
    # All but the first message follow one another: only that one's way there and back is seen.
    beside_s = 2 * (found.latency_s or 0.0)
    return MeasuredLink(
        uplink_bytes_per_s=found.uplink_bytes_per_s,
        downlink_bytes_per_s=found.downlink_bytes_per_s,
        latency_s=found.latency_s,
        message_s=max(0.0, seconds - beside_s) / MESSAGES,
    )


def _exchange(channel: Channel, step: int, count: int, numbers: EncodedTensor) -> float:
    """Seconds for `count` messages there and back."""
    started = time.perf_counter()
    for index in range(count):
        channel.send(
            Activation(
                step=step,
                index=index,
                count=count,
                num_examples=1,
                batch_examples=count,
                tensors=(numbers,),
                structure='"t"',
                targets=(),
                target_structure='"t"',
            )
        )
    for _ in range(count):
        channel.receive()
    return time.perf_counter() - started
