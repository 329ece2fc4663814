"""One connection of a channel to the split service, from the first attempt until it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from gpu_runtime.contracts import one_line
from gpu_runtime.pipeline.frames import Assembler, Frame, Malformed
from gpu_runtime.pipeline.session import LinkError, ProtocolError, RefusedError
from gpu_runtime.pipeline.wire import connect, train_call

# Answers of gRPC itself that trying again does not change.
_REFUSALS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the split service is full",
    grpc.StatusCode.UNIMPLEMENTED: "no split service answers there",
    grpc.StatusCode.UNAUTHENTICATED: "the split service does not let us in",
    grpc.StatusCode.PERMISSION_DENIED: "the split service does not let us in",
}


class Connection:
    """A stream and what is known of it.

    Attributes:
        began_s: when it was begun.
        alive_s: when something last moved on it, or will because an emulated link keeps it back until then.
        assembler: puts its gradients together.
        welcomed: whether the service has said Welcome.
        finish_sent: whether the end of the session has gone out on it.
        dead: nothing more may be sent on it.
    """

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.alive_s = now_s
        self.assembler = Assembler("gradient")
        self.welcomed = False
        self.finish_sent = False
        self.dead = False
        self._call: Any = None
        self._why = ""

    def alive(self, at_s: float) -> None:
        """Something moves at that time."""
        self.alive_s = max(self.alive_s, at_s)

    def frames(self, address: str, certificate: str, outgoing: Iterator[Frame]) -> Iterator[Frame]:
        """Connect, send what `outgoing` yields, and yield what comes, until the service ends the stream.

        Raises:
            LinkError: the connection cannot be made, has broken or was `cut`.
            RefusedError: gRPC itself is refused.
            ProtocolError: what came is no frame.
        """
        channel = connect(address, certificate)
        try:
            self._call = train_call(channel)(outgoing)
            if self.dead:
                self._call.cancel()
            for frame in self._call:
                if isinstance(frame, Malformed):
                    raise ProtocolError(frame.text)
                yield frame
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            details = one_line(error.details() or "")
            if code in _REFUSALS and not self._why:
                raise RefusedError(f"{_REFUSALS[code]}: {details}") from None
            raise LinkError(self._why or f"{code.name}: {details}") from None
        finally:
            self.dead = True
            channel.close()

    def cut(self, why: str) -> None:
        """Break it off, from any thread; `why` is what `frames` will say."""
        if not self.dead:
            self._why = why
            self.dead = True
            if self._call is not None:
                self._call.cancel()
