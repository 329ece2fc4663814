"""Named arrays as a stream of admin frames, and back: start weights and trained halves on their way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from gpu_runtime.contracts import one_line
from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.encoding import EncodingError, decode, encode
from gpu_runtime.pipeline.frames import Assembler, Frame, Malformed, Message, pieces
from gpu_runtime.pipeline.messages import read_failure, read_tensors, tensor_buffers, tensor_headers
from gpu_runtime.pipeline.session import ProtocolError

MAX_BUNDLE_BYTES = 2 << 30


def bundle_frames(header: pb.Bundle, arrays: Mapping[str, np.ndarray], token: str = "") -> list[Frame]:
    """Frames of `arrays` by name; `header` is filled in and goes first. Raises EncodingError that names an array."""
    tensors = []
    for name, array in arrays.items():
        try:
            tensors.append(encode(torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)), "fp32"))
        except (EncodingError, TypeError) as error:
            raise EncodingError(f"array {name!r}: {error}") from None
    header.names.extend(arrays)
    header.tensors.extend(tensor_headers(tensors))
    frames = []
    for piece, parts in pieces(tensor_buffers(tensors)):
        if not piece.number:
            piece.bundle.CopyFrom(header)
        frames.append(Frame(pb.AdminFrame(token="" if piece.number else token, piece=piece), parts))
    return frames


def assemble(frames: Iterable[Frame | Malformed]) -> Message:
    """The one message that the frames are. Raises ProtocolError, or the failure that comes in its place."""
    assembler = Assembler("bundle", MAX_BUNDLE_BYTES)
    message = None
    for frame in frames:
        check_frame(frame)
        assert isinstance(frame, Frame)
        if message is not None or not frame.message.HasField("piece"):
            raise ProtocolError("a stream of arrays holds something else")
        message = assembler.add(frame.message.piece, frame.payload)
    if message is None:
        raise ProtocolError("a stream of arrays ends too early")
    return message


def arrays_of(message: Message) -> dict[str, np.ndarray]:
    """The arrays of a bundle by name. Raises ProtocolError."""
    header: pb.Bundle = message.header
    tensors = read_tensors(header.tensors, message.payload)
    if len(header.names) != len(tensors) or len(set(header.names)) != len(tensors):
        raise ProtocolError(f"{len(tensors)} arrays with {len(set(header.names))} different names")
    arrays = {}
    for name, tensor in zip(header.names, tensors, strict=True):
        if tensor is None:
            raise ProtocolError(f"array {one_line(name)!r} is absent")
        try:
            arrays[name] = decode(tensor).numpy()
        except (EncodingError, TypeError) as error:
            raise ProtocolError(f"array {one_line(name)!r}: {error}") from None
    return arrays


def check_frame(frame: Frame | Malformed) -> None:
    """Raises the failure that the frame reports, or ProtocolError where it cannot be read."""
    if isinstance(frame, Malformed):
        raise ProtocolError(frame.text)
    if frame.message.HasField("failure"):
        raise read_failure(frame.message.failure)
