"""What a link and a peer can do wrong: found out in time, said clearly, nothing trained twice, the others served on."""

import contextlib
import queue
import random
import secrets
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from echo_host import EchoHost, activation, check_step, run_step, spec
from tcp_proxy import TcpProxy

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.channel import Deadlines, GrpcChannel
from gpu_runtime.pipeline.frames import Frame
from gpu_runtime.pipeline.messages import activation_frames, spec_message
from gpu_runtime.pipeline.service import ServiceSettings, SplitServer
from gpu_runtime.pipeline.session import (
    LinkError,
    RefusedError,
    SessionEnd,
    SessionSpec,
    SplitError,
    StageHost,
)
from gpu_runtime.pipeline.wire import SERVICE, connect, train_call

TOKEN = "open sesame"
QUICK = Deadlines(connect_s=10.0, message_s=30.0, resume_s=20.0)


class Bench:
    """A service, a link that can be cut, and channels over it; all closed at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def serve(self, host: StageHost, **settings: Any) -> tuple[SplitServer, TcpProxy]:
        server = self._stack.enter_context(closing(SplitServer(host, TOKEN, settings=ServiceSettings(**settings))))
        return server, self._stack.enter_context(closing(TcpProxy(server.address)))

    def channel(self, address: str, deadlines: Deadlines = QUICK, token: str = TOKEN) -> GrpcChannel:
        return self._stack.enter_context(closing(GrpcChannel(address, token, deadlines=deadlines, probe=False)))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def check_served(server: SplitServer, client: str = "other") -> None:
    """The service still serves somebody else."""
    with closing(GrpcChannel(server.address, TOKEN)) as channel:
        channel.open(spec(client))
        check_step(run_step(channel, 0), 0)
        channel.finish(SessionEnd(num_steps=1, num_examples=8))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------- the link


@pytest.mark.parametrize("when", range(9))
def test_a_cut_link_is_taken_up_again_and_nothing_is_trained_twice(bench: Bench, when: int) -> None:
    """Cut before each send and each receive of a step of 4, and before the end."""
    host = EchoHost()
    _, proxy = bench.serve(host)
    channel = bench.channel(proxy.address)
    channel.open(spec())
    check_step(run_step(channel, 0), 0)
    gradients = []
    for place in range(4):
        if place == when:
            proxy.cut()
        channel.send(activation(1, place))
    for place in range(4):
        if place + 4 == when:
            proxy.cut()
        gradients.append(channel.receive())
    check_step(gradients, 1)
    check_step(run_step(channel, 2), 2)
    if when == 8:
        proxy.cut()
    channel.finish(SessionEnd(num_steps=3, num_examples=24))
    (session,) = host.sessions
    assert session.trained == [(step, index) for step in range(3) for index in range(4)]
    assert session.end is not None
    # All gradients may be there before the link is cut in the second half.
    assert channel.statistics.num_reconnects == 1 or (4 <= when < 8 and channel.statistics.num_reconnects == 0)


def test_cuts_at_any_moment(bench: Bench) -> None:
    """Messages of several pieces, and a link that is cut again and again (not for ever: a busy machine gets on too)."""
    host = EchoHost()
    _, proxy = bench.serve(host)
    channel = bench.channel(proxy.address)
    channel.open(spec())
    stop = threading.Event()

    def cut() -> None:
        for _ in range(12):
            if stop.wait(0.15):
                break
            proxy.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    tensor = torch.randn(1, 3 << 19)  # 6 MiB
    for step in range(4):
        for index in range(3):
            channel.send(activation(step, index, 3, tensor))
        assert [(g.step, g.index) for g in (channel.receive() for _ in range(3))] == [(step, i) for i in range(3)]
    stop.set()
    cutting.join()
    channel.finish(SessionEnd(num_steps=4, num_examples=24))
    assert host.sessions[0].trained == [(step, index) for step in range(4) for index in range(3)]


def test_a_link_away_for_a_while_is_waited_for(bench: Bench) -> None:
    host = EchoHost()
    _, proxy = bench.serve(host)
    channel = bench.channel(proxy.address)
    channel.open(spec())
    proxy.cut(refusing=True)
    threading.Timer(0.5, lambda: setattr(proxy, "refusing", False)).start()
    check_step(run_step(channel, 0), 0)
    assert channel.statistics.num_reconnects == 1
    assert len(host.sessions) == 1


def test_a_link_that_stalls_and_goes_on_needs_no_new_connection(bench: Bench) -> None:
    _, proxy = bench.serve(EchoHost())
    channel = bench.channel(proxy.address)
    channel.open(spec())
    proxy.stall()
    threading.Timer(0.3, proxy.flow).start()
    check_step(run_step(channel, 0), 0)
    assert channel.statistics.num_reconnects == 0


@pytest.mark.parametrize("how", ["cut", "stall"])
def test_a_link_gone_for_ever_is_given_up_by_both_sides(bench: Bench, how: str) -> None:
    host = EchoHost()
    server, proxy = bench.serve(host, resume_s=0.5, message_s=0.5, idle_s=0.5)
    channel = bench.channel(proxy.address, Deadlines(connect_s=0.5, message_s=0.5, resume_s=0.5))
    channel.open(spec())
    channel.send(activation(0, 0))
    wait_for(lambda: len(host.sessions[0].trained) == 1)
    if how == "cut":
        proxy.cut(refusing=True)
    else:
        proxy.stall()
    with pytest.raises(LinkError, match=r"cannot be reached within 0\.5 s"):  # noqa: PT012
        channel.send(activation(0, 1))
        for _ in range(2):
            channel.receive()
    assert host.sessions[0].abandoned.wait(20)
    wait_for(lambda: server.num_sessions == 0)
    check_served(server)


def test_a_service_that_nobody_runs(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    channel = bench.channel(address, Deadlines(connect_s=0.2))
    with pytest.raises(LinkError, match=r"cannot be reached within 0\.2 s: UNAVAILABLE"):
        channel.open(spec())


def test_something_that_listens_and_never_answers(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        channel = bench.channel(f"127.0.0.1:{mute.getsockname()[1]}", Deadlines(connect_s=0.3))
        with pytest.raises(LinkError, match="cannot be reached within"):
            channel.open(spec())


def test_a_micro_batch_that_is_never_trained_is_noticed(bench: Bench) -> None:
    held = threading.Event()
    server, _ = bench.serve(EchoHost(before_train=lambda _: held.wait(60) and None))
    channel = bench.channel(server.address, Deadlines(message_s=0.3))
    channel.open(spec())
    channel.send(activation(0, 0))
    with pytest.raises(LinkError, match=r"has not answered for 0\.3 s"):
        channel.receive()
    held.set()


# ------------------------------------------------------------------------------------------------------------- the peer


class RawStream:
    """Frames by hand."""

    def __init__(self, address: str, *, spec: SessionSpec | None = None, raw: bool = False) -> None:
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel = connect(address, "")
        if raw:
            call = self.channel.stream_stream(f"/{SERVICE}/Train", request_serializer=None)
        else:
            call = train_call(self.channel)
        self.call = call(iter(self._frames.get, None))
        if spec is not None:
            self.nonce = secrets.token_hex(8)
            self.hello(spec)

    def hello(self, spec: SessionSpec, token: str = TOKEN, **fields: Any) -> None:
        hello = pb.Hello(token=token, nonce=self.nonce, spec=spec_message(spec), **fields)
        self.send(Frame(pb.ClientFrame(hello=hello)))
        assert next(self.call).message.WhichOneof("kind") == "welcome"

    def send(self, *frames: Any) -> None:
        for frame in frames:
            self._frames.put(frame)

    def failure(self) -> pb.Failure:
        for frame in self.call:
            if frame.message.HasField("failure"):
                return frame.message.failure
        raise AssertionError("no failure came")

    def close(self) -> None:
        self._frames.put(None)
        self.call.cancel()
        self.channel.close()


@pytest.fixture
def service(bench: Bench) -> SplitServer:
    return bench.serve(EchoHost(), message_s=0.5, idle_s=0.5, resume_s=0.5, hello_s=0.5, max_message_bytes=1 << 20)[0]


def one_piece(**changes: Any) -> Frame:
    (frame,) = activation_frames(activation(0, 0))
    for name, value in changes.items():
        setattr(frame.message.piece, name, value)
    return frame


def wrong_shape() -> Frame:
    frame = one_piece()
    frame.message.piece.activation.tensors[0].shape[:] = [2, 4]
    return frame


def wrong_type() -> Frame:
    frame = one_piece()
    frame.message.piece.activation.tensors[0].dtype = "load"
    return frame


def four_gigabytes() -> Frame:
    frame = one_piece(total_bytes=4 << 30, count=1024)
    frame.message.piece.activation.tensors[0].data_bytes = (4 << 30) - 16
    frame.message.piece.activation.tensors[0].shape[:] = [1 << 30]
    return frame


FAULTS: dict[str, tuple[Callable[[], list[Frame]], str]] = {
    "duplicate": (lambda: [one_piece(), one_piece()], "is due"),
    "swapped": (lambda: activation_frames(activation(0, 1)) + activation_frames(activation(0, 0)), "is due"),
    "stale": (lambda: [one_piece(), *activation_frames(activation(7, 0))], "is due"),
    "wrong shape": (lambda: [wrong_shape()], "shape"),
    "wrong type": (lambda: [wrong_type()], "unknown type 'load'"),
    "4 GB": (lambda: [four_gigabytes()], "4294967296 bytes is refused"),
    "beyond the limit": (lambda: activation_frames(activation(0, 0, 1, torch.zeros(1 << 19))), "is refused"),
    "negative": (lambda: [one_piece(total_bytes=-1)], "-1 bytes"),
    "no header": (lambda: [Frame(pb.ClientFrame(piece=pb.Piece(count=1)))], "header"),
    "empty": (lambda: [Frame(pb.ClientFrame())], "without content"),
    "second piece first": (lambda: [one_piece(number=1, count=2)], "begins with piece 1"),
    "other piece": (lambda: [one_piece(count=2), one_piece(number=1, count=2, step=1)], "brings another number"),
    "hello again": (lambda: [Frame(pb.ClientFrame(hello=pb.Hello(token=TOKEN)))], "second Hello"),
    "big ping": (lambda: [Frame(pb.ClientFrame(ping=pb.Ping(reply_bytes=1 << 40)))], "ping"),
    "early end": (lambda: [one_piece(), Frame(pb.ClientFrame(finish=pb.SessionEnd()))], "finishes when"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_peer_that_breaks_the_rules_loses_its_session_only(service: SplitServer, name: str) -> None:
    frames, text = FAULTS[name]
    with closing(GrpcChannel(service.address, TOKEN)) as other, closing(RawStream(service.address, spec=spec())) as raw:
        other.open(spec("other"))
        raw.send(*frames())
        failure = raw.failure()
        assert failure.kind == "protocol"
        assert text in failure.text
        check_step(run_step(other, 0), 0)
        wait_for(lambda: service.num_sessions == 1)


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", random.Random(1).randbytes(1000), b"\x0d1234"],
    ids=["ones", "4 GB field", "random", "fixed32"],
)
def test_garbage_in_place_of_a_frame(service: SplitServer, garbage: bytes) -> None:
    with closing(RawStream(service.address, raw=True)) as raw:
        raw.send(garbage)
        answer = pb.ServerFrame.FromString(next(raw.call))
        assert answer.failure.kind == "protocol"
    check_served(service)


def test_an_address_in_use_is_named_with_the_cause(service: SplitServer) -> None:
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
        SplitServer(EchoHost(), TOKEN, address=service.address)


def test_garbage_in_place_of_a_connection(service: SplitServer) -> None:
    host, _, port = service.address.rpartition(":")
    for garbage in (
        random.Random(2).randbytes(5000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff",
    ):
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(10)
            while raw.recv(1 << 16):
                pass
    check_served(service)


def test_a_frame_beyond_any_frame_is_not_read(service: SplitServer) -> None:
    with closing(RawStream(service.address, raw=True)) as raw:
        raw.send(bytes(6 << 20))
        with pytest.raises(grpc.RpcError) as caught:
            next(raw.call)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    check_served(service)


def test_a_wrong_token(bench: Bench, service: SplitServer) -> None:
    with pytest.raises(RefusedError, match="wrong token"):
        bench.channel(service.address, token="open barley").open(spec())
    assert service.num_sessions == 0
    check_served(service)


@pytest.mark.parametrize(
    "change", [{"micro_batches": 0}, {"encoding": "int4"}, {"split_point": -1}, {"proximal_mu": float("nan")}]
)
def test_impossible_plans_are_refused(bench: Bench, service: SplitServer, change: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        bench.channel(service.address).open(replace(spec(), **change))


def test_a_connection_that_says_nothing(service: SplitServer) -> None:
    with closing(RawStream(service.address)) as raw:
        assert "no Hello" in raw.failure().text
    check_served(service)


def test_frames_before_hello(service: SplitServer) -> None:
    with closing(RawStream(service.address)) as raw:
        raw.send(one_piece())
        assert "must be a Hello" in raw.failure().text


def test_half_a_message(service: SplitServer) -> None:
    with closing(RawStream(service.address, spec=spec())) as raw:
        frame = one_piece(count=2)
        raw.send(Frame(frame.message, frame.parts[:1]))
        assert "half a message" in raw.failure().text
    check_served(service)


def test_a_device_that_falls_silent(service: SplitServer) -> None:
    with closing(RawStream(service.address, spec=spec())) as raw:
        assert "silent" in raw.failure().text
    check_served(service)


def test_a_peer_killed_between_forward_and_backward(bench: Bench) -> None:
    host = EchoHost()
    server, _ = bench.serve(host, resume_s=0.3)
    raw = RawStream(server.address, spec=spec())
    raw.send(*activation_frames(activation(0, 0)))
    wait_for(lambda: bool(host.sessions[0].trained))
    raw.close()
    assert host.sessions[0].abandoned.wait(20)
    assert host.sessions[0].end is None
    check_served(server)


def test_a_full_service_refuses_and_has_room_again(bench: Bench) -> None:
    server, _ = bench.serve(EchoHost(), max_sessions=2)
    first, second = bench.channel(server.address), bench.channel(server.address)
    first.open(spec("first"))
    second.open(spec("second"))
    with pytest.raises(RefusedError, match="full: 2 sessions"):
        bench.channel(server.address).open(spec("third"))
    first.close()
    wait_for(lambda: server.num_sessions == 1)
    check_served(server, "third")
    check_step(run_step(second, 0), 0)


def test_a_new_session_of_the_same_key_takes_the_place_of_the_old(bench: Bench) -> None:
    host = EchoHost()
    server, _ = bench.serve(host)
    old, new = bench.channel(server.address), bench.channel(server.address)
    old.open(spec())
    old.send(activation(0, 0))
    old.receive()
    new.open(spec())
    check_step(run_step(new, 0), 0)
    with pytest.raises(SplitError, match="another session"):  # noqa: PT012
        old.send(activation(0, 1))
        old.receive()
    assert host.sessions[0].abandoned.is_set()
    assert not host.sessions[1].abandoned.is_set()


def test_a_restarted_service_does_not_know_the_session(bench: Bench) -> None:
    server, proxy = bench.serve(EchoHost())
    channel = bench.channel(proxy.address)
    channel.open(spec())
    check_step(run_step(channel, 0), 0)
    with server._lock:
        server._sessions.clear()
    proxy.cut()
    with pytest.raises(RefusedError, match="does not know"):
        run_step(channel, 1)


def test_a_session_cannot_be_taken_up_with_gradients_that_never_were(service: SplitServer) -> None:
    with closing(RawStream(service.address, spec=spec())) as raw, closing(RawStream(service.address)) as thief:
        thief.nonce = raw.nonce
        with pytest.raises(AssertionError):
            thief.hello(spec(), num_gradients=5)
    check_served(service)


def test_gradients_that_nobody_takes_do_not_pile_up(bench: Bench) -> None:
    """The next step does not begin before those of the last one have been sent."""
    server, _ = bench.serve(EchoHost(), queue_bound=2)
    with closing(RawStream(server.address, spec=spec())) as raw:
        big = torch.zeros(1 << 20)
        for step in range(50):
            raw.send(*(frame for index in range(4) for frame in activation_frames(activation(step, index, 4, big))))
        assert "before the gradients" in raw.failure().text


def test_a_device_that_takes_nothing_is_given_up(bench: Bench) -> None:
    """Its stream is broken off too: what waits to be sent is memory."""
    host = EchoHost()
    server, _ = bench.serve(host, idle_s=0.5, resume_s=0.5)
    with closing(RawStream(server.address, spec=spec())) as raw:
        big = torch.zeros(2, 1 << 20)  # beyond what gRPC takes for a device that does not read
        raw.send(*(frame for index in range(4) for frame in activation_frames(activation(0, index, 4, big))))
        assert host.sessions[0].abandoned.wait(20)
        wait_for(lambda: not server._streams)
    check_served(server)


def test_answers_to_pings_do_not_pile_up(service: SplitServer) -> None:
    with closing(RawStream(service.address, spec=spec())) as raw:
        ping = Frame(pb.ClientFrame(ping=pb.Ping(number=1, reply_bytes=1 << 20)))
        raw.send(*[ping] * 5000)
        wait_for(lambda: not service.num_sessions)
    check_served(service)


def test_closing_the_service_ends_all_threads(bench: Bench) -> None:
    before = threading.active_count()
    host = EchoHost()
    server, _ = SplitServer(host, TOKEN), None
    channel = bench.channel(server.address, Deadlines(resume_s=0.2))
    channel.open(spec())
    run_step(channel, 0)
    server.close()
    assert host.sessions[0].abandoned.is_set()
    with pytest.raises(SplitError, match=r"shutting down|cannot be reached"):
        run_step(channel, 1)
    channel.close()
    wait_for(lambda: threading.active_count() <= before)


def test_memory_does_not_grow_with_the_number_of_micro_batches(bench: Bench) -> None:
    """The peak of 300 micro-batches is that of 40, on both ends together. (Python's memory, where frames live.)"""
    server, _ = bench.serve(EchoHost(keep=False), queue_bound=4)
    channel = bench.channel(server.address)
    channel.open(spec(micro_batches=4))
    tensor = torch.zeros(1 << 14)
    peaks = []
    tracemalloc.start()
    try:
        for steps in (range(10), range(10, 75)):
            tracemalloc.reset_peak()
            for step in steps:
                for index in range(4):
                    channel.send(activation(step, index, 4, tensor))
                for _ in range(4):
                    channel.receive()
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20 * 4 * tensor.numel()  # 65 steps hold 260 messages


def test_sessions_side_by_side(bench: Bench) -> None:
    server, _ = bench.serve(EchoHost())
    failures: list[str] = []

    def train(client: str) -> None:
        try:
            channel = GrpcChannel(server.address, TOKEN)
            channel.open(spec(client))
            for step in range(5):
                check_step(run_step(channel, step), step)
            channel.finish(SessionEnd(num_steps=5, num_examples=40))
            channel.close()
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=train, args=(f"client-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
