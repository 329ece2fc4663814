"""What every channel does: the shared suite, for the one without a network and the one over gRPC."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import torch
from echo_host import FACTOR, EchoHost, activation, check_step, run_step, spec

from gpu_runtime.pipeline.channel import GrpcChannel
from gpu_runtime.pipeline.encoding import decode, encode
from gpu_runtime.pipeline.local_channel import LocalChannel
from gpu_runtime.pipeline.service import SplitServer
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    LinkError,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SplitError,
    StageHost,
)

TOKEN = "open sesame"
Connect = Callable[[StageHost], Channel]


@pytest.fixture(params=["local", "grpc"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with ExitStack() as stack:

        def make(host: StageHost) -> Channel:
            if request.param == "local":
                return stack.enter_context(closing(LocalChannel(host)))
            server = stack.enter_context(closing(SplitServer(host, TOKEN)))
            return stack.enter_context(closing(GrpcChannel(server.address, TOKEN)))

        yield make


def test_gradients_come_back_in_order_and_the_session_ends(connect: Connect) -> None:
    host = EchoHost()
    channel = connect(host)
    channel.open(spec())
    for step in range(3):
        check_step(run_step(channel, step), step)
    channel.finish(SessionEnd(num_steps=3, num_examples=24))
    (session,) = host.sessions
    assert session.spec == spec()
    assert session.trained == [(step, index) for step in range(3) for index in range(4)]
    assert session.end == SessionEnd(num_steps=3, num_examples=24)
    assert len(session.threads) == 1
    channel.close()
    assert not session.abandoned.is_set()


def test_steps_may_have_fewer_micro_batches_than_agreed(connect: Connect) -> None:
    channel = connect(EchoHost())
    channel.open(spec(micro_batches=4))
    for step, count in enumerate((4, 1, 3)):
        check_step(run_step(channel, step, count), step, count)
    channel.finish(SessionEnd(num_steps=3, num_examples=16))


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (), (7, 5, 11, 13), (1, 1 << 21)])
def test_tensors_arrive_as_they_are(connect: Connect, shape: tuple[int, ...]) -> None:
    """The largest one takes three pieces."""
    channel = connect(EchoHost())
    channel.open(spec())
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    channel.send(activation(0, 0, 1, tensor))
    (encoded,) = channel.receive().tensors
    assert encoded is not None
    assert torch.equal(decode(encoded), tensor * FACTOR)


def test_whole_numbers_and_structures_and_several_tensors_cross(connect: Connect) -> None:
    seen: list[Activation] = []
    channel = connect(EchoHost(before_train=seen.append))
    channel.open(spec())
    labels = torch.arange(5, dtype=torch.int64)
    odd = torch.tensor([True, False, True])
    sent = Activation(
        step=0,
        index=0,
        count=1,
        num_examples=3,
        batch_examples=5,
        tensors=(encode(odd, "fp32"), encode(torch.ones(2, 2), "fp32"), encode(labels, "fp32")),
        structure="(t, [t], t)",
        targets=(encode(odd, "fp32"), encode(labels, "fp32")),
        target_structure="{a: t, b: t}",
    )
    channel.send(sent)
    gradient = channel.receive()
    assert [tensor is None for tensor in gradient.tensors] == [True, False, True]
    assert gradient.server_s == 0.5
    (got,) = seen
    assert (got.structure, got.target_structure) == (sent.structure, sent.target_structure)
    assert (got.num_examples, got.batch_examples) == (3, 5)
    for mine, theirs in zip(sent.tensors + sent.targets, got.tensors + got.targets, strict=True):
        assert torch.equal(decode(mine), decode(theirs))


def test_double_precision_stays_exact(connect: Connect) -> None:
    seen: list[Activation] = []
    channel = connect(EchoHost(before_train=seen.append))
    channel.open(spec())
    tensor = torch.randn(3, 5, dtype=torch.float64)
    channel.send(activation(0, 0, 1, tensor))
    channel.receive()
    assert torch.equal(decode(seen[0].tensors[0]), tensor)


def test_a_refusal_says_why(connect: Connect) -> None:
    channel = connect(EchoHost(refusal="unknown round 3"))
    with pytest.raises(RefusedError, match="unknown round 3"):
        channel.open(spec())


def fail_with(error: Exception) -> Callable[[Activation], None]:
    def fail(_: Activation) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ProtocolError("of another shape"), ProtocolError, "of another shape"),
        (SplitError("cannot be trained on"), SplitError, "cannot be trained on"),
        (RuntimeError("out of memory"), SplitError, "RuntimeError: out of memory"),
    ],
)
def test_errors_of_the_service_arrive_as_such(
    connect: Connect, error: Exception, kind: type[SplitError], text: str
) -> None:
    host = EchoHost(before_train=fail_with(error))
    channel = connect(host)
    channel.open(spec())
    with pytest.raises(SplitError, match=text) as caught:
        run_step(channel, 0)
    assert type(caught.value) is kind
    assert host.sessions[0].abandoned.wait(10)
    with pytest.raises(SplitError, match=text):
        channel.receive()


@pytest.mark.parametrize("places", [[(0, 1)], [(1, 0)], [(0, 0), (0, 0)], [(0, 0), (0, 2)]])
def test_micro_batches_out_of_order_are_refused(connect: Connect, places: list[tuple[int, int]]) -> None:
    """Swapped, of a step that is not due, twice, and one left out."""
    host = EchoHost()
    channel = connect(host)
    channel.open(spec())
    with pytest.raises(ProtocolError, match="is due"):  # noqa: PT012
        for place in places:
            channel.send(activation(*place))
        for _ in places:
            channel.receive()
    assert host.sessions[0].abandoned.wait(10)
    assert host.sessions[0].trained in ([], [(0, 0)])


def test_more_micro_batches_than_agreed_are_refused(connect: Connect) -> None:
    channel = connect(EchoHost())
    channel.open(spec(micro_batches=2))
    with pytest.raises(ProtocolError, match="3"):  # noqa: PT012
        channel.send(activation(0, 0, 3))
        channel.receive()


def test_both_halves_must_agree_on_what_was_trained(connect: Connect) -> None:
    host = EchoHost()
    channel = connect(host)
    channel.open(spec())
    run_step(channel, 0)
    with pytest.raises(ProtocolError, match="num_examples=9"):
        channel.finish(SessionEnd(num_steps=1, num_examples=9))
    assert host.sessions[0].abandoned.wait(10)


def test_nothing_to_wait_for_is_an_error(connect: Connect) -> None:
    channel = connect(EchoHost())
    channel.open(spec())
    with pytest.raises(ProtocolError, match="under way"):
        channel.receive()


def test_a_closed_channel_abandons_its_session(connect: Connect) -> None:
    host = EchoHost()
    channel = connect(host)
    channel.open(spec())
    channel.send(activation(0, 0))
    channel.close()
    assert host.sessions[0].abandoned.wait(10)
    for call in (channel.receive, lambda: channel.send(activation(0, 1))):
        with pytest.raises(LinkError, match="closed"):
            call()
    channel.close()


def test_statistics_count_bytes(connect: Connect) -> None:
    channel = connect(EchoHost())
    channel.open(spec())
    before = channel.statistics
    channel.send(activation(0, 0, 1, torch.zeros(1000)))
    channel.receive()
    after = channel.statistics
    assert 4000 <= after.bytes_up - before.bytes_up < 5000
    assert 4000 <= after.bytes_down - before.bytes_down < 5000
    assert after.num_reconnects == 0


def test_close_wakes_a_waiting_receive() -> None:
    """Only where there is something to wait for: the service is held up."""
    held = threading.Event()
    host = EchoHost(before_train=lambda _: held.wait(30) and None)
    errors: list[BaseException] = []
    with closing(SplitServer(host, TOKEN)) as server, closing(GrpcChannel(server.address, TOKEN)) as channel:
        channel.open(spec())
        channel.send(activation(0, 0))

        def receive() -> None:
            try:
                channel.receive()
            except LinkError as error:
                errors.append(error)

        waiting = threading.Thread(target=receive)
        waiting.start()
        channel.close()
        waiting.join(10)
        assert not waiting.is_alive()
        held.set()
    assert len(errors) == 1
