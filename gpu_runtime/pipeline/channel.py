"""The device's end of a session over gRPC: a stream that may break and is taken up again where it was.

A thread connects and reads; one of gRPC's pulls what is to be sent. Both, and the caller, meet under a condition.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from gpu_runtime.contracts import one_line
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.frames import Assembler, Frame, Malformed
from gpu_runtime.pipeline.link import EmulatedLink
from gpu_runtime.pipeline.messages import (
    activation_frames,
    end_message,
    read_end,
    read_failure,
    read_gradient,
    spec_message,
)
from gpu_runtime.pipeline.rates import RateEstimate, probe_link
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    LinkError,
    LinkStatistics,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionSpec,
    SplitError,
)
from gpu_runtime.pipeline.wire import connect, train_call

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_GOODBYE_S = 0.5
# Answers of gRPC itself that trying again does not change.
_REFUSALS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the split service is full",
    grpc.StatusCode.UNIMPLEMENTED: "no split service answers there",
    grpc.StatusCode.UNAUTHENTICATED: "the split service does not let us in",
    grpc.StatusCode.PERMISSION_DENIED: "the split service does not let us in",
}


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a channel waits: for a welcome, for a sign of life, for a broken link to come back."""

    connect_s: float = 15.0
    message_s: float = 60.0
    resume_s: float = 30.0


@dataclass(slots=True)
class _Queued:
    """A micro-batch from `send` until its gradient is there."""

    place: tuple[int, int]
    frames: list[Frame]
    num_bytes: int
    queued_s: float
    due_s: float


class _Stream:
    """One attempt at a connection."""

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.alive_s = now_s
        self.assembler = Assembler("gradient")
        self.call: Any = None
        self.welcomed = False
        self.dead = False
        self.cut = ""
        self.finish_sent = False


