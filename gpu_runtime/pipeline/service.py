"""The split service: sessions of a StageHost, served over gRPC to whoever has the token.

Whatever one client does, the others go on: each stream has a thread that reads and one that writes, each session one
that trains (`served_session`).
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.frames import Frame, Malformed, write
from gpu_runtime.pipeline.messages import read_activation, read_end, read_spec
from gpu_runtime.pipeline.served_session import ServedSession, Stream, Superseded
from gpu_runtime.pipeline.session import (
    LinkError,
    ProtocolError,
    RefusedError,
    SessionKey,
    SessionSpec,
    SplitError,
    StageHost,
)
from gpu_runtime.pipeline.wire import (
    MAX_PADDING_BYTES,
    SERVER_OPTIONS,
    SERVICE,
    WRONG_TOKEN,
    read_client_frame,
    same_token,
)
from gpu_runtime.work import one_line

_LOG = logging.getLogger(__name__)
_PADDING = bytes(MAX_PADDING_BYTES)
_SPARE_STREAMS = 8
# Frames that a device may leave unread before it sends the next ping.
_MAX_WAITING = 1024


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Bounds of a split service.

    Attributes:
        max_sessions: sessions at a time; further ones are refused.
        queue_bound: micro-batches of a session that may wait to be trained.
        max_message_bytes: largest micro-batch.
        hello_s: seconds a connection has for saying who it is.
        message_s: seconds between two pieces of a message.
        idle_s: seconds a device may be silent when it is its turn, or leave a frame on its way untaken.
        resume_s: seconds that a session without connection is kept for.
    """

    max_sessions: int = 64
    queue_bound: int = 16
    max_message_bytes: int = 256 << 20
    hello_s: float = 10.0
    message_s: float = 120.0
    idle_s: float = 600.0
    resume_s: float = 60.0


