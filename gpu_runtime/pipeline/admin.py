"""An edge server's work for a strategy elsewhere: start weights in, trained halves out, rounds forgotten, over gRPC.

`admin_handler` goes into a `service.SplitServer`; `edge_client.EdgeClient` calls it. What holds the stages is a
`StageStore`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from gpu_runtime.contracts import ContractError, DataSpec, HeldTask, Profile, from_json, to_json
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.bundles import arrays_of, assemble, bundle_frames
from gpu_runtime.pipeline.encoding import EncodingError
from gpu_runtime.pipeline.frames import Frame, Malformed, write
from gpu_runtime.pipeline.messages import end_message, failure_message, read_key
from gpu_runtime.pipeline.session import ProtocolError, RefusedError, SessionEnd, SessionKey, SplitError
from gpu_runtime.pipeline.wire import ADMIN_SERVICE, WRONG_TOKEN, read_admin_frame, same_token
from gpu_runtime.work import one_line as error_line

_MAX_DEADLINE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """The `spec` of `PreparedStages`, as `contracts.to_json` writes it.

    Attributes:
        attempt: at the round; another one takes the place of all that is there of the round.
        data: what the task is built with.
        keep_s: seconds after which the round may be forgotten, should nobody release it.
    """

    attempt: int
    data: DataSpec
    keep_s: float


@dataclass(frozen=True, kw_only=True)
class PreparedStages:
    """What the server stages of one task of a round start from.

    `reference` names the task in the registry, `spec` is the JSON text of a `StageSpec`; `arrays` are the start weights
    by parameter name.
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

    @abstractmethod
    def measure(self, held: Sequence[HeldTask]) -> Profile:
        """What training these tasks costs on the service's device. Those that cannot be measured are in `errors`."""


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
            message = assemble(_chain(first, requests))
            header: pb.Bundle = message.header
            stages = PreparedStages(
                run=header.run,
                server_round=header.server_round,
                task=header.task,
                reference=header.reference,
                spec=header.spec,
                arrays=arrays_of(message),
            )
            store.prepare(stages)
            return Frame(pb.AdminFrame())

        answer: Frame = _answered(context, work)
        return answer

    def collect(request: Frame | Malformed, context: grpc.ServicerContext) -> Iterator[Frame]:
        def work() -> list[Frame]:
            stage = store.collect(read_key(_authorised(request, token).message.collect))
            return bundle_frames(pb.Bundle(end=end_message(stage.end)), stage.arrays)

        answer = _answered(context, work)
        yield from answer if isinstance(answer, list) else [answer]

    def release(request: Frame | Malformed, context: grpc.ServicerContext) -> Frame:
        def work() -> Frame:
            round_id = _authorised(request, token).message.release
            store.release(round_id.run, round_id.server_round)
            return Frame(pb.AdminFrame())

        answer: Frame = _answered(context, work)
        return answer

    def measure(request: Frame | Malformed, context: grpc.ServicerContext) -> Frame:
        def work() -> Frame:
            texts = _authorised(request, token).message.measure.tasks
            try:
                held = [from_json(HeldTask, text) for text in texts]
            except ContractError as error:
                raise ProtocolError(str(error)) from None
            return Frame(pb.AdminFrame(measured=pb.Measured(profile=to_json(store.measure(held)))))

        answer: Frame = _answered(context, work)
        return answer

    codec = {"request_deserializer": read_admin_frame, "response_serializer": write}
    handlers = {
        "Prepare": grpc.stream_unary_rpc_method_handler(prepare, **codec),
        "Collect": grpc.unary_stream_rpc_method_handler(collect, **codec),
        "Release": grpc.unary_unary_rpc_method_handler(release, **codec),
        "Measure": grpc.unary_unary_rpc_method_handler(measure, **codec),
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
        raise RefusedError(WRONG_TOKEN)
    return frame


def _chain(first: Frame, rest: Iterable[Frame | Malformed]) -> Iterator[Frame | Malformed]:
    yield first
    yield from rest
