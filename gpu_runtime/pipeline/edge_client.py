"""EdgeClient: calls the admin service of an edge server (`admin.admin_handler`) as if its store were here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from gpu_runtime.contracts import ContractError, HeldTask, Profile, from_json, one_line, to_json
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.admin import PreparedStages, TrainedStage
from gpu_runtime.pipeline.bundles import arrays_of, assemble, bundle_frames, check_frame
from gpu_runtime.pipeline.frames import Frame, write
from gpu_runtime.pipeline.messages import key_message, read_end
from gpu_runtime.pipeline.session import LinkError, ProtocolError, SessionKey
from gpu_runtime.pipeline.wire import ADMIN_SERVICE, connect, read_admin_frame

MEASURE_DEADLINE_S = 1800.0


class EdgeClient:
    """A `StageStore` on another machine. Any number of threads may call it.

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
        self._measure = call(self._channel.unary_unary, "Measure")

    def prepare(self, stages: PreparedStages) -> None:
        """See `StageStore.prepare`. Raises EncodingError for arrays that cannot be sent."""
        header = pb.Bundle(
            run=stages.run,
            server_round=stages.server_round,
            task=stages.task,
            reference=stages.reference,
            spec=stages.spec,
        )
        frames = bundle_frames(header, stages.arrays, self._token)
        with _link_errors():
            check_frame(self._prepare(iter(frames), timeout=self._deadline_s))

    def collect(self, key: SessionKey) -> TrainedStage:
        """See `StageStore.collect`."""
        request = Frame(pb.AdminFrame(token=self._token, collect=key_message(key)))
        with _link_errors():
            message = assemble(self._collect(request, timeout=self._deadline_s))
        return TrainedStage(arrays=arrays_of(message), end=read_end(message.header.end))

    def release(self, run: str, server_round: int) -> None:
        """See `StageStore.release`."""
        round_id = pb.RoundId(run=run, server_round=server_round)
        request = Frame(pb.AdminFrame(token=self._token, release=round_id))
        with _link_errors():
            check_frame(self._release(request, timeout=self._deadline_s))

    def measure(self, held: Sequence[HeldTask], deadline_s: float = MEASURE_DEADLINE_S) -> Profile:
        """See `StageStore.measure`. Takes seconds for each task, so its deadline is its own."""
        tasks = [to_json(each) for each in held]
        request = Frame(pb.AdminFrame(token=self._token, measure=pb.Measure(tasks=tasks)))
        with _link_errors():
            answer = self._measure(request, timeout=deadline_s)
        check_frame(answer)
        try:
            return from_json(Profile, answer.message.measured.profile)
        except ContractError as error:
            raise ProtocolError(f"the edge server sent a bad profile: {error}") from None

    def close(self) -> None:
        """Calls under way fail."""
        self._channel.close()


@contextmanager
def _link_errors() -> Iterator[None]:
    """gRPC's errors as LinkError."""
    try:
        yield
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        raise LinkError(f"the edge server does not answer: {code.name}: {one_line(error.details() or '')}") from None
