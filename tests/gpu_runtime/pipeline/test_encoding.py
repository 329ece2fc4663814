"""Encodings: exact where they say so, unbiased and bounded where they do not, and suspicious of everything."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.pipeline.encoding import (
    DTYPES,
    MAX_TENSOR_BYTES,
    EncodedTensor,
    EncodingError,
    decode,
    encode,
    expected_bytes,
    num_channels,
)

SHAPES = [(), (0,), (5,), (3, 4), (0, 4), (2, 3, 0), (2, 3, 4), (2, 3, 4, 5), (1, 1, 1, 1)]


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scales_of(encoded: EncodedTensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(encoded.scales), dtype=torch.float32)


def along(scales: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Scales as they multiply: channels are dimension 1 of three and more, examples of two."""
    return scales.reshape({0: (), 1: (1,), 2: (-1, 1), 3: (1, -1, 1), 4: (1, -1, 1, 1)}[dimensions])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DTYPES)
def test_fp32_is_exact_for_every_type(name: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape, generator=generator()) * 100).to(DTYPES[name])
    encoded = encode(tensor, "fp32")
    assert encoded.encoding == "raw"
    assert len(encoded.data) == tensor.numel() * tensor.element_size()
    back = decode(encoded)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "int8"])
def test_whole_numbers_are_never_touched(encoding: str) -> None:
    for tensor in (torch.tensor([2**62 + 1, -3]), torch.tensor([True, False]), torch.tensor([255], dtype=torch.uint8)):
        encoded = encode(tensor, encoding, generator())
        assert encoded.encoding == "raw"
        assert torch.equal(decode(encoded), tensor)


def test_fp32_shares_memory_and_copies_only_what_is_not_in_order() -> None:
    tensor = torch.zeros(4)
    encoded = encode(tensor, "fp32")
    tensor[0] = 7.0
    assert decode(encoded)[0] == 7.0


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "int8"])
def test_memory_layout_does_not_matter(encoding: str) -> None:
    tensor = torch.randn(2, 3, 4, 5, generator=generator())
    want = decode(encode(tensor, encoding, generator()))
    strided = torch.empty(2, 3, 4, 10)[..., ::2].copy_(tensor)
    for other in (tensor.to(memory_format=torch.channels_last), strided, tensor.clone().requires_grad_()):
        assert torch.equal(decode(encode(other, encoding, generator())), want)


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp16_is_rounding_to_half(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=generator()).to(DTYPES[name])
    encoded = encode(tensor, "fp16")
    assert len(encoded.data) == 2 * tensor.numel()
    assert len(encoded.scales) == (4 if tensor.numel() and name != "float16" else 0)
    back = decode(encoded)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor.to(torch.float16).to(tensor.dtype))


@given(exponent=st.integers(-37, 37), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_fp16_keeps_eleven_bits_of_tensors_of_any_magnitude(exponent: int, seed: int) -> None:
    """Also of values that are far below the largest one: gradients are small, and spread widely."""
    tensor = torch.randn(400, generator=generator(seed)) * 10.0**exponent
    tensor[1::2] = tensor[1::2].sign() * tensor.abs().max() * 2.0**-13
    encoded = encode(tensor, "fp16")
    torch.testing.assert_close(decode(encoded), tensor, rtol=2.0**-11, atol=0)
    (scale,) = scales_of(encoded).tolist()
    assert math.log2(scale).is_integer()


def test_fp16_loses_only_what_is_nothing_beside_the_largest() -> None:
    back = decode(encode(torch.tensor([1e-17, 1e-3, 0.0, -1e-3]), "fp16"))
    torch.testing.assert_close(back, torch.tensor([0.0, 1e-3, 0.0, -1e-3]), rtol=2.0**-11, atol=0)
    back = decode(encode(torch.tensor([1e-8, 1.0]), "fp16"))
    torch.testing.assert_close(back, torch.tensor([1e-8, 1.0]), rtol=0, atol=2.0**-25)
    assert torch.equal(decode(encode(torch.zeros(3), "fp16")), torch.zeros(3))


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_takes_a_byte_a_number_and_a_scale_a_channel(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=generator())
    encoded = encode(tensor, "int8", generator())
    assert len(encoded.data) == tensor.numel()
    assert len(encoded.scales) == (4 * num_channels(shape) if tensor.numel() else 0)
    assert decode(encoded).shape == shape


@given(
    shape=st.sampled_from([shape for shape in SHAPES if 0 not in shape]),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 2**31),
    nearest=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_int8_is_within_a_scale(shape: tuple[int, ...], exponent: int, seed: int, nearest: bool) -> None:
    """For every magnitude that float32 has, subnormal ones too. To nearest, it is half of that."""
    tensor = torch.randn(shape, generator=generator(seed)) * (torch.tensor(10.0) ** exponent)
    encoded = encode(tensor, "int8", None if nearest else generator(seed))
    scales = along(scales_of(encoded), tensor.dim())
    error = (decode(encoded).double() - tensor.double()).abs()
    assert (error <= scales.double() * (0.5001 if nearest else 1.0001)).all()
    assert (scales <= tensor.abs().max() / 127 * 1.0001 + 2e-38).all()


def test_int8_is_unbiased() -> None:
    """The mean of 4,000 roundings of a number is the number: 5 standard errors of at most half a scale each."""
    values = torch.tensor([-1.0, -0.7431, -0.001, 0.0, 0.0039, 0.1234, 0.5, 1.0])
    tensor = values.expand(4000, 8)
    encoded = encode(tensor, "int8", generator())
    scale = 1.0 / 127
    assert torch.allclose(scales_of(encoded), torch.full((4000,), scale))
    off = (decode(encoded).mean(dim=0) - values).abs()
    assert (off <= 5 * 0.5 * scale / math.sqrt(4000)).all()
    nearest = (decode(encode(tensor, "int8")).mean(dim=0) - values).abs()
    assert nearest.max() > off.max()


def test_int8_keeps_zeros_and_constant_channels() -> None:
    tensor = torch.zeros(3, 4, 5, 5)
    tensor[:, 1] = 3.25
    tensor[:, 2] = -1e-30
    back = decode(encode(tensor, "int8", generator()))
    assert torch.equal(back[:, 0], tensor[:, 0])
    assert torch.equal(back[:, 3], tensor[:, 3])
    torch.testing.assert_close(back[:, 1:3], tensor[:, 1:3], rtol=1 / 120, atol=0)


def test_int8_channels_do_not_disturb_each_other() -> None:
    tensor = torch.ones(2, 2, 3, 3)
    tensor[:, 0] = 1e6
    back = decode(encode(tensor, "int8"))
    torch.testing.assert_close(back, tensor, rtol=1e-6, atol=0)


def test_int8_repeats_with_its_generator_and_only_with_it() -> None:
    tensor = torch.randn(4, 8, 3, 3, generator=generator())
    one, same, other = (bytes(encode(tensor, "int8", generator(seed)).data) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 3, 4, 5)])
