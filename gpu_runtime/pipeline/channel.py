"""The device's end of a session over gRPC: a stream that may break and is taken up again where it was.

A thread connects and reads; one of gRPC's pulls what is to be sent. Both, and the caller, meet under a condition.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.connection import Connection
from gpu_runtime.pipeline.frames import Frame
from gpu_runtime.pipeline.ledger import Ledger, Sending
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
    SessionEnd,
    SessionSpec,
    SplitError,
)
from gpu_runtime.work import one_line as error_line

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_GOODBYE_S = 0.5
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a channel waits: for a welcome, for a sign of life, for a broken link to come back."""

    connect_s: float = 15.0
    message_s: float = 60.0
    resume_s: float = 30.0


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
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._ledger = Ledger()
        self._received: deque[tuple[float, Gradient]] = deque()
        self._pings: deque[Sending] = deque()
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
            bound = self._queue_bound or self._open_spec().micro_batches
            self._wait(lambda: self._ledger.num_unsent < bound)
            now_s = time.monotonic()
            due_s = self._link.up(num_bytes) if self._link else now_s
            if not self._ledger.num_under_way and self._connection is not None:
                self._connection.alive(now_s)
            self._ledger.add(Sending((activation.step, activation.index), frames, num_bytes, now_s, due_s))
            self._changed.notify_all()

    def receive(self) -> Gradient:
        with self._changed:
            self._open_spec()
            if not self._received and not self._ledger.num_under_way:
                raise ProtocolError("no micro-batch is under way")
            self._wait(lambda: bool(self._received))
            self._wait_until(self._received[0][0])
            return self._received.popleft()[1]

    def finish(self, end: SessionEnd) -> None:
        with self._changed:
            self._open_spec()
            if self._ledger.num_under_way or self._received:
                raise ProtocolError("the session ends in the middle of a step")
            self._finishing = end
            if self._connection is not None:
                self._connection.alive(time.monotonic())
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
        """Seconds of a ping there and back; None when its connection broke."""
        with self._changed:
            connection = self._connection
            self._num_pings += 1
            number = self._num_pings
            ping = pb.ClientFrame(ping=pb.Ping(number=number, reply_bytes=bytes_down))
            frame = Frame(ping, (bytes(bytes_up),) if bytes_up else ())
            queued_s = time.monotonic()
            due_s = self._link.up(frame.num_bytes) if self._link else queued_s
            self._pings.append(Sending((-1, number), (frame,), frame.num_bytes, queued_s, due_s))
            self._changed.notify_all()
            self._wait(lambda: number in self._pongs or self._connection is not connection)
            self._pings.clear()
            arrived_s = self._pongs.pop(number, None)
            if arrived_s is None:
                return None
            self._wait_until(arrived_s)
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
            self._changed.wait(min(_LONGEST_WAIT_S, max(0.0, self._watch(time.monotonic()))))
            self._check()

    def _wait_until(self, at_s: float) -> None:
        """Until an emulated link has delivered."""
        while (left_s := at_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
            self._check()

    def _watch(self, now_s: float) -> float:
        """Act on deadlines that have passed; seconds until the next one."""
        limits, connection = self._deadlines, self._connection
        if self._broken_since_s is not None:
            patience_s = limits.resume_s if self._welcomed_once else limits.connect_s
            left_s = self._broken_since_s + patience_s - now_s
            if left_s <= 0:
                self._fail(LinkError(f"{self._address} cannot be reached within {patience_s:g} s: {self._last_fault}"))
                self._cut("out of time")
            elif connection is not None and now_s - connection.began_s > limits.connect_s:
                self._cut(f"no welcome within {limits.connect_s:g} s")
            return left_s
        if connection is None or connection.dead:
            return 0.1
        left_s = connection.alive_s + limits.message_s - now_s
        if left_s <= 0:
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
        if self._connection is not None:
            self._connection.cut(why)
        self._changed.notify_all()

    # ------------------------------------------------------------------------------- the thread that connects and reads

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                if self._failure is not None or self._done:
                    return
                connection = self._connection = Connection(time.monotonic())
            failure: SplitError | None = None
            fault = "the connection was closed"
            try:
                outgoing = self._outgoing(connection)
                for frame in connection.frames(self._address, self._certificate, outgoing):
                    self._incoming(connection, frame)
            except LinkError as error:
                fault = str(error)
            except SplitError as error:
                failure = error
            except Exception as error:
                failure = LinkError(error_line(error))
            with self._changed:
                connection.dead = True
                if failure is not None:
                    self._fail(failure)
                self._changed.notify_all()
                if connection.welcomed:
                    pause_s = _FIRST_PAUSE_S
                self._pause(fault, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pause(self, fault: str, pause_s: float) -> None:
        """Between two connections, under the condition; out of time is out of time here too."""
        if self._failure is not None or self._done:
            return
        self._last_fault = fault
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        self._uplink.interrupt()
        self._downlink.interrupt()
        self._watch(now_s)
        # Others notify of what does not concern this pause: only an end of the channel does.
        until_s = now_s + pause_s
        while self._failure is None and (left_s := until_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
        self._watch(time.monotonic())

    def _incoming(self, connection: Connection, frame: Frame) -> None:
        now_s = time.monotonic()
        message, kind = frame.message, frame.message.WhichOneof("kind")
        num_bytes = frame.num_bytes
        with self._changed:
            connection.alive(now_s)
            self._bytes_down += num_bytes
            if kind == "failure":
                raise read_failure(message.failure)
            if connection.welcomed == (kind == "welcome"):
                raise ProtocolError("the service must say Welcome first, and once")
            if kind == "welcome":
                self._ledger.resume(message.welcome.num_micro_batches)
                connection.welcomed = True
                self._num_reconnects += self._welcomed_once
                self._welcomed_once = True
                self._broken_since_s = None
            elif kind == "piece":
                self._piece(connection, frame, now_s)
            elif kind == "pong":
                self._pongs[message.pong.number] = self._link.down(num_bytes) if self._link else now_s
            elif kind == "done":
                theirs = read_end(message.done)
                if theirs != self._finishing:
                    raise ProtocolError(f"the device has trained {self._finishing}, the service {theirs}")
                self._done = True
            self._changed.notify_all()

    def _piece(self, connection: Connection, frame: Frame, now_s: float) -> None:
        message = connection.assembler.add(frame.message.piece, frame.payload)
        if message is None:
            return
        gradient = read_gradient(message)
        sent = self._ledger.settle((gradient.step, gradient.index))
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

    def _outgoing(self, connection: Connection) -> Iterator[Frame]:
        """What goes out over a connection. The delay of an emulated link is waited for here."""
        assert self._spec is not None
        hello = pb.Hello(
            token=self._token,
            nonce=self._nonce,
            spec=spec_message(self._spec),
            num_gradients=self._ledger.num_gradients,
            resumes=self._welcomed_once,
        )
        yield Frame(pb.ClientFrame(hello=hello))
        while True:
            with self._changed:
                frames = self._next(connection)
            for frame in frames:
                with self._changed:
                    connection.alive(time.monotonic())
                    self._bytes_up += frame.num_bytes
                yield frame
                if connection.dead:
                    return
            if not frames:
                return

    def _next(self, connection: Connection) -> Sequence[Frame]:
        """The next message once it is due; nothing at the end of the connection."""
        while not connection.dead:
            if self._closed and not self._done:
                self._done = True
                return (Frame(pb.ClientFrame(abandon=pb.Abandon())),)
            if self._failure is not None or self._done:
                break
            ping = self._pings[0] if self._pings else None
            sending = (ping or self._ledger.next_unsent) if connection.welcomed else None
            if sending is not None:
                left_s = sending.due_s - time.monotonic()
                if left_s > 0:
                    connection.alive(sending.due_s)
                    self._changed.wait(left_s)
                    continue
                if ping is not None:
                    self._pings.popleft()
                else:
                    self._ledger.num_sent += 1
                    self._changed.notify_all()
                return sending.frames
            if connection.welcomed and self._finishing is not None and not connection.finish_sent:
                connection.finish_sent = True
                return (Frame(pb.ClientFrame(finish=end_message(self._finishing))),)
            self._changed.wait()
        return ()
