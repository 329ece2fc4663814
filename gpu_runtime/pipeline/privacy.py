"""The privacy layer at the end of a device stage: activations clipped and blurred before they leave the device."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch

from gpu_runtime.work import TrainingError


class PrivacyLayer:
    """Clips each example's activations to an L2 norm of `clip` and adds Gaussian noise of std `noise * clip`.

    The norm is taken over all floating-point tensors of an example that cross, together. Clipping is differentiable, so
    that the device stage trains through it; noise is added after it. Tensors of whole numbers pass as they are.

    Args:
        clip: largest norm; 0 leaves activations as they are.
        noise: standard deviation as a multiple of `clip`.
        seed: of the noise. Whoever knows it can take the noise off again, so it is secret unless given (a run that must
            repeat bit for bit gives it, and has no privacy from whoever knows the run's seed).

    Raises:
        TrainingError: a clip or noise that is negative or not finite, or noise without a clip.
    """

    def __init__(self, clip: float, noise: float, seed: int | None = None) -> None:
        for name, value in (("activation_clip", clip), ("activation_noise", noise)):
            if not (math.isfinite(value) and value >= 0):
                raise TrainingError(f"{name} must be finite and not negative, not {value}")
        if noise and not clip:
            raise TrainingError("activation_noise is a multiple of activation_clip, which is 0")
        self._clip, self._std = clip, noise * clip
        self._seed = secrets.randbits(63) if seed is None else seed
        self._generator: torch.Generator | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`tensors`, whose first dimension is examples, fit to leave the device."""
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not self._clip or not floats:
            return tuple(tensors)
        exact = torch.float64 if any(tensor.dtype == torch.float64 for tensor in floats) else torch.float32
        squares = torch.stack([tensor.to(exact).reshape(len(tensor), -1).square().sum(1) for tensor in floats]).sum(0)
        # min(1, clip / norm), without a root at 0, where it has no gradient.
        factors = self._clip / squares.clamp_min(self._clip**2).sqrt()
        return tuple(self._covered(tensor, factors) if tensor.is_floating_point() else tensor for tensor in tensors)

    def _covered(self, tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        clipped = tensor * factors.to(tensor.dtype).reshape(-1, *(1,) * (tensor.ndim - 1))
        if not self._std:
            return clipped
        if self._generator is None:
            self._generator = torch.Generator(tensor.device).manual_seed(self._seed)
        noise = torch.randn(tensor.shape, generator=self._generator, device=tensor.device, dtype=tensor.dtype)
        return clipped + self._std * noise
