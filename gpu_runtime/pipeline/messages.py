"""The values of `session.py` as frames, and back. What comes off the wire is checked here before anyone sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_runtime.contracts import ENCODINGS, one_line
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.encoding import EncodedTensor, EncodingError, check
from gpu_runtime.pipeline.frames import Buffer, Frame, Message, pieces
from gpu_runtime.pipeline.session import (
    Activation,
    Gradient,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionKey,
    SessionSpec,
    SplitError,
)

MAX_NAME = 200
MAX_MICRO_BATCHES = 1 << 16
_FAILURES: dict[str, type[SplitError]] = {"refused": RefusedError, "protocol": ProtocolError, "split": SplitError}


def activation_frames(activation: Activation) -> list[Frame]:
    """A micro-batch as `ClientFrame`s."""
    header = pb.Activation(
        count=activation.count,
        num_examples=activation.num_examples,
        batch_examples=activation.batch_examples,
        tensors=tensor_headers(activation.tensors),
        structure=activation.structure,
        targets=tensor_headers(activation.targets),
        target_structure=activation.target_structure,
    )
    buffers = tensor_buffers([*activation.tensors, *activation.targets])
    frames = []
    for piece, parts in pieces(buffers, activation.step, activation.index):
        if not piece.number:
            piece.activation.CopyFrom(header)
        frames.append(Frame(pb.ClientFrame(piece=piece), parts))
    return frames


def read_activation(message: Message) -> Activation:
    """Inverse of `activation_frames`, put together.

    Raises:
        ProtocolError: counts or tensors that do not agree.
    """
    header: pb.Activation = message.header
    if not (message.step >= 0 and 0 <= message.index < header.count):
        raise ProtocolError(f"micro-batch {message.index} of {header.count} in step {message.step}")
    if not 1 <= header.num_examples <= header.batch_examples:
        raise ProtocolError(f"{header.num_examples} examples of a batch of {header.batch_examples}")
    tensors = read_tensors([*header.tensors, *header.targets], message.payload)
    if any(tensor is None for tensor in tensors):
        raise ProtocolError("an activation lacks a tensor")
    present = [tensor for tensor in tensors if tensor is not None]
    return Activation(
        step=message.step,
        index=message.index,
        count=header.count,
        num_examples=header.num_examples,
        batch_examples=header.batch_examples,
        tensors=tuple(present[: len(header.tensors)]),
        structure=header.structure,
        targets=tuple(present[len(header.tensors) :]),
        target_structure=header.target_structure,
    )


def gradient_frames(gradient: Gradient, arrived_s: float, queued_s: float, held_up: bool) -> list[Frame]:
    """A gradient as `ServerFrame`s; for the times see split.proto."""
    header = pb.Gradient(
        loss=gradient.loss,
        server_s=gradient.server_s,
        tensors=tensor_headers(gradient.tensors),
        arrived_s=arrived_s,
        queued_s=queued_s,
        held_up=held_up,
    )
    frames = []
    for piece, parts in pieces(tensor_buffers(gradient.tensors), gradient.step, gradient.index):
        if not piece.number:
            piece.gradient.CopyFrom(header)
        frames.append(Frame(pb.ServerFrame(piece=piece), parts))
    return frames


def read_gradient(message: Message) -> Gradient:
    """Inverse of `gradient_frames`, put together.

    Raises:
        ProtocolError: numbers or tensors that cannot be.
    """
    header: pb.Gradient = message.header
    if not (math.isfinite(header.loss) and math.isfinite(header.server_s)):
        raise ProtocolError(f"micro-batch ({message.step}, {message.index}) came back with loss {header.loss}")
    return Gradient(
        step=message.step,
        index=message.index,
        loss=header.loss,
        server_s=header.server_s,
        tensors=read_tensors(header.tensors, message.payload),
    )


def spec_message(spec: SessionSpec) -> pb.SessionSpec:
    return pb.SessionSpec(
        key=key_message(spec.key),
        split_point=spec.split_point,
        micro_batches=spec.micro_batches,
        encoding=spec.encoding,
        num_examples=spec.num_examples,
        batch_size=spec.batch_size,
        seed=spec.seed,
        learning_rate=spec.learning_rate,
        proximal_mu=spec.proximal_mu,
    )


def read_spec(message: pb.SessionSpec) -> SessionSpec:
    """Raises RefusedError where a value cannot be."""
    learning_rate = message.learning_rate if message.HasField("learning_rate") else None
    if not 1 <= message.micro_batches <= MAX_MICRO_BATCHES:
        raise RefusedError(f"{message.micro_batches} micro-batches a step; at most {MAX_MICRO_BATCHES} are possible")
    if message.encoding not in ENCODINGS:
        raise RefusedError(f"unknown encoding {message.encoding!r}"[:MAX_NAME])
    if min(message.split_point, message.num_examples, message.batch_size - 1) < 0:
        raise RefusedError("a split point, number of examples or batch size below 0")
    if not (math.isfinite(learning_rate or 0.0) and math.isfinite(message.proximal_mu)):
        raise RefusedError("a learning rate or proximal mu that is not finite")
    return SessionSpec(
        key=read_key(message.key),
        split_point=message.split_point,
        micro_batches=message.micro_batches,
        encoding=message.encoding,
        num_examples=message.num_examples,
        batch_size=message.batch_size,
        seed=message.seed,
        learning_rate=learning_rate,
        proximal_mu=message.proximal_mu,
    )


def key_message(key: SessionKey) -> pb.SessionKey:
    return pb.SessionKey(
        run=key.run, server_round=key.server_round, attempt=key.attempt, client=key.client, task=key.task
    )


def read_key(message: pb.SessionKey) -> SessionKey:
    """Raises RefusedError where a name is too long."""
    if max(map(len, (message.run, message.client, message.task))) > MAX_NAME:
        raise RefusedError(f"a name of more than {MAX_NAME} characters")
    return SessionKey(
        run=message.run,
        server_round=message.server_round,
        attempt=message.attempt,
        client=message.client,
        task=message.task,
    )


def end_message(end: SessionEnd) -> pb.SessionEnd:
    return pb.SessionEnd(num_steps=end.num_steps, num_examples=end.num_examples)


def read_end(message: pb.SessionEnd) -> SessionEnd:
    return SessionEnd(num_steps=message.num_steps, num_examples=message.num_examples)


def failure_message(error: SplitError) -> pb.Failure:
    """An error as such: its kind and its text."""
    kind = next((kind for kind, cls in _FAILURES.items() if isinstance(error, cls)), "split")
    return pb.Failure(kind=kind, text=one_line(error))


def read_failure(message: pb.Failure) -> SplitError:
    return _FAILURES.get(message.kind, SplitError)(one_line(message.text))


def tensor_headers(tensors: Iterable[EncodedTensor | None]) -> list[pb.Tensor]:
    return [
        pb.Tensor(absent=True)
        if tensor is None
        else pb.Tensor(
            encoding=tensor.encoding,
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_bytes=len(tensor.data),
            scale_bytes=len(tensor.scales),
        )
        for tensor in tensors
    ]


def tensor_buffers(tensors: Iterable[EncodedTensor | None]) -> list[Buffer]:
    return [buffer for tensor in tensors if tensor is not None for buffer in (tensor.data, tensor.scales)]


def read_tensors(headers: Sequence[Any], payload: Buffer) -> tuple[EncodedTensor | None, ...]:
    """The tensors that `payload` holds one after the other, as views of it; None where one is absent.

    Their bytes are known to add up (`Assembler`).

    Raises:
        ProtocolError: a tensor whose type, shape and bytes do not agree.
    """
    view, position = memoryview(payload), 0
    tensors: list[EncodedTensor | None] = []
    for header in headers:
        end = position + header.data_bytes
        after = end + header.scale_bytes
        if header.absent and after == position:
            tensors.append(None)
            continue
        tensor = EncodedTensor(
            encoding=header.encoding,
            dtype=header.dtype,
            shape=tuple(header.shape),
            data=view[position:end],
            scales=view[end:after],
        )
        try:
            check(tensor)
        except EncodingError as error:
            raise ProtocolError(str(error)) from None
        tensors.append(tensor)
        position = after
    return tuple(tensors)