def test_what_is_not_finite_is_named(encoding: str, value: float, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    tensor[1] = value
    where = (1, *[0] * (len(shape) - 1))
    with pytest.raises(EncodingError, match=rf"values are not finite, the first is {value} at \({where[0]},"):
        encode(tensor, encoding, generator())


def test_what_half_precision_cannot_hold_is_named() -> None:
    with pytest.raises(EncodingError, match="1 of 2 values are not finite in fp16"):
        encode(torch.tensor([1.0, 1e50], dtype=torch.float64), "fp16")
    with pytest.raises(EncodingError, match="beyond float32"):
        encode(torch.tensor([1e300], dtype=torch.float64), "int8")


def test_large_numbers_whose_sum_is_not_finite_are_fine() -> None:
    tensor = torch.full((4,), 3e38)
    assert torch.equal(decode(encode(tensor, "fp32")), tensor)
    half = torch.full((4,), 6e4, dtype=torch.float16)
    assert torch.equal(decode(encode(half, "fp16")), half)


def test_unknown_encodings_and_types_are_refused() -> None:
    with pytest.raises(EncodingError, match="unknown encoding 'int4'"):
        encode(torch.zeros(1), "int4")
    with pytest.raises(EncodingError, match="complex64"):
        encode(torch.zeros(1, dtype=torch.complex64), "fp32")


GOOD = encode(torch.ones(2, 3, 4), "int8")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": "complex64"},
        {"dtype": "int64"},
        {"encoding": "int4"},
        {"encoding": "raw"},
        {"encoding": "fp16"},
        {"shape": (2, 3, 5)},
        {"shape": (2, 3)},
        {"shape": (-1, 3, 4)},
        {"shape": (2.0, 3, 4)},
        {"shape": (2, 3, 4) + (1,) * 6},
        {"shape": (0, 1 << 29, 1 << 29)},
        {"shape": (1 << 62, 4)},
        {"data": bytes(23)},
        {"data": b""},
        {"scales": b""},
        {"scales": bytes(16)},
        {"scales": b"\xff" * 12},
        {"scales": torch.tensor([1.0, -1.0, 1.0]).numpy().tobytes()},
        {"scales": torch.tensor([1.0, 3e38, 1.0]).numpy().tobytes()},
    ],
    ids=str,
)
def test_bytes_that_do_not_agree_are_refused(change: dict[str, object]) -> None:
    assert torch.allclose(decode(GOOD), torch.ones(2, 3, 4))
    with pytest.raises(EncodingError):
        decode(replace(GOOD, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_nothing_that_is_not_finite_comes_off_the_wire(name: str) -> None:
    data = torch.tensor([0.0, math.nan]).to(DTYPES[name]).numpy().tobytes()
    with pytest.raises(EncodingError, match=r"1 of 2 values are not finite, the first is nan at \(1,\)"):
        decode(EncodedTensor(encoding="raw", dtype=name, shape=(2,), data=data))


def test_sizes_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(EncodingError, match="beyond"):
        expected_bytes("raw", "float64", (MAX_TENSOR_BYTES // 8 + 1,))
    assert expected_bytes("raw", "float64", (MAX_TENSOR_BYTES // 8,)) == (MAX_TENSOR_BYTES, 0)


def test_data_at_odd_addresses_can_be_read() -> None:
    whole = b"x" + torch.arange(3.0).numpy().tobytes()
    encoded = EncodedTensor(encoding="raw", dtype="float32", shape=(3,), data=memoryview(whole)[1:])
    assert torch.equal(decode(encoded), torch.arange(3.0))
