"""Protobuf frames with their payload outside of protobuf; messages cut into pieces of at most 4 MiB and put together.

A payload is the last field of a frame: appended when it is written, cut out as a view when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.session import ProtocolError

MAX_PIECE_BYTES = 4 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = MAX_PIECE_BYTES + MAX_HEADER_BYTES
MAX_MESSAGE_BYTES = 1 << 30

_ALIGNMENT = 16
_PADDING_TAG, _PAYLOAD_TAG = 14 << 3 | 2, 15 << 3 | 2
_NOTHING = memoryview(b"")

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: a `ClientFrame`, `ServerFrame` or `AdminFrame` without payload, and the payload's parts in order."""

    message: Any
    parts: Sequence[Buffer] = ()

    @property
    def payload(self) -> Buffer:
        """Of a frame that was read: it has one part at most."""
        return self.parts[0] if self.parts else _NOTHING

    @property
    def num_bytes(self) -> int:
        """About what it takes on the wire."""
        return int(self.message.ByteSize()) + sum(map(len, self.parts))


@dataclass(frozen=True, slots=True)
class Malformed:
    """What arrived is no frame; the text says why. (Deserialisers must not raise: gRPC would hide the reason.)"""

    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message put together again: `header` is the protobuf message that stood in its first piece."""

    step: int
    index: int
    header: Any
    payload: Buffer


def write(frame: Frame) -> bytes:
    """A frame as valid protobuf, in one copy of its payload."""
    head: bytes = frame.message.SerializeToString()
    size = sum(map(len, frame.parts))
    if not size:
        return head
    length = _varint(size)
    padding = -(len(head) + 2 + 1 + len(length)) % _ALIGNMENT
    start = bytes((_PADDING_TAG, padding)) + bytes(padding) + bytes((_PAYLOAD_TAG,)) + length
    return b"".join((head, start, *frame.parts))


def reader(kind: type) -> Callable[[bytes], Frame | Malformed]:
    """What reads frames of a protobuf class; the payload stays where it is."""

    def read(data: bytes) -> Frame | Malformed:
        try:
            end, payload = _find_payload(data)
            message = kind.FromString(data if payload is None else data[:end])  # type: ignore[attr-defined]
        except (DecodeError, ValueError) as error:
            return Malformed(f"what arrived is no {kind.__name__}: {error}")
        if message.payload:
            return Malformed(f"the payload of a {kind.__name__} must come last")
        message.ClearField("padding")
        return Frame(message, () if payload is None else (payload,))

    return read


def pieces(
    buffers: Sequence[Buffer], step: int = 0, index: int = 0, limit: int = MAX_PIECE_BYTES
) -> Iterator[tuple[pb.Piece, list[Buffer]]]:
    """The buffers, one after the other, in pieces of at most `limit` bytes. There is always a first piece."""
    total = sum(map(len, buffers))
    count = max(1, -(-total // limit))
    rest = [memoryview(buffer) for buffer in reversed(buffers) if len(buffer)]
    for number in range(count):
        parts: list[Buffer] = []
        room = limit
        while rest and room:
            view = rest.pop()
            if len(view) > room:
                rest.append(view[room:])
                view = view[:room]
            parts.append(view)
            room -= len(view)
        yield pb.Piece(step=step, index=index, number=number, count=count, total_bytes=total), parts


class Assembler:
    """Puts the pieces of one message after the other together. Announced sizes are checked before memory is taken.

    Args:
        kind: the header that messages have: "activation", "gradient" or "bundle".
        limit: largest message, in bytes.
    """

    def __init__(self, kind: str, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._kind = kind
        self._limit = limit
        self._first: pb.Piece | None = None
        self._next = 0
        self._buffer = bytearray()
        self._filled = 0

    @property
    def started(self) -> bool:
        """Whether a message has begun and not ended."""
        return self._first is not None

    def add(self, piece: pb.Piece, payload: Buffer) -> Message | None:
        """The message when this was its last piece.

        Raises:
            ProtocolError: the piece does not follow the one before, or sizes are beyond the limit or do not agree.
        """
        first = self._first
        if first is None:
            first = self._begin(piece)
            if piece.count == 1 and len(payload) == piece.total_bytes:
                return Message(piece.step, piece.index, getattr(piece, self._kind), payload)
            self._first, self._next, self._filled = piece, 0, 0
            self._buffer = bytearray(piece.total_bytes)
        same = ("step", "index", "count", "total_bytes")
        if piece.number != self._next or any(getattr(piece, name) != getattr(first, name) for name in same):
            raise ProtocolError(
                f"piece {piece.number} of message ({piece.step}, {piece.index}) came where piece {self._next} of "
                f"({first.step}, {first.index}) was due"
            )
        end = self._filled + len(payload)
        last = piece.number == piece.count - 1
        if end > first.total_bytes or (end == first.total_bytes) != last:
            raise ProtocolError(f"a message of {first.total_bytes} bytes brings another number of bytes")
        self._buffer[self._filled : end] = payload
        self._filled, self._next = end, self._next + 1
        if not last:
            return None
        buffer, self._buffer, self._first = self._buffer, bytearray(), None
        return Message(piece.step, piece.index, getattr(first, self._kind), memoryview(buffer).toreadonly())

    def _begin(self, piece: pb.Piece) -> pb.Piece:
        if piece.WhichOneof("header") != self._kind:
            raise ProtocolError(f"a message without its {self._kind} header")
        if not 0 <= piece.total_bytes <= self._limit:
            raise ProtocolError(f"a message of {piece.total_bytes} bytes is refused; at most {self._limit} are allowed")
        if piece.number or not 1 <= piece.count <= max(1, piece.total_bytes):
            raise ProtocolError(f"a message begins with piece {piece.number} of {piece.count}")
        header = getattr(piece, self._kind)
        tensors = [*header.tensors, *getattr(header, "targets", ())]
        if any(tensor.data_bytes < 0 or tensor.scale_bytes < 0 for tensor in tensors):
            raise ProtocolError("a tensor of less than 0 bytes")
        announced = sum(tensor.data_bytes + tensor.scale_bytes for tensor in tensors)
        if announced != piece.total_bytes:
            raise ProtocolError(f"tensors of {announced} bytes in a message of {piece.total_bytes}")
        return piece


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _find_payload(data: bytes) -> tuple[int, memoryview | None]:
    """Where the payload's field begins and the payload, found by stepping over the fields before it."""
    position = 0
    while position < len(data):
        start = position
        tag, position = _read_varint(data, position)
        if tag & 7 == 2:
            length, position = _read_varint(data, position)
            if length > len(data) - position:
                raise ValueError(f"a field of {length} bytes in a frame of {len(data)}")
            if tag == _PAYLOAD_TAG and position + length == len(data):
                return start, memoryview(data)[position:]
            position += length
        elif tag & 7 == 0:
            _, position = _read_varint(data, position)
        else:
            raise ValueError("a field of an unknown kind")
    return len(data), None


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number without an end")
