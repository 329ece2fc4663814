"""Activations and gradients as bytes: fp32 (as they are), fp16, int8."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

RAW = "raw"


class EncodingError(ValueError):
    """Bytes that are not what they say they are; the text names the fault."""


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """A tensor on the wire. `dtype` and `shape` are those of the tensor, `encoding` is how `data` holds it.

    `raw` is the tensor's own bytes, in C order.
    """

    encoding: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    scales: bytes = b""


def encode(tensor: torch.Tensor, encoding: str, generator: torch.Generator | None = None) -> EncodedTensor:
    """`tensor` as bytes. Tensors of whole numbers are never encoded but as they are."""
    tensor = tensor.detach().to("cpu").contiguous()
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return EncodedTensor(
        encoding=RAW,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=flat.numpy().data,
    )


def decode(encoded: EncodedTensor) -> torch.Tensor:
    """The tensor, on the host; it may share memory with `encoded` and must not be written to."""
    dtype = getattr(torch, encoded.dtype)
    if 0 in encoded.shape:
        return torch.empty(encoded.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # not writable: nobody writes
        return torch.frombuffer(encoded.data, dtype=dtype).reshape(encoded.shape)
