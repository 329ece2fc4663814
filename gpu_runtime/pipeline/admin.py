"""An edge server's work for a strategy elsewhere: start weights in, trained halves out, rounds forgotten, over gRPC.

`admin_handler` goes into a `service.SplitServer`; `EdgeClient` calls it. What holds the stages is a `StageStore`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import torch

from gpu_runtime.contracts import one_line
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.encoding import EncodingError, decode, encode
from gpu_runtime.pipeline.frames import Assembler, Frame, Malformed, Message, pieces, write
from gpu_runtime.pipeline.messages import (
    end_message,
    failure_message,
    key_message,
    read_end,
    read_failure,
    read_key,
    read_tensors,
    tensor_buffers,
    tensor_headers,
)
from gpu_runtime.pipeline.session import (
    LinkError,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionKey,
    SplitError,
)
from gpu_runtime.pipeline.wire import ADMIN_SERVICE, connect, read_admin_frame, same_token
from gpu_runtime.work import one_line as error_line

MAX_BUNDLE_BYTES = 2 << 30
_MAX_DEADLINE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class PreparedStages:
    """What the server stages of one task of a round start from.

    `reference` names the task in the registry, `spec` is JSON text that says how to build its model without data;
    `arrays` are the start weights by parameter name.
    """

    run: str
    server_round: int
    task: str
    reference: str
    spec: str
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TrainedStage:
    """The service's half of a model, by parameter name, and what it was trained on."""

    arrays: Mapping[str, np.ndarray]
    end: SessionEnd


class StageStore(ABC):
    """What holds start weights and trained halves. Called by several threads."""

    @abstractmethod
    def prepare(self, stages: PreparedStages) -> None:
        """Sessions of this round and task may come.

        Raises:
            RefusedError: stages that cannot be built.
        """

    @abstractmethod
    def collect(self, key: SessionKey) -> TrainedStage:
        """The half that a finished session has trained.

        Raises:
            RefusedError: there is none.
        """

    @abstractmethod
    def release(self, run: str, server_round: int) -> None:
        """Forget the round: its start weights, its sessions and what they trained. Harmless for unknown rounds."""


class EdgeClient:
    """A `StageStore` on another machine.

    Args:
        address: "host:port" of its service.
        token: the admin token.
        certificate: PEM of the authority that signed the service's certificate; empty for a plain connection.
        deadline_s: seconds a call may take.

    All calls raise LinkError when the service cannot be reached or does not answer in time, and what the store raises.
    """

    def __init__(self, address: str, token: str, *, certificate: str = "", deadline_s: float = 300.0) -> None:
        self._token = token
        self._deadline_s = deadline_s
        self._channel = connect(address, certificate)

        def call(kind: Callable[..., Any], name: str) -> Callable[..., Any]:
            made: Callable[..., Any] = kind(
                f"/{ADMIN_SERVICE}/{name}", request_serializer=write, response_deserializer=read_admin_frame
            )
            return made

        self._prepare = call(self._channel.stream_unary, "Prepare")
        self._collect = call(self._channel.unary_stream, "Collect")
        self._release = call(self._channel.unary_unary, "Release")

    def prepare(self, stages: PreparedStages) -> None:
        """See `StageStore.prepare`. Raises EncodingError for arrays that cannot be sent."""
        header = pb.Bundle(
            run=stages.run,
            server_round=stages.server_round,
            task=stages.task,
            reference=stages.reference,
            spec=stages.spec,
        )
        frames = _bundle_frames(header, stages.arrays, self._token)
        with _link_errors():
            _check(self._prepare(iter(frames), timeout=self._deadline_s))

    def collect(self, key: SessionKey) -> TrainedStage:
        """See `StageStore.collect`."""
        request = Frame(pb.AdminFrame(token=self._token, collect=key_message(key)))
        with _link_errors():
            message = _assemble(self._collect(request, timeout=self._deadline_s))
        return TrainedStage(arrays=_arrays_of(message), end=read_end(message.header.end))

    def release(self, run: str, server_round: int) -> None:
        """See `StageStore.release`."""
        round_id = pb.RoundId(run=run, server_round=server_round)
        request = Frame(pb.AdminFrame(token=self._token, release=round_id))
        with _link_errors():
            _check(self._release(request, timeout=self._deadline_s))

    def close(self) -> None:
        """Calls under way fail."""
        self._channel.close()


