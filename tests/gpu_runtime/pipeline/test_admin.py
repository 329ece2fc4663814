"""An edge server's admin calls and encrypted connections."""

import datetime
import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from echo_host import EchoHost, check_step, key, run_step, spec

from gpu_runtime.contracts import DataSpec, HeldTask, Profile, TaskProfile
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.admin import PreparedStages, StageStore, TrainedStage, admin_handler
from gpu_runtime.pipeline.channel import Deadlines, GrpcChannel
from gpu_runtime.pipeline.edge_client import EdgeClient
from gpu_runtime.pipeline.encoding import EncodingError
from gpu_runtime.pipeline.frames import Frame, write
from gpu_runtime.pipeline.service import SplitServer
from gpu_runtime.pipeline.session import (
    LinkError,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionKey,
    SplitError,
)
from gpu_runtime.pipeline.wire import ADMIN_SERVICE, connect, read_admin_frame

TOKEN, ADMIN_TOKEN = "open sesame", "open, says the boss"
ARRAYS = {
    "0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "0.bias": np.zeros(0, dtype=np.float64),
    "1.count": np.array(7, dtype=np.int64),
    "2.weight": np.random.default_rng(1).standard_normal(1_500_000).astype(np.float32),
}
STAGES = PreparedStages(
    run="run", server_round=3, task="digits", reference="digits", spec='{"split": [1, 2]}', arrays=ARRAYS
)


class FakeStore(StageStore):
    def __init__(self) -> None:
        self.prepared: list[PreparedStages] = []
        self.released: list[tuple[str, int]] = []
        self.trained: dict[SessionKey, TrainedStage] = {}

    def prepare(self, stages: PreparedStages) -> None:
        if stages.task == "unknown":
            raise RefusedError("no task 'unknown'")
        self.prepared.append(stages)

    def collect(self, key: SessionKey) -> TrainedStage:
        if key not in self.trained:
            raise RefusedError(f"nothing of {key.client}")
        return self.trained[key]

    def release(self, run: str, server_round: int) -> None:
        if server_round < 0:
            raise ZeroDivisionError("bug")
        self.released.append((run, server_round))

    def measure(self, held: Sequence[HeldTask]) -> Profile:
        profiles = tuple(TaskProfile(task=each.ref, num_examples=1, batch_size=2) for each in held)
        return Profile(client="edge", device="test", num_cores=1, clock="measured", tasks=profiles)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def server(store: FakeStore) -> Iterator[SplitServer]:
    with closing(SplitServer(EchoHost(), TOKEN, handlers=(admin_handler(store, ADMIN_TOKEN, hello_s=0.3),))) as server:
        yield server


@pytest.fixture
def edge(server: SplitServer) -> Iterator[EdgeClient]:
    with closing(EdgeClient(server.address, ADMIN_TOKEN, deadline_s=30.0)) as client:
        yield client


def same_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and np.array_equal(one[name], other[name])
        for name in one
    )


def test_start_weights_go_in_and_trained_halves_come_out(store: FakeStore, edge: EdgeClient) -> None:
    """Of every shape, of several types, in more than one piece."""
    edge.prepare(STAGES)
    (got,) = store.prepared
    assert replace(got, arrays={}) == replace(STAGES, arrays={})
    assert same_arrays(dict(got.arrays), ARRAYS)
    end = SessionEnd(num_steps=4, num_examples=31)
    store.trained[key()] = TrainedStage(arrays=got.arrays, end=end)
    trained = edge.collect(key())
    assert trained.end == end
    assert same_arrays(dict(trained.arrays), ARRAYS)
    edge.release("run", 3)
    assert store.released == [("run", 3)]


def test_costs_are_asked_for_by_reference_and_data(edge: EdgeClient) -> None:
    held = [HeldTask(ref="digits", data=DataSpec(seed=3)), HeldTask(ref="my_pkg:Mine", data=DataSpec())]
    assert [task.task for task in edge.measure(held).tasks] == ["digits", "my_pkg:Mine"]


def test_sessions_and_admin_calls_share_a_port(server: SplitServer, edge: EdgeClient) -> None:
    edge.release("run", 2)
    with closing(GrpcChannel(server.address, TOKEN)) as channel:
        channel.open(spec())
        check_step(run_step(channel, 0), 0)


def test_refusals_and_bugs_of_the_store_arrive(edge: EdgeClient) -> None:
    with pytest.raises(RefusedError, match="no task 'unknown'"):
        edge.prepare(replace(STAGES, task="unknown"))
    with pytest.raises(RefusedError, match="nothing of laptop"):
        edge.collect(key())
    with pytest.raises(SplitError, match="ZeroDivisionError: bug"):
        edge.release("run", -1)


@pytest.mark.parametrize("token", ["", TOKEN, ADMIN_TOKEN + " "])
def test_admin_calls_need_the_admin_token(store: FakeStore, server: SplitServer, token: str) -> None:
    with closing(EdgeClient(server.address, token, deadline_s=30.0)) as client:
        for call in (
            lambda: client.prepare(STAGES),
            lambda: client.collect(key()),
            lambda: client.release("run", 3),
            lambda: client.measure([]),
        ):
            with pytest.raises(RefusedError, match="wrong token"):
                call()
    assert not store.prepared
    assert not store.released


