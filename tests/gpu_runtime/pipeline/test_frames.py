"""Frames: payloads beside protobuf that are protobuf all the same, and messages in pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.frames import Assembler, Buffer, Frame, Malformed, Message, pieces, reader, write
from gpu_runtime.pipeline.session import ProtocolError

read = reader(pb.ClientFrame)


def frame(parts: list[bytes]) -> Frame:
    return Frame(pb.ClientFrame(piece=pb.Piece(step=3, index=1, count=1)), parts)


@given(st.lists(st.binary(max_size=300), max_size=4))
@example([bytes(1 << 20)])
def test_frames_are_read_as_they_were_written_and_are_protobuf(parts: list[bytes]) -> None:
    data = write(frame(parts))
    payload = b"".join(parts)
    got = read(data)
    assert isinstance(got, Frame)
    assert bytes(got.payload) == payload
    assert got.message == pb.ClientFrame(piece=pb.Piece(step=3, index=1, count=1))
    standard = pb.ClientFrame.FromString(data)
    assert standard.payload == payload
    # As another implementation would write it: without padding.
    plain = read(pb.ClientFrame(piece=standard.piece, payload=payload).SerializeToString())
    assert isinstance(plain, Frame)
    assert bytes(plain.payload) == payload


@given(st.integers(1, 5000), st.text(max_size=40))
def test_payloads_begin_at_a_multiple_of_16_and_are_not_copied(size: int, text: str) -> None:
    message = pb.ClientFrame(piece=pb.Piece(activation=pb.Activation(structure=text)))
    data = write(Frame(message, [bytes(size)]))
    assert (len(data) - size) % 16 == 0
    got = read(data)
    assert isinstance(got, Frame)
    assert isinstance(got.payload, memoryview)
    assert got.payload.obj is data


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_malformed(data: bytes) -> None:
    assert isinstance(read(data), Frame | Malformed)


@pytest.mark.parametrize(
    "data",
    [
        b"\x7a\xff\xff\xff\xff\x0fabc",  # a payload of 4 GB
        b"\x7a\x01ab",  # a payload and a byte too many
        b"\x7a",
        b"\x12\x7f",
        b"\xff" * 20,
        b"\x7a\x01a\x0a\x00",  # a field behind the payload
    ],
)
def test_frames_that_lie_about_their_length_are_malformed(data: bytes) -> None:
    assert isinstance(read(data), Malformed)


def header(total_bytes: int) -> pb.Activation:
    return pb.Activation(tensors=[pb.Tensor(data_bytes=total_bytes)])


def put_together(buffers: list[bytes], limit: int) -> tuple[list[int], Message | None]:
    assembler = Assembler("activation")
    sizes, message = [], None
    views: list[Buffer] = [memoryview(buffer) for buffer in buffers]
    for piece, parts in pieces(views, 5, 2, limit):
        assert message is None
        if piece.number == 0:
            piece.activation.CopyFrom(header(sum(map(len, buffers))))
        payload = b"".join(parts)
        sizes.append(len(payload))
        message = assembler.add(piece, payload)
    assert not assembler.started
    return sizes, message


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 60))
def test_pieces_are_at_most_so_large_and_give_the_message_back(buffers: list[bytes], limit: int) -> None:
    sizes, message = put_together(buffers, limit)
    total = sum(map(len, buffers))
    assert all(size == limit for size in sizes[:-1])
    assert 0 < sizes[-1] <= limit or total == 0
    assert message is not None
    assert (message.step, message.index, bytes(message.payload)) == (5, 2, b"".join(buffers))


def test_ten_bytes_in_pieces_of_four() -> None:
    assert put_together([b"0123456", b"789"], 4)[0] == [4, 4, 2]


def test_an_announced_size_takes_no_memory() -> None:
    """A piece that announces 4 GB is refused by the limit; one below it takes address space, not memory."""
    piece = pb.Piece(count=1024, total_bytes=4 << 30, activation=header(4 << 30))
    with pytest.raises(ProtocolError, match="4294967296 bytes is refused"):
        Assembler("activation").add(piece, b"x")


@pytest.mark.parametrize(
    ("changes", "payload", "text"),
    [
        ({"number": 2}, b"4567", "was due"),
        ({"number": 0}, b"4567", "was due"),
        ({"step": 6}, b"4567", "was due"),
        ({"index": 3}, b"4567", "was due"),
        ({"count": 4}, b"4567", "was due"),
        ({"total_bytes": 11}, b"4567", "was due"),
        ({}, b"456789", "another number of bytes"),
        ({}, b"456789x", "another number of bytes"),
    ],
)
def test_pieces_that_do_not_follow_are_refused(changes: dict[str, int], payload: bytes, text: str) -> None:
    assembler = Assembler("activation")
    first = pb.Piece(step=5, index=2, count=3, total_bytes=10, activation=header(10))
    assert assembler.add(first, b"0123") is None
    assert assembler.started
    second = pb.Piece(step=5, index=2, number=1, count=3, total_bytes=10)
    for name, value in changes.items():
        setattr(second, name, value)
    with pytest.raises(ProtocolError, match=text):
        assembler.add(second, payload)


@pytest.mark.parametrize(
    "piece",
    [
        pb.Piece(count=1, total_bytes=10, activation=header(9)),
        pb.Piece(count=1, total_bytes=-1, activation=header(-1)),
        pb.Piece(count=1, total_bytes=0, activation=pb.Activation(tensors=[pb.Tensor(data_bytes=5, scale_bytes=-5)])),
        pb.Piece(count=0, total_bytes=10, activation=header(10)),
        pb.Piece(count=11, total_bytes=10, activation=header(10)),
        pb.Piece(number=-1, count=1, total_bytes=10, activation=header(10)),
        pb.Piece(count=1, total_bytes=10),
        pb.Piece(count=1, total_bytes=10, gradient=pb.Gradient()),
    ],
)
def test_beginnings_that_cannot_be_are_refused(piece: pb.Piece) -> None:
    with pytest.raises(ProtocolError):
        Assembler("activation").add(piece, bytes(10))
