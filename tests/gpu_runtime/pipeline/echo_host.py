"""A StageHost without a model: a tensor's gradient is the tensor times `FACTOR`, the loss is step + index."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from gpu_runtime.pipeline.encoding import decode, encode
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionKey,
    SessionSpec,
    StageHost,
    StageSession,
)

FACTOR = 2.0


def key(client: str = "laptop", task: str = "digits") -> SessionKey:
    return SessionKey(run="run", server_round=3, attempt=0, client=client, task=task)


def spec(client: str = "laptop", *, micro_batches: int = 4, task: str = "digits") -> SessionSpec:
    return SessionSpec(
        key=key(client, task),
        split_point=2,
        micro_batches=micro_batches,
        encoding="fp32",
        num_examples=100,
        batch_size=8,
        seed=1,
    )


def tensor_of(step: int, index: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return torch.full(shape, step + index / 10)


def activation(step: int, index: int, count: int = 4, tensor: torch.Tensor | None = None) -> Activation:
    tensor = tensor_of(step, index) if tensor is None else tensor
    return Activation(
        step=step,
        index=index,
        count=count,
        num_examples=2,
        batch_examples=8,
        tensors=(encode(tensor, "fp32"),),
        structure="t",
        targets=(encode(torch.tensor([step, index]), "fp32"),),
        target_structure="t",
    )


def run_step(channel: Channel, step: int, count: int = 4) -> list[Gradient]:
    """One step in the order of the pipeline: all forwards, then all gradients."""
    for index in range(count):
        channel.send(activation(step, index, count))
    return [channel.receive() for _ in range(count)]


def check_step(gradients: list[Gradient], step: int, count: int = 4) -> None:
    assert [(gradient.step, gradient.index) for gradient in gradients] == [(step, index) for index in range(count)]
    for index, gradient in enumerate(gradients):
        assert gradient.loss == step + index
        (encoded,) = gradient.tensors
        assert encoded is not None
        assert torch.equal(decode(encoded), tensor_of(step, index) * FACTOR)


class EchoHost(StageHost):
    """Counts what it is asked for. `refusal` refuses all sessions; `before_train` is called with each micro-batch."""

    def __init__(
        self, refusal: str = "", before_train: Callable[[Activation], None] | None = None, keep: bool = True
    ) -> None:
        self.refusal = refusal
        self.before_train = before_train or (lambda _: None)
        self.keep = keep
        self.sessions: list[EchoSession] = []

    def open(self, spec: SessionSpec) -> StageSession:
        if self.refusal:
            raise RefusedError(self.refusal)
        session = EchoSession(self, spec)
        self.sessions.append(session)
        return session


class EchoSession(StageSession):
    def __init__(self, host: EchoHost, spec: SessionSpec) -> None:
        self.host = host
        self.spec = spec
        self.trained: list[tuple[int, int]] = []
        self.num_steps = self.num_examples = 0
        self.end: SessionEnd | None = None
        self.abandoned = threading.Event()
        self.threads: set[int] = set()

    def train(self, activation: Activation) -> Gradient:
        self.threads.add(threading.get_ident())
        self.host.before_train(activation)
        if self.host.keep:
            self.trained.append((activation.step, activation.index))
        self.num_examples += activation.num_examples
        self.num_steps += activation.index == activation.count - 1
        tensors = tuple(
            encode(decode(tensor) * FACTOR, "fp32") if tensor.dtype == "float32" else None
            for tensor in activation.tensors
        )
        loss = float(activation.step + activation.index)
        return Gradient(step=activation.step, index=activation.index, loss=loss, server_s=0.5, tensors=tensors)

    def finish(self, end: SessionEnd) -> SessionEnd:
        own = SessionEnd(num_steps=self.num_steps, num_examples=self.num_examples)
        if end != own:
            raise ProtocolError(f"the device has trained {end}, the service {own}")
        self.end = own
        return own

    def abandon(self) -> None:
        self.abandoned.set()