def test_the_admin_token_opens_no_session(server: SplitServer) -> None:
    with closing(GrpcChannel(server.address, ADMIN_TOKEN)) as channel, pytest.raises(RefusedError, match="wrong token"):
        channel.open(spec())


def test_tokens_must_not_be_empty(store: FakeStore) -> None:
    with pytest.raises(ValueError, match="token"):
        SplitServer(EchoHost(), "")
    with pytest.raises(ValueError, match="token"):
        admin_handler(store, "")


def test_weights_that_are_not_finite_are_named(store: FakeStore, edge: EdgeClient) -> None:
    bad = {"0.weight": np.array([1.0, np.nan])}
    with pytest.raises(EncodingError, match=r"array '0\.weight': 1 of 2 values are not finite"):
        edge.prepare(replace(STAGES, arrays=bad))
    store.trained[key()] = TrainedStage(arrays=bad, end=SessionEnd(num_steps=1, num_examples=1))
    with pytest.raises(ProtocolError, match=r"array '0\.weight': 1 of 2 values"):
        edge.collect(key())


def test_calls_without_a_deadline_and_silent_calls_are_ended(server: SplitServer) -> None:
    with closing(connect(server.address, "")) as channel:
        codec = {"request_serializer": write, "response_deserializer": read_admin_frame}
        release = channel.unary_unary(f"/{ADMIN_SERVICE}/Release", **codec)
        request = Frame(pb.AdminFrame(token=ADMIN_TOKEN, release=pb.RoundId(run="run")))
        assert "deadline" in release(request).message.failure.text
        prepare = channel.stream_unary(f"/{ADMIN_SERVICE}/Prepare", **codec)
        over = threading.Event()
        never: Iterator[Frame | bool] = iter(over.wait, True)
        with pytest.raises(grpc.RpcError) as caught:
            prepare(never, timeout=20)
        over.set()
        assert caught.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED


def test_tasks_to_measure_are_checked(server: SplitServer) -> None:
    with closing(connect(server.address, "")) as channel:
        measure = channel.unary_unary(
            f"/{ADMIN_SERVICE}/Measure", request_serializer=write, response_deserializer=read_admin_frame
        )
        request = pb.AdminFrame(token=ADMIN_TOKEN, measure=pb.Measure(tasks=['{"kind": "Plan"}']))
        failure = measure(Frame(request), timeout=30).message.failure
    assert failure.kind == "protocol"
    assert "HeldTask" in failure.text


@pytest.mark.parametrize("total_bytes", [4 << 30, 12])
def test_announced_sizes_are_checked(server: SplitServer, total_bytes: int) -> None:
    tensor = pb.Tensor(encoding="raw", dtype="float32", shape=[1 << 30], data_bytes=total_bytes)
    piece = pb.Piece(count=2, total_bytes=total_bytes, bundle=pb.Bundle(names=["x"], tensors=[tensor]))
    with closing(connect(server.address, "")) as channel:
        prepare = channel.stream_unary(
            f"/{ADMIN_SERVICE}/Prepare", request_serializer=write, response_deserializer=read_admin_frame
        )
        frames = [Frame(pb.AdminFrame(token=ADMIN_TOKEN, piece=piece))]
        assert prepare(iter(frames), timeout=30).message.failure.kind == "protocol"


def test_an_edge_server_that_is_not_there() -> None:
    with closing(EdgeClient("127.0.0.1:1", ADMIN_TOKEN, deadline_s=5.0)) as client, pytest.raises(LinkError):
        client.release("run", 1)


# -------------------------------------------------------------------------------------------------------- encryption


@pytest.fixture(scope="module")
def certificate() -> tuple[bytes, bytes]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "split service")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), key


def test_encrypted_sessions_and_admin_calls(store: FakeStore, certificate: tuple[bytes, bytes]) -> None:
    pem, private = certificate
    handlers = (admin_handler(store, ADMIN_TOKEN),)
    with closing(SplitServer(EchoHost(), TOKEN, certificate=pem, key=private, handlers=handlers)) as server:
        with closing(GrpcChannel(server.address, TOKEN, certificate=pem.decode())) as channel:
            channel.open(spec())
            check_step(run_step(channel, 0), 0)
            channel.finish(SessionEnd(num_steps=1, num_examples=8))
        with closing(EdgeClient(server.address, ADMIN_TOKEN, certificate=pem.decode())) as client:
            client.prepare(STAGES)
        assert len(store.prepared) == 1
        plain = GrpcChannel(server.address, TOKEN, deadlines=Deadlines(connect_s=0.3))
        with closing(plain), pytest.raises(LinkError):
            plain.open(spec())


def test_a_service_with_another_certificate_is_not_trusted(certificate: tuple[bytes, bytes]) -> None:
    with closing(SplitServer(EchoHost(), TOKEN)) as server:
        channel = GrpcChannel(
            server.address, TOKEN, certificate=certificate[0].decode(), deadlines=Deadlines(connect_s=0.3)
        )
        with closing(channel), pytest.raises(LinkError):
            channel.open(spec())