class GrpcChannel(Channel):
    """A session with a `SplitServer`.

    Args:
        address: "host:port".
        token: what the service wants to hear.
        certificate: PEM of the authority that signed the service's certificate; empty for a plain connection.
        deadlines: how long to wait.
        link: the slower link to act out, shared by all channels of a device; None for the link as it is.
        queue_bound: micro-batches that may wait to be sent; 0: as many as a step has.
        probe: whether `open` measures the link (`rates.probe_link`).
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        certificate: str = "",
        deadlines: Deadlines | None = None,
        link: EmulatedLink | None = None,
        queue_bound: int = 0,
        probe: bool = True,
    ) -> None:
        self._address = address
        self._token = token
        self._certificate = certificate
        self._deadlines = deadlines or Deadlines()
        self._link = link
        self._queue_bound = queue_bound
        self._probe = probe
        self._nonce = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._spec: SessionSpec | None = None
        self._stream: _Stream | None = None
        self._thread: threading.Thread | None = None
        self._queued: deque[_Queued] = deque()
        self._num_gradients = 0
        self._num_sent = 0
        self._received: deque[tuple[float, Gradient]] = deque()
        self._pings: deque[tuple[float, Frame]] = deque()
        self._pongs: dict[int, float] = {}
        self._num_pings = 0
        self._welcomed_once = False
        self._broken_since_s: float | None = None
        self._last_fault = "no answer"
        self._num_silences = 0
        self._finishing: SessionEnd | None = None
        self._done = False
        self._closed = False
        self._failure: SplitError | None = None
        self._bytes_up = self._bytes_down = self._num_reconnects = 0
        self._uplink, self._downlink = RateEstimate(), RateEstimate()
        self._latency_s: float | None = None

    # ------------------------------------------------------------------------------------------------------- the caller

    def open(self, spec: SessionSpec) -> None:
        if self._thread is not None:
            raise ProtocolError("a channel is opened once")
        with self._changed:
            self._check()
            self._spec = spec
            self._broken_since_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=f"split-link-{spec.key.task}", daemon=True)
            self._thread.start()
            self._wait(lambda: self._welcomed_once)
        if self._probe:
            probed = probe_link(self._ping)
            with self._changed:
                self._latency_s = probed.latency_s
                self._uplink.probed = probed.uplink_bytes_per_s
                self._downlink.probed = probed.downlink_bytes_per_s

    def send(self, activation: Activation) -> None:
        frames = activation_frames(activation)
        num_bytes = sum(frame.num_bytes for frame in frames)
        with self._changed:
            spec = self._open_spec()
            bound = self._queue_bound or spec.micro_batches
            self._wait(lambda: self._num_gradients + len(self._queued) - self._num_sent < bound)
            now_s = time.monotonic()
            due_s = self._link.up(num_bytes) if self._link else now_s
            if not self._queued and self._stream is not None:
                self._stream.alive_s = max(now_s, self._stream.alive_s)
            place = (activation.step, activation.index)
            self._queued.append(_Queued(place, frames, num_bytes, now_s, due_s))
            self._changed.notify_all()

    def receive(self) -> Gradient:
        with self._changed:
            self._open_spec()
            if not self._received and not self._queued:
                raise ProtocolError("no micro-batch is under way")
            self._wait(lambda: bool(self._received))
            due_s, gradient = self._received[0]
            while (left_s := due_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                self._check()
            self._received.popleft()
            return gradient

    def finish(self, end: SessionEnd) -> None:
        with self._changed:
            self._open_spec()
            if self._queued or self._received:
                raise ProtocolError("the session ends in the middle of a step")
            self._finishing = end
            if self._stream is not None:
                self._stream.alive_s = time.monotonic()
            self._changed.notify_all()
            self._wait(lambda: self._done)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._failure = self._failure or LinkError("the channel is closed")
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_GOODBYE_S)
        while thread.is_alive():
            with self._changed:
                self._cut("the channel is closed")
            thread.join(_GOODBYE_S)

    @property
    def statistics(self) -> LinkStatistics:
        with self._changed:
            return LinkStatistics(
                bytes_up=self._bytes_up,
                bytes_down=self._bytes_down,
                num_reconnects=self._num_reconnects,
                uplink_bytes_per_s=self._uplink.bytes_per_s,
                downlink_bytes_per_s=self._downlink.bytes_per_s,
                latency_s=self._latency_s,
            )

    def _ping(self, bytes_up: int, bytes_down: int) -> float | None:
        """Seconds of a ping there and back; None when its stream broke."""
        with self._changed:
            stream = self._stream
            self._num_pings += 1
            number = self._num_pings
            padding = (bytes(bytes_up),) if bytes_up else ()
            frame = Frame(pb.ClientFrame(ping=pb.Ping(number=number, reply_bytes=bytes_down)), padding)
            queued_s = time.monotonic()
            self._pings.append((self._link.up(frame.num_bytes) if self._link else queued_s, frame))
            self._changed.notify_all()
            self._wait(lambda: number in self._pongs or self._stream is not stream)
            self._pings.clear()
            arrived_s = self._pongs.pop(number, None)
            if arrived_s is None:
                return None
            while (left_s := arrived_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                self._check()
            return arrived_s - queued_s

    # ------------------------------------------------------------------------------------- waiting, under the condition

    def _open_spec(self) -> SessionSpec:
        self._check()
        if self._spec is None or not self._welcomed_once:
            raise ProtocolError("the channel is not open")
        return self._spec

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready`, watching the deadlines: no wait is without end."""
        self._check()
        while not ready():
            self._changed.wait(min(5.0, max(0.0, self._watch(time.monotonic()))))
            self._check()

    def _watch(self, now_s: float) -> float:
        """Act on deadlines that have passed; seconds until the next one."""
        limits, stream = self._deadlines, self._stream
        if self._broken_since_s is not None:
            patience_s = limits.resume_s if self._welcomed_once else limits.connect_s
            left_s = self._broken_since_s + patience_s - now_s
            if left_s <= 0:
                self._fail(LinkError(f"{self._address} cannot be reached within {patience_s:g} s: {self._last_fault}"))
                self._cut("out of time")
            elif stream is not None and now_s - stream.began_s > limits.connect_s:
                self._cut(f"no welcome within {limits.connect_s:g} s")
            return left_s
        if stream is None:
            return 0.1
        left_s = stream.alive_s + limits.message_s - now_s
        if left_s <= 0 and not stream.cut:
            self._num_silences += 1
            fault = f"{self._address} has not answered for {limits.message_s:g} s"
            if self._num_silences > 1:
                self._fail(LinkError(fault))
            self._cut(fault)
        return max(left_s, 0.1)

    def _fail(self, error: SplitError) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    def _cut(self, why: str) -> None:
        stream = self._stream
        if stream is not None and not stream.dead:
            stream.cut = stream.cut or why
            stream.dead = True
            if stream.call is not None:
                stream.call.cancel()
            self._changed.notify_all()

    # ------------------------------------------------------------------------------- the thread that connects and reads

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                if self._failure is not None or self._done:
                    return
                stream = self._stream = _Stream(time.monotonic())
            channel = None
            try:
                channel = connect(self._address, self._certificate)
                stream.call = train_call(channel)(self._outgoing(stream))
                for frame in stream.call:
                    self._incoming(stream, frame)
                fault = "the connection was closed"
            except grpc.RpcError as error:
                fault = self._fault_of(error, stream)
            except SplitError as error:
                with self._changed:
                    self._fail(error)
                fault = str(error)
            except Exception as error:
                with self._changed:
                    self._fail(LinkError(one_line(error)))
                fault = str(error)
            finally:
                with self._changed:
                    stream.dead = True
                    self._changed.notify_all()
                if channel is not None:
                    channel.close()
            with self._changed:
                if self._failure is not None or self._done:
                    return
                self._last_fault = stream.cut or fault
                now_s = time.monotonic()
                if self._broken_since_s is None:
                    self._broken_since_s = now_s
                    pause_s = _FIRST_PAUSE_S
                self._uplink.interrupt()
                self._downlink.interrupt()
                self._watch(now_s)
                # Others notify of what does not concern this pause: only an end of the channel does.
                until_s = now_s + pause_s
                while self._failure is None and (left_s := until_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                self._watch(time.monotonic())
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _fault_of(self, error: Any, stream: _Stream) -> str:
        """What broke the stream. Refusals of gRPC itself end the session."""
        code, details = error.code(), one_line(error.details() or "")
        if code in _REFUSALS and not stream.cut:
            with self._changed:
                self._fail(RefusedError(f"{_REFUSALS[code]}: {details}"))
        return f"{code.name}: {details}"

    def _incoming(self, stream: _Stream, frame: Frame | Malformed) -> None:
        if isinstance(frame, Malformed):
            raise ProtocolError(frame.text)
        now_s = time.monotonic()
        kind = frame.message.WhichOneof("kind")
        with self._changed:
            stream.alive_s = max(stream.alive_s, now_s)
            num_bytes = frame.num_bytes
            self._bytes_down += num_bytes
            if kind == "failure":
                raise read_failure(frame.message.failure)
            if kind == "welcome":
                self._welcome(stream, frame.message.welcome.num_micro_batches)
            elif not stream.welcomed:
                raise ProtocolError("the service's first frame must be a Welcome")
            elif kind == "piece":
                self._piece(stream, frame, now_s)
            elif kind == "pong":
                self._pongs[frame.message.pong.number] = self._link.down(num_bytes) if self._link else now_s
            elif kind == "done":
                theirs = read_end(frame.message.done)
                if theirs != self._finishing:
                    raise ProtocolError(f"the device has trained {self._finishing}, the service {theirs}")
                self._done = True
            self._changed.notify_all()

    def _welcome(self, stream: _Stream, num_micro_batches: int) -> None:
        if stream.welcomed or not 0 <= num_micro_batches - self._num_gradients <= len(self._queued):
            raise ProtocolError(f"the service says that it has {num_micro_batches} micro-batches")
        stream.welcomed = True
        self._num_sent = num_micro_batches
        self._num_reconnects += self._welcomed_once
        self._welcomed_once = True
        self._broken_since_s = None

    def _piece(self, stream: _Stream, frame: Frame, now_s: float) -> None:
        message = stream.assembler.add(frame.message.piece, frame.payload)
        if message is None:
            return
        if not self._queued or self._queued[0].place != (message.step, message.index):
            raise ProtocolError(f"the gradient of micro-batch {message.index} of step {message.step} was not due")
        if self._num_gradients >= self._num_sent:
            raise ProtocolError("a gradient of a micro-batch that was not sent")
        gradient = read_gradient(message)
        sent = self._queued.popleft()
        self._num_gradients += 1
        self._num_silences = 0
        num_bytes = len(message.payload)
        due_s = self._link.down(num_bytes) if self._link else now_s
        times = message.header
        if times.held_up:
            self._uplink.interrupt()
        self._uplink.observe(sent.queued_s, times.arrived_s, sent.num_bytes)
        self._downlink.observe(times.queued_s, due_s, num_bytes)
        self._received.append((due_s, gradient))

    # -------------------------------------------------------------------------------------------- gRPC's sending thread

    def _outgoing(self, stream: _Stream) -> Iterator[Frame]:
        """What goes out over `stream`. An emulated link's delay is waited for here."""
        assert self._spec is not None
        hello = pb.Hello(
            token=self._token,
            nonce=self._nonce,
            spec=spec_message(self._spec),
            num_gradients=self._num_gradients,
            resumes=self._welcomed_once,
        )
        yield Frame(pb.ClientFrame(hello=hello))
        while True:
            with self._changed:
                frames = self._next(stream)
            if frames is None:
                return
            for frame in frames:
                with self._changed:
                    stream.alive_s = max(stream.alive_s, time.monotonic())
                    self._bytes_up += frame.num_bytes
                yield frame
                if stream.dead:
                    return

    def _next(self, stream: _Stream) -> list[Frame] | None:
        """The next message once it is due; None at the end of the stream."""
        while not stream.dead:
            if self._closed and not self._done:
                self._done = True
                return [Frame(pb.ClientFrame(abandon=pb.Abandon()))]
            if self._failure is not None or self._done:
                return None
            due_s, take = self._ready(stream)
            if take is None:
                self._changed.wait()
                continue
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                return take()
            stream.alive_s = max(stream.alive_s, due_s)
            self._changed.wait(left_s)
        return None

    def _ready(self, stream: _Stream) -> tuple[float, Callable[[], list[Frame]] | None]:
        """When the next message is due, and what takes it; no such thing while there is nothing to send."""
        if not stream.welcomed:
            return math.inf, None
        if self._pings:
            return self._pings[0][0], lambda: [self._pings.popleft()[1]]
        position = self._num_sent - self._num_gradients
        if position < len(self._queued):
            queued = self._queued[position]

            def take() -> list[Frame]:
                self._num_sent += 1
                self._changed.notify_all()
                return queued.frames

            return queued.due_s, take
        if self._finishing is not None and not stream.finish_sent:

            def finish() -> list[Frame]:
                stream.finish_sent = True
                assert self._finishing is not None
                return [Frame(pb.ClientFrame(finish=end_message(self._finishing)))]

            return 0.0, finish
        return math.inf, None
