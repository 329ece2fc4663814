"""Bytes per second through a split session on loopback: one stream, the service in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass

import torch

from gpu_runtime.pipeline.channel import GrpcChannel
from gpu_runtime.pipeline.encoding import EncodedTensor, encode
from gpu_runtime.pipeline.service import ServiceSettings, SplitServer
from gpu_runtime.pipeline.session import (
    Activation,
    Gradient,
    SessionEnd,
    SessionKey,
    SessionSpec,
    StageHost,
    StageSession,
)

_TOKEN = "throughput"
_STEP = 32
UP, DOWN, BOTH = "up", "down", "both"


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Payload bytes per second: each direction alone, and each of the two while both are busy."""

    message_bytes: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    both_bytes_per_s: float


class _Sink(StageHost, StageSession):
    """Trains nothing: takes what comes and answers as the structure of the activation asks."""

    def __init__(self, message_bytes: int) -> None:
        self._answer = encode(torch.zeros(message_bytes // 4), "fp32")

    def open(self, spec: SessionSpec) -> StageSession:
        return self

    def train(self, activation: Activation) -> Gradient:
        tensors: tuple[EncodedTensor | None, ...] = (None,) if activation.structure == UP else (self._answer,)
        return Gradient(step=activation.step, index=activation.index, loss=0.0, server_s=0.0, tensors=tensors)

    def finish(self, end: SessionEnd) -> SessionEnd:
        return end

    def abandon(self) -> None:
        pass


def channel_throughput(message_bytes: int = 1 << 20, seconds: float = 1.0) -> Throughput:
    """Measure each direction for about `seconds`.

    Raises:
        SplitError: the service's process does not answer.
    """
    command = [sys.executable, "-m", "gpu_runtime.bench.channel_throughput", "--serve", str(message_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            rates = {direction: _rate(address, direction, message_bytes, seconds) for direction in (UP, DOWN, BOTH)}
        finally:
            process.stdin.close()
    return Throughput(
        message_bytes=message_bytes,
        up_bytes_per_s=rates[UP],
        down_bytes_per_s=rates[DOWN],
        both_bytes_per_s=rates[BOTH],
    )


def _rate(address: str, direction: str, message_bytes: int, seconds: float) -> float:
    key = SessionKey(run="bench", server_round=0, attempt=0, client=direction, task="throughput")
    spec = SessionSpec(
        key=key, split_point=1, micro_batches=_STEP, encoding="fp32", num_examples=1, batch_size=1, seed=0
    )
    tensor = encode(torch.zeros(1 if direction == DOWN else message_bytes // 4), "fp32")
    with closing(GrpcChannel(address, _TOKEN, probe=False)) as channel:
        channel.open(spec)
        _step(channel, 0, direction, tensor)
        began_s, step = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            step += 1
            _step(channel, step, direction, tensor)
        return step * _STEP * message_bytes / (time.perf_counter() - began_s)


def _step(channel: GrpcChannel, step: int, direction: str, tensor: EncodedTensor) -> None:
    for index in range(_STEP):
        channel.send(
            Activation(
                step=step,
                index=index,
                count=_STEP,
                num_examples=1,
                batch_examples=_STEP,
                tensors=(tensor,),
                structure=direction,
                targets=(),
                target_structure="",
            )
        )
    for _ in range(_STEP):
        channel.receive()


def main() -> None:
    """Print the numbers as JSON; with --serve, be the other process until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, metavar="BYTES", help="serve with answers of so many bytes")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="size of a message")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measurement")
    options = parser.parse_args()
    if options.serve is None:
        print(json.dumps(asdict(channel_throughput(options.bytes, options.seconds)), indent=2))
        return
    host = _Sink(options.serve)
    with closing(SplitServer(host, _TOKEN, settings=ServiceSettings(queue_bound=_STEP))) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
