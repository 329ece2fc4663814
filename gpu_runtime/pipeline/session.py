"""What device and split service exchange, and the interfaces on both sides of the link: Channel and StageHost.

A session is one client's training of one task in one round. Its micro-batches go to the service in order, step by step,
and their gradients come back in the same order. Everything carries (step, index), counted from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gpu_runtime.pipeline.encoding import EncodedTensor
from gpu_runtime.work import TrainingError


class SplitError(TrainingError):
    """Split training cannot go on; the text says why in one line."""


class LinkError(SplitError):
    """The service cannot be reached, or has not answered within its deadline."""


class RefusedError(SplitError):
    """The service refuses the session: full, an unknown run, a wrong token, a plan it cannot follow."""


class ProtocolError(SplitError):
    """The other side sent what it must not: out of order, twice, of another shape, not decodable."""


@dataclass(frozen=True, kw_only=True)
class SessionKey:
    """Whose session it is."""

    run: str
    server_round: int
    attempt: int
    client: str
    task: str


@dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """What the service needs to know to train the server stage: with its start weights, all that the result depends on.

    `split_point` blocks stay on the device; `micro_batches` is the most a step may have; a `learning_rate` of None is
    the task's own.
    """

    key: SessionKey
    split_point: int
    micro_batches: int
    encoding: str
    num_examples: int
    batch_size: int
    seed: int
    learning_rate: float | None = None
    proximal_mu: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What crosses the cut for one micro-batch, and its labels.

    Attributes:
        step, index: which micro-batch of which step.
        count: micro-batches of this step.
        num_examples, batch_examples: examples of the micro-batch and of its whole batch.
        structure: how `tensors` nest at the cut (`stages.flatten`).
        target_structure: how `targets` nest.
    """

    step: int
    index: int
    count: int
    num_examples: int
    batch_examples: int
    tensors: tuple[EncodedTensor, ...]
    structure: str
    targets: tuple[EncodedTensor, ...]
    target_structure: str


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What comes back: the gradient of the *batch's* mean loss by each tensor of the activation.

    Tensors are those of the activation in order; None where one needs no gradient (whole numbers, or not used).
    `loss` is the micro-batch's own mean loss; `server_s` seconds of work on the service's device.
    """

    step: int
    index: int
    loss: float
    server_s: float
    tensors: tuple[EncodedTensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class SessionEnd:
    """What the service has trained: both halves must agree."""

    num_steps: int
    num_examples: int


@dataclass(frozen=True, kw_only=True)
class LinkStatistics:
    """What a channel has seen of its link. Rates in bytes per second and one-way latency, None where not measured."""

    bytes_up: int = 0
    bytes_down: int = 0
    num_reconnects: int = 0
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    latency_s: float | None = None


class Channel(ABC):
    """The device's end of one session. Used by one thread; `close` may be called by any.

    Each implementation passes tests/gpu_runtime/pipeline/test_channel.py.
    """

    @abstractmethod
    def open(self, spec: SessionSpec) -> None:
        """Begin the session.

        Raises:
            LinkError: the service cannot be reached in time.
            RefusedError: the service does not want the session.
        """

    @abstractmethod
    def send(self, activation: Activation) -> None:
        """Queue a micro-batch. Returns at once unless the queue is full; its buffers must not change any more.

        Raises:
            SplitError: the session has failed.
        """

    @abstractmethod
    def receive(self) -> Gradient:
        """The next gradient, in the order of the micro-batches; waits for it.

        Raises:
            SplitError: the session has failed, or a deadline has passed.
        """

    @abstractmethod
    def finish(self, end: SessionEnd) -> None:
        """All steps are done: have the service keep its half for the strategy.

        Raises:
            SplitError: the service has done something else, or cannot be reached.
        """

    @abstractmethod
    def close(self) -> None:
        """Let everything go. A session not finished is abandoned by the service. Waiting calls raise LinkError."""

    @property
    @abstractmethod
    def statistics(self) -> LinkStatistics:
        """Of the session so far."""


class StageSession(ABC):
    """The service's half of one session. Used by one thread at a time."""

    @abstractmethod
    def train(self, activation: Activation) -> Gradient:
        """Forward, loss and backward of a micro-batch, and the optimiser's step after the last one of a step.

        Raises:
            SplitError: it does not follow the one before, or cannot be trained on. The session is lost.
        """

    @abstractmethod
    def finish(self, end: SessionEnd) -> SessionEnd:
        """Keep the trained half for collection, and say what it has trained.

        Raises:
            SplitError: the device has counted something else.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Let everything go. Called when the session failed or was given up; harmless after `finish`."""


class StageHost(ABC):
    """What serves sessions: holds the start weights of the round's server stages, and what became of them."""

    @abstractmethod
    def open(self, spec: SessionSpec) -> StageSession:
        """A new session; one of the same key that is not finished is abandoned.

        Raises:
            RefusedError: an unknown round or task, or a plan that cannot be followed.
        """
