"""Seconds to encode and decode one number of an activation on this machine, by doing it."""

from __future__ import annotations

import time

import torch

from gpu_runtime.contracts import ENCODINGS, EncodingCost
from gpu_runtime.pipeline.encoding import decode, encode
from gpu_runtime.pipeline.fit import fit_affine

# Examples of 16 x 32 x 32 numbers: activations of a small convolutional net, 64 kB and 1 MiB in fp32.
SHAPE = (16, 32, 32)
NUM_EXAMPLES = (1, 16)
REPEATS = 5


def measure_encodings(device: torch.device | None = None) -> tuple[EncodingCost, ...]:
    """Cost of each encoding, without what a call costs whatever its size; a few milliseconds each.

    Args:
        device: where activations are computed (the host by default): encoding brings them from there, and decoding
            takes gradients there.
    """
    device = device or torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(max(NUM_EXAMPLES), *SHAPE, generator=generator).to(device)
    return tuple(_measure(encoding, numbers, generator) for encoding in ENCODINGS)


def _measure(encoding: str, numbers: torch.Tensor, generator: torch.Generator) -> EncodingCost:
    encode_s: list[tuple[int, float]] = []
    decode_s: list[tuple[int, float]] = []
    for repeat in range(REPEATS + 1):
        for num_examples in NUM_EXAMPLES:
            tensor = numbers[:num_examples]
            _wait(tensor)
            started = time.perf_counter()
            encoded = encode(tensor, encoding, generator)
            between = time.perf_counter()
            decode(encoded).to(tensor.device)
            _wait(tensor)
            if repeat > 0:  # the first warms up
                encode_s.append((tensor.numel(), between - started))
                decode_s.append((tensor.numel(), time.perf_counter() - between))
    return EncodingCost(
        encoding=encoding, encode_s=fit_affine(encode_s).example_s, decode_s=fit_affine(decode_s).example_s
    )


def _wait(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
