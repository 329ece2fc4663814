"""Frames between processes: what goes in comes out, and what is no frame is refused."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from gpu_runtime.socket_wire import MAGIC, MAX_HEADER_BYTES, Frame, WireError, close_all, receive, send

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(10.0)
        other.settimeout(10.0)
        yield one, other


def test_what_is_sent_arrives(pair: Pair) -> None:
    arrays = {
        "weights": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "count": np.array(3, dtype=np.int64),
        "nothing": np.empty((0, 5), dtype=np.float64),
        "flags": np.array([True, False]),
    }
    send(pair[0], Frame(header={"order": "steps", "deep": {"list": [1, None, "ü"]}}, arrays=arrays))
    found = receive(pair[1])
    assert found.header == {"order": "steps", "deep": {"list": [1, None, "ü"]}}
    assert list(found.arrays) == list(arrays)
    for name, value in arrays.items():
        assert found.arrays[name].dtype == value.dtype
        assert np.array_equal(found.arrays[name], value)


def test_large_arrays_arrive_in_pieces(pair: Pair) -> None:
    large = np.random.default_rng(0).normal(size=1 << 20)
    sender = threading.Thread(target=send, args=(pair[0], Frame(header={}, arrays={"large": large})))
    sender.start()
    assert np.array_equal(receive(pair[1]).arrays["large"], large)
    sender.join()


def test_descriptors_arrive(pair: Pair) -> None:
    reading, writing = os.pipe()
    send(pair[0], Frame(header={}, descriptors=[writing]))
    os.close(writing)
    frame = receive(pair[1])
    (received,) = frame.descriptors
    os.write(received, b"hello")
    close_all(frame.descriptors)
    assert os.read(reading, 10) == b"hello"
    # The last writer is gone: nothing more can come.
    assert os.read(reading, 10) == b""
    os.close(reading)


def test_what_cannot_be_sent_is_refused_before_anything_is_sent(pair: Pair) -> None:
    with pytest.raises(ValueError, match="array 'names' of type object cannot be sent"):
        send(pair[0], Frame(header={}, arrays={"names": np.array([object()])}))
    with pytest.raises(ValueError, match="JSON compliant"):
        send(pair[0], Frame(header={"loss": float("nan")}))
    send(pair[0], Frame(header={"still": "works"}))
    assert receive(pair[1]).header == {"still": "works"}


def framed(header: bytes, body: bytes = b"", *, magic: bytes = MAGIC, body_bytes: int | None = None) -> bytes:
    size = len(body) if body_bytes is None else body_bytes
    return struct.pack("<4sIQ", magic, len(header), size) + header + body


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no frame"),
        (struct.pack("<4sIQ", MAGIC, MAX_HEADER_BYTES + 1, 0), "no frame"),
        (struct.pack("<4sIQ", MAGIC, 2, 1 << 60), "no frame"),
        (framed(b"nonsense"), "header cannot be read"),
        (framed(b'{"header": {}}'), "header cannot be read"),
        (framed(b'{"header": {}, "arrays": [["a", "O", [1]]]}', b"12345678"), "type object"),
        (framed(b'{"header": {}, "arrays": [["a", "<f4", [-1]]]}'), "shape"),
        (framed(b'{"header": {}, "arrays": [["a", "<f4", [2]]]}', b"1234"), "should have 8 bytes, not 4"),
        (framed(b'{"header": {}, "arrays": []}')[:-3], "has gone"),
        (b"", "has gone"),
    ],
)
def test_what_is_no_frame_is_refused(pair: Pair, raw: bytes, complaint: str) -> None:
    pair[0].sendall(raw)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match=complaint):
        receive(pair[1])


def test_a_refused_frame_leaves_no_descriptor_open(pair: Pair) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair[0], [framed(b"nonsense")], [writing])
    os.close(writing)
    with pytest.raises(WireError):
        receive(pair[1])
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_nobody_there(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(WireError, match="has gone"):
        send(pair[0], Frame(header={}))


def test_silence_ends_at_the_timeout(pair: Pair) -> None:
    pair[1].settimeout(0.01)
    with pytest.raises(TimeoutError):
        receive(pair[1])
