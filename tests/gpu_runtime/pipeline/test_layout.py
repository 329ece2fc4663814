"""Gradients come back as rows of bytes and go backward in the memory format of what they belong to."""

import torch

from gpu_runtime.pipeline.encoding import decode, encode
from gpu_runtime.pipeline.stages import laid_out_as


def test_a_decoded_gradient_gets_the_layout_of_its_activation() -> None:
    activation = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    received = decode(encode(torch.randn(2, 3, 4, 5), "fp32"))
    laid_out = laid_out_as(activation, received)
    assert laid_out.stride() == activation.stride() != received.stride()
    assert torch.equal(laid_out, received)


def test_others_stay_as_they_are() -> None:
    for like in (torch.randn(2, 3, 4, 5), torch.randn(2, 3)):
        received = torch.randn(like.shape)
        assert laid_out_as(like, received) is received
