"""Frames between processes of one machine: a JSON header, named numpy arrays as raw bytes, and file descriptors.

A frame is `b"PL01"`, the header's length (u32), the arrays' length (u64), the header, the arrays in the header's order.
No pickle: what arrives is data, never code. Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import array
import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAGIC = b"PL01"
MAX_HEADER_BYTES = 1 << 26
MAX_ARRAY_BYTES = 1 << 36
MAX_DESCRIPTORS = 16
_LENGTHS = struct.Struct("<4sIQ")
_KINDS = "biufc"


class WireError(RuntimeError):
    """The other side has gone, or sent what is no frame; the text says which."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What crosses at once. Received `descriptors` belong to the receiver, who closes them."""

    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    descriptors: Sequence[int] = ()


def send(sock: socket.socket, frame: Frame) -> None:
    """Send a whole frame over a Unix stream socket.

    Raises:
        WireError: nobody reads any more.
        ValueError: a header that is not JSON, or an array that is not numeric.
    """
    described = [[name, _dtype_of(name, value), list(value.shape)] for name, value in frame.arrays.items()]
    header = json.dumps({"header": dict(frame.header), "arrays": described}, allow_nan=False).encode()
    bodies = [np.ascontiguousarray(value) for value in frame.arrays.values()]
    start = _LENGTHS.pack(MAGIC, len(header), sum(body.nbytes for body in bodies)) + header
    try:
        if frame.descriptors:
            sent = socket.send_fds(sock, [start], list(frame.descriptors))
            sock.sendall(start[sent:])
        else:
            sock.sendall(start)
        for body in bodies:
            if body.nbytes:
                sock.sendall(body.reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise WireError(f"the other process has gone: {error}") from error


def receive(sock: socket.socket) -> Frame:
    """Wait for a whole frame; waits as long as the socket's timeout allows for each piece.

    Raises:
        WireError: the other side has gone, or what it sent is no frame.
        TimeoutError: nothing came in time.
    """
    descriptors = array.array("i")
    try:
        start = _read(sock, _LENGTHS.size, descriptors)
        magic, header_bytes, array_bytes = _LENGTHS.unpack(start)
        if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or array_bytes > MAX_ARRAY_BYTES:
            raise WireError("what arrived is no frame of this version")
        try:
            body = json.loads(bytes(_read(sock, header_bytes, descriptors)))
            shapes = [(str(name), np.dtype(dtype), tuple(shape)) for name, dtype, shape in body["arrays"]]
            header = dict(body["header"])
        except (ValueError, TypeError, KeyError) as error:
            raise WireError(f"a frame's header cannot be read: {error}") from error
        sizes = [_num_bytes(dtype, shape) for _, dtype, shape in shapes]
        if sum(sizes) != array_bytes:
            raise WireError(f"a frame's arrays should have {sum(sizes)} bytes, not {array_bytes}")
        arrays = {
            name: np.frombuffer(_read(sock, size, descriptors), dtype=dtype).reshape(shape)
            for (name, dtype, shape), size in zip(shapes, sizes, strict=True)
        }
    except BaseException:
        close_all(descriptors)
        raise
    return Frame(header=header, arrays=arrays, descriptors=tuple(descriptors))


def close_all(descriptors: Sequence[int]) -> None:
    """Close file descriptors that were received and are not needed."""
    for descriptor in descriptors:
        socket.close(descriptor)


def _read(sock: socket.socket, count: int, descriptors: array.array[int]) -> bytearray:
    """Exactly `count` bytes; descriptors that come along are appended."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        try:
            got, ancillary, _, _ = sock.recvmsg_into([view[done:]], socket.CMSG_SPACE(MAX_DESCRIPTORS * 4))
        except TimeoutError:
            raise
        except OSError as error:
            raise WireError(f"the other process has gone: {error}") from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if got == 0:
            raise WireError("the other process has gone")
        done += got
    return buffer


def _dtype_of(name: str, value: np.ndarray) -> str:
    if value.dtype.kind not in _KINDS:
        raise ValueError(f"array {name!r} of type {value.dtype} cannot be sent")
    return value.dtype.str


def _num_bytes(dtype: np.dtype[Any], shape: tuple[Any, ...]) -> int:
    if dtype.kind not in _KINDS or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"a frame holds an array of type {dtype} and shape {shape}")
    return int(dtype.itemsize * math.prod(shape))