class SplitServer:
    """Serves a `StageHost` until `close`.

    Args:
        host: what trains the sessions.
        token: what clients must know; not empty.
        address: "host:port" to listen on; port 0 takes a free one.
        certificate, key: PEM of the service's certificate chain and private key; None for plain connections.
        settings: bounds and deadlines.
        handlers: further gRPC services on the same port.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: StageHost,
        token: str,
        *,
        address: str = "127.0.0.1:0",
        certificate: bytes | None = None,
        key: bytes | None = None,
        settings: ServiceSettings | None = None,
        handlers: tuple[grpc.GenericRpcHandler, ...] = (),
    ) -> None:
        if not token:
            raise ValueError("a split service needs a token")
        self._host = host
        self._token = token
        self._settings = settings or ServiceSettings()
        self._lock = threading.Lock()
        self._sessions: dict[SessionKey, ServedSession] = {}
        self._streams: dict[Stream, threading.Thread] = {}
        self._closing = threading.Event()
        # A session that is resumed has two streams for a moment, and one that is refused has one too.
        num_streams = 2 * self._settings.max_sessions + _SPARE_STREAMS
        self._pool = ThreadPoolExecutor(num_streams, thread_name_prefix="split-stream")
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=num_streams)
        train = grpc.stream_stream_rpc_method_handler(
            self._train, request_deserializer=read_client_frame, response_serializer=write
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Train": train}), *handlers)
        )
        where, _, _ = address.rpartition(":")
        try:
            if certificate is None or key is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError:
            self._pool.shutdown()
            raise OSError(f"the split service cannot listen on {address}: {_why_not(address)}") from None
        self.port = port
        self.address = f"{where}:{port}"
        self._janitor = threading.Thread(target=self._clean_up, name="split-janitor", daemon=True)
        self._server.start()
        self._janitor.start()

    @property
    def num_sessions(self) -> int:
        """Sessions under way."""
        with self._lock:
            return sum(not session.over.is_set() for session in self._sessions.values())

    def close(self, timeout_s: float = 30.0) -> None:
        """Abandon all sessions, end all threads and wait for them: at most `timeout_s` each for work that hangs."""
        self._closing.set()
        with self._lock:
            sessions, streams = list(self._sessions.values()), dict(self._streams)
        for session in sessions:
            session.fail(LinkError("the split service is shutting down"))
        for stream in streams:
            stream.end()
        self._server.stop(grace=0.5).wait(timeout_s)
        for session in sessions:
            if not session.join(timeout_s):
                _LOG.warning("a split session of %s does not end", session.spec.key)
        for thread in streams.values():
            thread.join(timeout_s)
        self._janitor.join(timeout_s)
        self._pool.shutdown(wait=False)

    # ---------------------------------------------------------------------------------------------------------- streams

    def _train(self, requests: Iterator[Frame | Malformed], context: grpc.ServicerContext) -> Iterator[Frame]:
        """What gRPC calls for a stream; runs in one of its threads, which becomes the one that writes."""
        stream = Stream(self._settings.max_message_bytes, context.cancel)
        if not context.add_callback(stream.end):
            return
        thread = threading.Thread(target=self._read, args=(stream, requests), name="split-reader", daemon=True)
        with self._lock:
            self._streams[stream] = thread
        thread.start()
        try:
            deadline_s: float | None = self._settings.hello_s
            while True:
                try:
                    frame = stream.take(deadline_s)
                except queue.Empty:
                    if stream.session is None:
                        stream.fail(ProtocolError(f"no Hello within {self._settings.hello_s:g} s"))
                    deadline_s = None
                    continue
                if frame is None:
                    return
                yield frame
        finally:
            self._detach(stream)

    def _read(self, stream: Stream, requests: Iterator[Frame | Malformed]) -> None:
        try:
            for frame in requests:
                now_s = time.monotonic()
                stream.heard_s = now_s
                if isinstance(frame, Malformed):
                    raise ProtocolError(frame.text)
                self._handle(stream, frame, now_s)
        except Superseded:
            pass
        except SplitError as error:
            self._fail(stream, error)
        except grpc.RpcError:
            pass
        except Exception as error:
            # gRPC raises a bare Exception where a stream has broken.
            if type(error) is not Exception:
                _LOG.exception("reading a split stream failed")
                self._fail(stream, SplitError(one_line(error)))
        finally:
            # What has been queued still goes out; a session that has not ended waits for its device to come back.
            self._detach(stream)
            with self._lock:
                self._streams.pop(stream, None)
            stream.end()

    def _handle(self, stream: Stream, frame: Frame, now_s: float) -> None:
        kind = frame.message.WhichOneof("kind")
        session = stream.session
        if kind == "hello":
            self._hello(stream, frame.message.hello)
        elif session is None:
            raise ProtocolError("the first frame must be a Hello")
        elif kind == "piece":
            message = stream.assembler.add(frame.message.piece, frame.payload)
            if message is not None:
                session.accept(stream, read_activation(message), now_s)
        elif kind == "ping":
            ping = frame.message.ping
            if not 0 <= ping.reply_bytes <= MAX_PADDING_BYTES:
                raise ProtocolError(f"a ping that asks for {ping.reply_bytes} bytes")
            if stream.num_waiting > _MAX_WAITING:
                raise ProtocolError(f"{stream.num_waiting} frames wait to be read")
            padding = (memoryview(_PADDING)[: ping.reply_bytes],) if ping.reply_bytes else ()
            stream.push(Frame(pb.ServerFrame(pong=pb.Pong(number=ping.number)), padding))
        elif kind == "finish":
            session.finish(stream, read_end(frame.message.finish))
        elif kind == "abandon":
            session.fail(LinkError("the device has given the session up"))
            raise Superseded
        else:
            raise ProtocolError("a frame without content")

    def _hello(self, stream: Stream, hello: pb.Hello) -> None:
        if not same_token(hello.token, self._token):
            raise RefusedError(WRONG_TOKEN)
        if stream.session is not None:
            raise ProtocolError("a second Hello")
        spec = read_spec(hello.spec)
        with self._lock:
            if self._closing.is_set():
                raise RefusedError("the split service is shutting down")
            session = self._sessions.get(spec.key)
            if session is None or session.nonce != hello.nonce:
                session = self._replace(session, spec, hello)
        if session.spec != spec:
            raise ProtocolError("a session cannot be resumed with another plan")
        session.attach(stream, hello.num_gradients)

    def _replace(self, previous: ServedSession | None, spec: SessionSpec, hello: pb.Hello) -> ServedSession:
        """A new session, in the place of one of the same key where there is one. Called with the lock."""
        if hello.resumes:
            raise RefusedError("the split service does not know the session any more")
        running = [session for session in self._sessions.values() if not session.over.is_set()]
        if len(running) - (previous in running) >= self._settings.max_sessions:
            raise RefusedError(f"the split service is full: {len(running)} sessions")
        if previous is not None:
            previous.fail(LinkError("another session has taken its place"))
        session = ServedSession(spec, hello.nonce, self._host, self._settings.queue_bound, previous)
        self._sessions[spec.key] = session
        session.start()
        return session

    def _fail(self, stream: Stream, error: SplitError) -> None:
        """The stream has done what it must not: its session is lost, where it still is its own."""
        session = stream.session
        if session is not None and session.owns(stream):
            session.fail(error)
        stream.fail(error)

    def _detach(self, stream: Stream) -> None:
        if stream.session is not None:
            stream.session.detach(stream)

    # --------------------------------------------------------------------------------------------------------- clean-up

    def _clean_up(self) -> None:
        settings = self._settings
        period_s = max(0.02, min(1.0, settings.resume_s / 4, settings.message_s / 4, settings.idle_s / 4))
        while not self._closing.wait(period_s):
            now_s = time.monotonic()
            with self._lock:
                sessions, streams = list(self._sessions.items()), list(self._streams)
            for key, each in sessions:
                if each.connected or now_s - each.quiet_since_s < settings.resume_s:
                    continue
                if not each.over.is_set():
                    each.fail(LinkError(f"the device has been away for {settings.resume_s:g} s"))
                    continue
                with self._lock:
                    if self._sessions.get(key) is each:
                        del self._sessions[key]
            for stream in streams:
                silent_s, session = now_s - stream.heard_s, stream.session
                if stream.assembler.started and silent_s > settings.message_s:
                    self._fail(stream, LinkError(f"half a message, and nothing for {silent_s:.1f} s"))
                if session is None:
                    continue
                if (stuck_s := stream.stuck_s(now_s)) > settings.idle_s:
                    self._fail(stream, LinkError(f"the device has taken nothing for {stuck_s:.1f} s"))
                    stream.cancel()  # it would not take that either
                if not session.waiting:
                    continue
                silent_s = min(silent_s, now_s - session.quiet_since_s)
                if silent_s > settings.idle_s:
                    self._fail(stream, LinkError(f"the device has been silent for {silent_s:.1f} s"))


def _why_not(address: str) -> str:
    """Why nobody can listen there, which gRPC keeps to itself."""
    host, _, port = address.rpartition(":")
    try:
        ((family, *_, where), *_) = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind(where)
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return "the certificate and its key cannot be used"
