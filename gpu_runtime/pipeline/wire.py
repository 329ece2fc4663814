"""gRPC as both ends use it: names of the calls, channel options, how frames become bytes."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import grpc

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.frames import MAX_FRAME_BYTES, reader, write

SERVICE, ADMIN_SERVICE = "paceline.split.Split", "paceline.split.SplitAdmin"
MAX_PADDING_BYTES = 1 << 20
WRONG_TOKEN = "wrong token"

read_client_frame = reader(pb.ClientFrame)
read_server_frame = reader(pb.ServerFrame)
read_admin_frame = reader(pb.AdminFrame)

COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
    # HTTP/2's own frames: their default of 16 KiB costs an eighth more CPU time.
    ("grpc.http2.max_frame_size", 1 << 20),
]
CLIENT_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def connect(address: str, certificate: str) -> grpc.Channel:
    """A connection of its own to "host:port", encrypted where there is a certificate (PEM) to trust."""
    if certificate:
        credentials = grpc.ssl_channel_credentials(root_certificates=certificate.encode())
        return grpc.secure_channel(address, credentials, options=CLIENT_OPTIONS)
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)


def train_call(channel: grpc.Channel) -> Callable[..., Any]:
    """The stream of sessions: called with an iterator of `Frame`s, it iterates over those that come back."""
    call: Callable[..., Any] = channel.stream_stream(
        f"/{SERVICE}/Train", request_serializer=write, response_deserializer=read_server_frame
    )
    return call


def same_token(given: str, expected: str) -> bool:
    """Compared in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())
