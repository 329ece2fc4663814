"""Activations and gradients as bytes: fp32 (as they are), fp16 with a scale, int8 with scales, stochastically rounded.

Nothing that is not finite gets on or off the wire; sizes are checked before anything is allocated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

RAW, FP16, INT8 = "raw", "fp16", "int8"
MAX_TENSOR_BYTES = 1 << 30
MAX_DIMENSIONS = 8
_LEVELS = 127
_MAX_HALF = torch.finfo(torch.float16).max
# Tensors whose largest value lies between these go into fp16 as they are.
_LEAST_UNSCALED = 1.0
# Others are brought to below this power of two; beyond +-126 the scale would be no normal float32.
_HALF_EXPONENT = 15
_MAX_EXPONENT = 126
_SCALE_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny

_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_WHOLES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
DTYPES = {**_FLOATS, **_WHOLES}


class EncodingError(ValueError):
    """Bytes that are not what they say they are, or values that cannot be sent; the text names the fault."""


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """A tensor on the wire. `dtype` and `shape` are those of the tensor, `encoding` is how `data` holds it.

    `raw` is the tensor's own bytes, `fp16` half-precision values to be multiplied by the tensor's scale, `int8` whole
    numbers in -127..127 to be multiplied by their channel's; all in C order and in the byte order of little-endian
    machines. `scales` are float32: of fp16 one, a power of two, of int8 one a channel (`num_channels`).
    """

    encoding: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    scales: bytes | memoryview = b""


def num_channels(shape: tuple[int, ...]) -> int:
    """How many scales int8 has for a tensor of that shape.

    Of three and more dimensions, (N, C, ...): one for each of C, over the whole micro-batch, because a scale per
    example and channel would outweigh the numbers of small feature maps. Of two, (N, features): one an example. Of
    fewer: one.
    """
    if len(shape) >= 3:
        return shape[1]
    return shape[0] if len(shape) == 2 else 1


def encode(tensor: torch.Tensor, encoding: str, generator: torch.Generator | None = None) -> EncodedTensor:
    """`tensor` as bytes; they may share its memory, so it must not change any more.

    Whole numbers are never encoded but as they are; "fp32" leaves every tensor as it is (float64 stays float64). int8
    is unbiased: each value is rounded up with the probability of its fraction, so that |x - decoded| <= scale (plus
    the rounding of a 16-bit `dtype`). Without a `generator` it is rounded to nearest. fp16 keeps 11 bits of values
    down to 2**-14 of the tensor's largest one; smaller ones are off by up to 2**-25 of that.

    Raises:
        EncodingError: a value that is not finite or, for fp16 and int8, far beyond float32; an unknown encoding or
            dtype.
    """
    tensor = tensor.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise EncodingError(f"a tensor of type {dtype} cannot be sent")
    shape = tuple(tensor.shape)
    if dtype in _WHOLES or encoding in ("fp32", RAW) or (encoding == FP16 and dtype == "float16"):
        _refuse_non_finite(tensor, "")
        return EncodedTensor(encoding=RAW, dtype=dtype, shape=shape, data=_bytes_of(tensor))
    if encoding == FP16:
        half, scales = _halved(tensor)
        return EncodedTensor(
            encoding=FP16, dtype=dtype, shape=shape, data=_bytes_of(half), scales=bytes(_bytes_of(scales))
        )
    if encoding == INT8:
        numbers, scales = _quantise(tensor, generator)
        return EncodedTensor(
            encoding=INT8, dtype=dtype, shape=shape, data=_bytes_of(numbers), scales=bytes(_bytes_of(scales))
        )
    raise EncodingError(f"unknown encoding {encoding!r}")


def check(encoded: EncodedTensor) -> None:
    """Whether type, shape and number of bytes agree, without touching the values.

    Raises:
        EncodingError: they do not.
    """
    data_bytes, scale_bytes = expected_bytes(encoded.encoding, encoded.dtype, encoded.shape)
    if len(encoded.data) != data_bytes or len(encoded.scales) != scale_bytes:
        raise EncodingError(
            f"a tensor of type {encoded.dtype}, shape {encoded.shape} and encoding {encoded.encoding} has {data_bytes} "
            f"+ {scale_bytes} bytes, not {len(encoded.data)} + {len(encoded.scales)}"
        )


def expected_bytes(encoding: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of the data and of the scales of such a tensor.

    Raises:
        EncodingError: there is no such tensor, or it is beyond `MAX_TENSOR_BYTES`.
    """
    if dtype not in DTYPES:
        raise EncodingError(f"unknown type {dtype!r}"[:100])
    if encoding not in (RAW, FP16, INT8) or (encoding != RAW and dtype not in _FLOATS):
        raise EncodingError(f"unknown encoding {encoding!r} for type {dtype}"[:100])
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size <= MAX_TENSOR_BYTES for size in shape):
        raise EncodingError(f"impossible shape {shape}"[:200])
    extent = math.prod(size for size in shape if size)
    if extent * DTYPES[dtype].itemsize > MAX_TENSOR_BYTES:
        raise EncodingError(f"a tensor of shape {shape} and type {dtype} is beyond {MAX_TENSOR_BYTES} bytes")
    count = 0 if 0 in shape else extent
    item_bytes = {RAW: DTYPES[dtype].itemsize, FP16: 2, INT8: 1}[encoding]
    num_scales = {RAW: 0, FP16: 1, INT8: num_channels(shape)}[encoding] if count else 0
    return count * item_bytes, num_scales * _SCALE_BYTES


