"""Costs of blocks on a clock that the blocks themselves move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpu_runtime import block_costs
from gpu_runtime.block_costs import bytes_per_example, measure_blocks


class Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Timed(torch.autograd.Function):
    """Hands its input on, and moves the clock."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        block.clock.now_s += block.call_s + len(inputs) * block.example_s
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        block, (gradient,) = ctx.block, gradients
        block.clock.now_s += 2 * (block.call_s + len(gradient) * block.example_s)
        return gradient, None


class Block(nn.Module):
    """Backward takes twice as long as forward."""

    def __init__(self, clock: Clock, call_s: float, example_s: float) -> None:
        super().__init__()
        self.clock, self.call_s, self.example_s = clock, call_s, example_s
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = Timed.apply(inputs * self.weight, self)
        return moved


class Model(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(block_costs, "time", clock)
    return clock


def test_call_and_example_are_told_apart(clock: Clock) -> None:
    model = Model(Block(clock, 2.0, 0.5), Block(clock, 0.0, 1.0), Block(clock, 4.0, 0.0))
    costs = measure_blocks(model, loss, (torch.ones(8, 3), torch.zeros(8, 3)), 1e6, lambda: None)
    found = [(cost.forward_call_s, cost.forward_s, cost.backward_call_s, cost.backward_s) for cost in costs]
    expected = [(2.0, 0.5, 4.0, 1.0), (0.0, 1.0, 0.0, 2.0), (4.0, 0.0, 8.0, 0.0)]
    for have, want in zip(found, expected, strict=True):
        assert have == pytest.approx(want, abs=1e-9)
    assert [cost.boundary_bytes for cost in costs] == [12, 12, 12]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2, 3), torch.zeros(2, 3)),
        # A target that is not per example: the batch cannot be cut.
        (torch.ones(8, 3), torch.zeros(3)),
    ],
)
def test_one_batch_size_says_nothing_of_the_call(clock: Clock, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    (cost,) = measure_blocks(Model(Block(clock, 2.0, 0.5)), loss, batch, 1e6, lambda: None)
    assert cost.forward_call_s == cost.backward_call_s == 0.0
    assert cost.forward_s == pytest.approx(0.5 + 2.0 / len(batch[0]))


def test_the_budget_ends_it(clock: Clock) -> None:
    model = Model(Block(clock, 1.0, 0.0))
    measure_blocks(model, loss, (torch.ones(8, 3), torch.zeros(8, 3)), 0.0, lambda: None)
    # One pass to warm up and two more, of two batches each, of 1 + 2 s.
    assert clock.now_s == 3 * 2 * 3.0


def test_bytes_of_labels() -> None:
    assert bytes_per_example(torch.zeros(4, dtype=torch.int64), 4) == 8
    assert bytes_per_example({"mask": torch.zeros(2, 5, 5, dtype=torch.uint8), "box": torch.zeros(2, 4)}, 2) == 41
