"""The privacy layer: norms bounded, noise of the size asked for, gradients as of the clipped activation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_channel import LocalChannel
from split_fakes import ACCESS, Split, distance, key_of, run, service, split_training, whole_arrays

from gpu_runtime.pipeline.halves import join_halves
from gpu_runtime.pipeline.privacy import PrivacyLayer
from gpu_runtime.work import TrainingError


def norms(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor.double().flatten(1).square().sum(1) for tensor in tensors]).sum(0).sqrt()


@settings(deadline=None)
@given(scale=st.floats(1e-3, 1e3), clip=st.floats(1e-2, 1e2), seed=st.integers(0, 1000))
def test_the_norm_over_all_tensors_of_an_example_is_bounded(scale: float, clip: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, two = torch.randn(4, 3, 2, generator=generator) * scale, torch.randn(4, 5, generator=generator) * scale
    clipped = PrivacyLayer(clip, 0.0)((one, two))
    expected = norms(one, two).clamp_max(clip)
    torch.testing.assert_close(norms(*clipped), expected, rtol=1e-5, atol=0.0)


def test_numbers_to_check_by_hand() -> None:
    small, large = torch.tensor([[0.3, 0.4]]), torch.tensor([[3.0, 4.0]])
    whole = torch.tensor([7])
    assert PrivacyLayer(0.0, 0.0)((large, whole))[0] is large
    clipped, kept = PrivacyLayer(1.0, 0.0)((torch.cat((small, large)), whole))
    torch.testing.assert_close(clipped, torch.tensor([[0.3, 0.4], [0.6, 0.8]]))
    assert kept is whole


def test_gradients_go_through_the_clip() -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(3, 4, dtype=torch.float64) * torch.tensor([[0.01], [1.0], [100.0]])).requires_grad_()
    layer = PrivacyLayer(0.5, 0.0)
    assert torch.autograd.gradcheck(lambda t: layer((t,))[0], (tensor,))
    nothing = torch.zeros(1, 4, requires_grad=True)
    layer((nothing,))[0].sum().backward()
    assert nothing.grad is not None
    assert torch.equal(nothing.grad, torch.ones(1, 4))


def test_noise_is_a_multiple_of_the_clip() -> None:
    (noisy,) = PrivacyLayer(2.0, 0.5, seed=1)((torch.zeros(100, 100),))
    assert float(noisy.std()) == pytest.approx(1.0, abs=0.05)
    assert float(noisy.mean()) == pytest.approx(0.0, abs=0.05)


def test_noise_repeats_only_where_its_seed_is_given() -> None:
    zeros = (torch.zeros(2, 3),)
    assert torch.equal(PrivacyLayer(1.0, 1.0, seed=1)(zeros)[0], PrivacyLayer(1.0, 1.0, seed=1)(zeros)[0])
    assert not torch.equal(PrivacyLayer(1.0, 1.0)(zeros)[0], PrivacyLayer(1.0, 1.0)(zeros)[0])
    layer = PrivacyLayer(1.0, 1.0, seed=1)
    assert not torch.equal(layer(zeros)[0], layer(zeros)[0])


@pytest.mark.parametrize(("clip", "noise"), [(-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0), (0.0, 0.1)])
def test_faulty_settings_are_refused(clip: float, noise: float) -> None:
    with pytest.raises(TrainingError, match="activation_"):
        PrivacyLayer(clip, noise)


def test_training_with_clip_and_noise() -> None:
    workload = Split()
    whole = whole_arrays(workload)

    def apart(**options: float) -> float:
        with service(workload) as stages:
            training = split_training(
                workload,
                LocalChannel(stages),
                split_point=2,
                access=dataclasses.replace(ACCESS, **options),  # type: ignore[arg-type]
                noise_seed=1,
            )
            run(training)
            half = stages.collect(key_of("split"))
        return distance(join_halves(training.arrays, half.arrays, list(whole)), whole)

    assert apart(activation_clip=1e6) < 1e-12
    assert apart(activation_clip=0.1) > 1e-3
    assert apart(activation_clip=1e3, activation_noise=1e-6) < apart(activation_clip=1e3, activation_noise=1e-4) < 0.1