def decode(encoded: EncodedTensor) -> torch.Tensor:
    """The tensor, on the host; it may share memory with `encoded` and must not be written to.

    Raises:
        EncodingError: type, shape and bytes do not agree, or a value is not finite.
    """
    check(encoded)
    dtype = DTYPES[encoded.dtype]
    if 0 in encoded.shape:
        return torch.empty(encoded.shape, dtype=dtype)
    if encoded.encoding == RAW:
        if encoded.dtype == "bool":
            return _read(encoded.data, torch.uint8, encoded.shape) != 0
        tensor = _read(encoded.data, dtype, encoded.shape)
    else:
        tensor = _scaled(encoded, dtype)
    _refuse_non_finite(tensor, "")
    return tensor


def _scaled(encoded: EncodedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Values times scales, of fp16 and int8."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    is_half = encoded.encoding == FP16
    scales = _read(encoded.scales, torch.float32, (1 if is_half else num_channels(encoded.shape),))
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise EncodingError("a scale is negative or not finite")
    numbers = _read(encoded.data, torch.float16 if is_half else torch.int8, encoded.shape)
    if is_half:
        scale = scales.item()
        return numbers.to(dtype) if scale == 1.0 else numbers.to(wide).mul_(scale).to(dtype)
    return (numbers.to(wide) * _along_channels(scales, numbers.dim())).to(dtype)


def _halved(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-precision values and their one scale, so that small gradients do not become zero."""
    if not tensor.numel():
        return tensor.to(torch.float16), torch.empty(0)
    low, high = torch.aminmax(tensor)
    largest = max(-low.item(), high.item())
    if not math.isfinite(largest):
        _refuse_non_finite(tensor, "")
    exponent = 0
    if not _LEAST_UNSCALED <= largest <= _MAX_HALF and largest > 0:
        exponent = max(-_MAX_EXPONENT, min(_MAX_EXPONENT, _HALF_EXPONENT - math.frexp(largest)[1]))
        wide = tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
        tensor = wide * 2.0**exponent
    half = tensor.to(torch.float16)
    if largest * 2.0**exponent > _MAX_HALF:
        _refuse_non_finite(half, " in fp16")
    return half, torch.tensor([2.0**-exponent])


def _quantise(tensor: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers in -127..127 and float32 scales, both where `tensor` is, or on the generator's device."""
    if generator is not None and generator.device.type != tensor.device.type:
        tensor = tensor.to(generator.device)
    wide = tensor.contiguous()
    if wide.dtype != torch.float64:
        wide = wide.to(torch.float32)
    if not wide.numel():
        return torch.empty(wide.shape, dtype=torch.int8), torch.empty(0)
    others = [i for i in range(wide.dim()) if i != (1 if wide.dim() >= 3 else 0)] if wide.dim() >= 2 else None
    low, high = (torch.amin(wide, others), torch.amax(wide, others)) if others else (wide.min(), wide.max())
    largest = torch.maximum(-low, high).reshape(-1)
    scales = (largest / _LEVELS).to(torch.float32)
    if not bool(torch.isfinite(scales).all()):
        _refuse_non_finite(tensor, "")
        raise EncodingError("values beyond float32 cannot be sent as int8")
    # A channel of zeros, or of numbers so small that their scale would be none, has the least scale there is.
    scales.clamp_(min=_TINY)
    numbers = wide / _along_channels(scales.to(wide.dtype), wide.dim())
    if generator is None:
        numbers.round_()
    else:
        noise = torch.rand(wide.shape, generator=generator, dtype=torch.float32, device=wide.device)
        numbers.add_(noise).floor_()
    return numbers.clamp_(-_LEVELS, _LEVELS).to(torch.int8), scales


def _along_channels(scales: torch.Tensor, dimensions: int) -> torch.Tensor:
    if dimensions >= 3:
        return scales.reshape(1, -1, *[1] * (dimensions - 2))
    return scales.reshape(-1, 1) if dimensions == 2 else scales.reshape([1] * dimensions)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    tensor = tensor.to("cpu").contiguous()
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _read(data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # not writable: nobody writes
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).reshape(shape)


def _all_finite(tensor: torch.Tensor) -> bool:
    """A sum is several times faster than a look at each value, and not finite where one of them is not."""
    finite: Callable[[Any], bool] = math.isfinite
    return finite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _refuse_non_finite(tensor: torch.Tensor, where: str) -> None:
    if not tensor.is_floating_point() or not tensor.numel() or _all_finite(tensor):
        return
    bad = ~torch.isfinite(tensor)
    first = tuple(int(i) for i in torch.nonzero(bad)[0])
    raise EncodingError(
        f"{int(bad.sum())} of {tensor.numel()} values are not finite{where}, the first is {float(tensor[first])} "
        f"at {first}"
    )
