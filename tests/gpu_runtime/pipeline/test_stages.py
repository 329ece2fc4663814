"""Stages keep the whole model's keys, and models that cannot be cut are told why."""

from __future__ import annotations

import warnings

import pytest
import torch
from runtime_fakes import Blocks, Normed, Pictures
from split_fakes import CPU, Skipping, Split, arrays_of
from torch import nn

from gpu_runtime.pipeline.halves import device_keys, server_keys
from gpu_runtime.pipeline.stages import (
    CutError,
    DeviceStage,
    ServerStage,
    block_names,
    changing_state,
    loaded_stage,
    stage_precision,
    unsplittable,
)
from gpu_runtime.state import StateError


@pytest.mark.parametrize("workload", [Pictures("p"), Split(), Skipping()])
def test_stages_have_the_keys_of_the_whole_and_do_what_it_does(workload: Pictures) -> None:
    model = workload.build_model()
    assert unsplittable(model) == ""
    names = block_names(model)
    inputs = workload.train_examples().inputs[:3]
    for split_point in range(1, len(names)):
        device, server = DeviceStage(model, split_point), ServerStage(model, split_point)
        assert tuple(device.state_dict()) == device_keys(model.state_dict(), names, split_point)
        assert tuple(server.state_dict()) == server_keys(model.state_dict(), names, split_point)
        assert torch.equal(server(device(inputs)), model(inputs))


def _shared() -> nn.Module:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    return Blocks(one, nn.Sequential(nn.ReLU(), other))


def _outside() -> nn.Module:
    model = Blocks(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("steps", torch.zeros(1), persistent=False)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(2, 2), "the model has no attribute 'blocks' that is an nn.Sequential"),
        (Blocks(nn.Linear(2, 2)), "the model has fewer than two different blocks"),
        (_outside(), "'steps' lies outside the blocks"),
        (_shared(), "blocks '0' and '1' share a tensor: 'blocks.0.weight' and 'blocks.1.1.weight'"),
        (
            Normed("n").build_model(),
            "'blocks.0.1' normalises by batch statistics: micro-batches and halves would change the result; "
            "use GroupNorm or frozen statistics",
        ),
    ],
)
def test_why_a_model_cannot_be_cut(model: nn.Module, reason: str) -> None:
    assert unsplittable(model) == reason


def test_frozen_statistics_can_be_cut() -> None:
    assert unsplittable(Normed("n").build_model().eval()) == ""
    untracked = Blocks(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)).eval()
    assert "batch statistics" in unsplittable(untracked)


def test_stages_are_loaded_from_whole_models_and_from_their_half() -> None:
    workload = Split()
    arrays = arrays_of(workload)
    for kind in (DeviceStage, ServerStage):
        stage = loaded_stage(kind, workload, arrays, 2, CPU, seed=1)
        half = {key: arrays[key] for key in stage.state_dict()}
        again = loaded_stage(kind, workload, half, 2, CPU, seed=2)
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in stage.state_dict().items())
        assert all(torch.equal(value, torch.from_numpy(arrays[key])) for key, value in stage.state_dict().items())


def test_faults_are_named() -> None:
    workload = Split()
    arrays = arrays_of(workload)
    with pytest.raises(CutError, match="a model of 4 blocks cannot be cut at 4"):
        loaded_stage(DeviceStage, workload, arrays, 4, CPU, seed=1)
    with pytest.raises(CutError, match=r"the model cannot be cut: 'blocks.0.1' normalises"):
        loaded_stage(DeviceStage, Normed("n"), arrays, 1, CPU, seed=1)
    with pytest.raises(StateError, match=r"arrays lack 'blocks.3.1.bias'"):
        loaded_stage(ServerStage, workload, {k: a for k, a in arrays.items() if k != "blocks.3.1.bias"}, 2, CPU, 1)
    with pytest.raises(StateError, match="'extra', which the model does not have"):
        loaded_stage(ServerStage, workload, {**arrays, "extra": arrays["blocks.0.0.bias"]}, 2, CPU, 1)


def test_float16_trains_in_full_precision() -> None:
    class Half(Pictures):
        autocast_dtype = "float16"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there may be no CUDA
        precision, notes = stage_precision(Half("half"), torch.device("cuda"))
    assert notes == ("split training is in full precision instead of float16",)
    assert not precision.scales_losses
    assert stage_precision(Half("half"), CPU)[1] == ()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return inputs


class Masking(nn.Module):
    """Makes its buffer in the first pass, as tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(inputs.shape[1:])
        return inputs * self.mask


class LateCounting(Masking):
    """Its buffer is not there before the first pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mask = torch.zeros(()) if self.mask is None else self.mask + 1
        return inputs


class Frozen(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


@pytest.mark.parametrize(
    ("block", "key"),
    [
        (Counting(), "blocks.1.passes"),
        (LateCounting(), "blocks.1.mask"),
        (Frozen(1), ""),
        (nn.InstanceNorm2d(1, track_running_stats=True), "blocks.1.running_mean"),
        (nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 16, 3)), "blocks.1.parametrizations.weight.0._u"),
        (Masking(), ""),
        (nn.BatchNorm2d(1), "blocks.1.running_mean"),
        (nn.Dropout(), ""),
    ],
)
def test_buffers_that_change_with_every_pass_are_found(block: nn.Module, key: str) -> None:
    reason = changing_state(Blocks(nn.Tanh(), block), torch.rand(2, 1, 4, 4))
    assert reason.startswith(f"{key!r} changes with every forward pass") if key else reason == ""


@pytest.mark.parametrize("seed", range(8))
def test_iterations_that_have_converged_are_found_too(seed: int) -> None:
    """About half of these spectral norms are at their end as they are made; with other weights they are not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 2, 2))
    assert "changes with every forward pass" in changing_state(Blocks(nn.Tanh(), block), torch.rand(2, 1, 4, 4))