def admin_handler(store: StageStore, token: str, hello_s: float = 10.0) -> grpc.GenericRpcHandler:
    """The gRPC service that serves `store` to whoever has the token (not empty); `hello_s` as in `ServiceSettings`."""
    if not token:
        raise ValueError("an edge server needs an admin token")

    def prepare(requests: Iterator[Frame | Malformed], context: grpc.ServicerContext) -> Frame:
        def work() -> Frame:
            # Who has no token must not hold a thread until the deadline.
            silence = threading.Timer(hello_s, context.cancel)
            silence.start()
            try:
                first = _authorised(next(requests, Malformed("an empty stream")), token)
            finally:
                silence.cancel()
            message = _assemble(_chain(first, requests))
            header: pb.Bundle = message.header
            stages = PreparedStages(
                run=header.run,
                server_round=header.server_round,
                task=header.task,
                reference=header.reference,
                spec=header.spec,
                arrays=_arrays_of(message),
            )
            store.prepare(stages)
            return Frame(pb.AdminFrame())

        answer: Frame = _answered(context, work)
        return answer

    def collect(request: Frame | Malformed, context: grpc.ServicerContext) -> Iterator[Frame]:
        def work() -> list[Frame]:
            stage = store.collect(read_key(_authorised(request, token).message.collect))
            return _bundle_frames(pb.Bundle(end=end_message(stage.end)), stage.arrays)

        answer = _answered(context, work)
        yield from answer if isinstance(answer, list) else [answer]

    def release(request: Frame | Malformed, context: grpc.ServicerContext) -> Frame:
        def work() -> Frame:
            round_id = _authorised(request, token).message.release
            store.release(round_id.run, round_id.server_round)
            return Frame(pb.AdminFrame())

        answer: Frame = _answered(context, work)
        return answer

    codec = {"request_deserializer": read_admin_frame, "response_serializer": write}
    handlers = {
        "Prepare": grpc.stream_unary_rpc_method_handler(prepare, **codec),
        "Collect": grpc.unary_stream_rpc_method_handler(collect, **codec),
        "Release": grpc.unary_unary_rpc_method_handler(release, **codec),
    }
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers)


def _answered(context: grpc.ServicerContext, work: Callable[[], Any]) -> Any:
    """What `work` returns, or a frame that says why it failed."""
    try:
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > _MAX_DEADLINE_S:
            raise ProtocolError(f"a call needs a deadline of at most {_MAX_DEADLINE_S:g} s")
        return work()
    except SplitError as error:
        return Frame(pb.AdminFrame(failure=failure_message(error)))
    except EncodingError as error:
        return Frame(pb.AdminFrame(failure=failure_message(ProtocolError(str(error)))))
    except Exception as error:
        return Frame(pb.AdminFrame(failure=failure_message(SplitError(error_line(error)))))


def _authorised(frame: Frame | Malformed, token: str) -> Frame:
    if isinstance(frame, Malformed):
        raise ProtocolError(frame.text)
    if not same_token(frame.message.token, token):
        raise RefusedError("wrong token")
    return frame


def _chain(first: Frame, rest: Iterable[Frame | Malformed]) -> Iterator[Frame | Malformed]:
    yield first
    yield from rest


def _bundle_frames(header: pb.Bundle, arrays: Mapping[str, np.ndarray], token: str = "") -> list[Frame]:
    tensors = []
    for name, array in arrays.items():
        try:
            tensors.append(encode(torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)), "fp32"))
        except (EncodingError, TypeError) as error:
            raise EncodingError(f"array {name!r}: {error}") from None
    header.names.extend(arrays)
    header.tensors.extend(tensor_headers(tensors))
    frames = []
    for piece, parts in pieces(tensor_buffers(tensors)):
        if not piece.number:
            piece.bundle.CopyFrom(header)
        frames.append(Frame(pb.AdminFrame(token="" if piece.number else token, piece=piece), parts))
    return frames


def _assemble(frames: Iterable[Frame | Malformed]) -> Message:
    """Exactly one message."""
    assembler = Assembler("bundle", MAX_BUNDLE_BYTES)
    message = None
    for frame in frames:
        _check(frame)
        assert isinstance(frame, Frame)
        if message is not None or not frame.message.HasField("piece"):
            raise ProtocolError("a stream of arrays holds something else")
        message = assembler.add(frame.message.piece, frame.payload)
    if message is None:
        raise ProtocolError("a stream of arrays ends too early")
    return message


def _arrays_of(message: Message) -> dict[str, np.ndarray]:
    header: pb.Bundle = message.header
    tensors = read_tensors(header.tensors, message.payload)
    if len(header.names) != len(tensors) or len(set(header.names)) != len(tensors):
        raise ProtocolError(f"{len(tensors)} arrays with {len(set(header.names))} different names")
    arrays = {}
    for name, tensor in zip(header.names, tensors, strict=True):
        if tensor is None:
            raise ProtocolError(f"array {one_line(name)!r} is absent")
        try:
            arrays[name] = decode(tensor).numpy()
        except (EncodingError, TypeError) as error:
            raise ProtocolError(f"array {one_line(name)!r}: {error}") from None
    return arrays


def _check(frame: Frame | Malformed) -> None:
    if isinstance(frame, Malformed):
        raise ProtocolError(frame.text)
    if frame.message.HasField("failure"):
        raise read_failure(frame.message.failure)


@contextmanager
def _link_errors() -> Iterator[None]:
    """gRPC's errors as LinkError."""
    try:
        yield
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        raise LinkError(f"the edge server does not answer: {code.name}: {one_line(error.details() or '')}") from None
