"""Steps as graphs: when one is used, that it does what an eager step does, and what happens when it cannot.

A capture is played by a function that computes nothing until it is replayed, as CUDA's does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from runtime_fakes import Dropping, Normed, Pictures, Rows
from torch import nn

from gpu_runtime.contracts import TaskPlan
from gpu_runtime.graphs import WARM_UP_STEPS, Capture, CudaCapture, GraphedStep, why_not
from gpu_runtime.training import Origin, TaskTraining

CPU = torch.device("cpu")
ORIGIN = Origin(client="a", server_round=1, seed=7)
Body = Callable[[], torch.Tensor]


@dataclasses.dataclass
class FakeCapture:
    """Counts captures and replays; `spoil` is called after each replay."""

    captures: int = 0
    replays: int = 0
    spoil: Callable[[], None] = lambda: None

    def __call__(self, body: Body) -> Body:
        self.captures += 1

        def replay() -> torch.Tensor:
            self.replays += 1
            loss = body()
            self.spoil()
            return loss

        return replay


def first_weights(workload: Pictures) -> dict[str, np.ndarray]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return {name: value.numpy().copy() for name, value in workload.build_model().state_dict().items()}


def train(workload: Pictures, capture: Capture | None, num_examples: int = 100, **plan: Any) -> TaskTraining:
    work = TaskTraining(
        workload=workload,
        plan=TaskPlan(task=workload.name, num_examples=num_examples, **plan),
        arrays=first_weights(workload),
        origin=ORIGIN,
        device=CPU,
        capture=capture,
    )
    while not work.finished:
        work.step()
    work.finish()
    return work


def same(a: TaskTraining, b: TaskTraining) -> bool:
    return all(np.array_equal(a.arrays[name], b.arrays[name]) for name in b.arrays) and a.losses == b.losses


@pytest.mark.parametrize("kind", [Pictures, Normed, Rows])
@pytest.mark.parametrize("plan", [{}, {"proximal_mu": 0.5}, {"learning_rate": 0.001}])
def test_weights_and_losses_are_those_of_eager_steps(kind: type[Pictures], plan: dict[str, Any]) -> None:
    capture = FakeCapture()
    graphed = train(kind("task"), capture, **plan)
    assert same(graphed, train(kind("task"), None, **plan))
    assert graphed.notes == ()
    # 13 steps of 8: the first and the warm-up are eager, so is the last with its 4 examples; the capture's own step
    # is taken twice and compared.
    assert (capture.captures, capture.replays) == (1, 13 - 1 - WARM_UP_STEPS - 1)


def test_steps_that_draw_random_numbers_are_eager() -> None:
    capture = FakeCapture()
    assert same(train(Dropping("task"), capture), train(Dropping("task"), None))
    assert capture.captures == 0


def test_a_workload_may_refuse() -> None:
    workload, capture = Pictures("task"), FakeCapture()
    workload.cuda_graph = False  # type: ignore[attr-defined]
    train(workload, capture)
    assert capture.captures == 0


def test_what_cannot_be_captured_goes_on_eagerly() -> None:
    def fails(body: Body) -> Body:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nsome advice")

    graphed = train(Normed("task"), fails)
    assert same(graphed, train(Normed("task"), None))
    (note,) = graphed.notes
    assert note == "CUDA graph not used: RuntimeError: CUDA error: operation not permitted when stream is capturing"


def test_a_graph_that_does_something_else_is_not_used() -> None:
    workload = Pictures("task")
    seen: list[nn.Module] = []
    build = workload.build_model

    def remember() -> nn.Module:
        seen.append(build())
        return seen[-1]

    workload.build_model = remember  # type: ignore[method-assign]

    def spoil() -> None:
        with torch.no_grad():
            next(seen[-1].parameters()).mul_(1.5)

    capture = FakeCapture(spoil=spoil)
    graphed = train(workload, capture)
    assert same(graphed, train(Pictures("task"), None))
    assert capture.replays == 1
    assert "its first step differs from an eager one by" in graphed.notes[0]


def test_state_in_attributes_prevents_a_graph() -> None:
    workload = Pictures("task")
    build = workload.build_model

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.calls = build().blocks, 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.blocks(inputs) / self.calls

    workload.build_model = Counting  # type: ignore[method-assign, assignment]
    capture = FakeCapture()
    (note,) = train(workload, capture).notes
    assert "keeps state in attributes" in note
    assert capture.captures == 0


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.SGD, ""),
        (torch.optim.Adam, ""),
        (torch.optim.AdamW, ""),
        (torch.optim.Adagrad, "CUDA graph not used: Adagrad may compute on the host"),
        (type("Own", (torch.optim.SGD,), {}), "CUDA graph not used: Own may compute on the host"),
    ],
)
def test_optimizers(optimizer: type[torch.optim.Optimizer], reason: str) -> None:
    made = optimizer([nn.Parameter(torch.ones(2))], lr=0.1)  # type: ignore[call-arg]
    assert why_not(made) == reason
    if "capturable" in made.defaults:
        assert made.param_groups[0]["capturable"]


def test_memory_goes_with_the_training() -> None:
    model = nn.Linear(2, 2)
    graph = GraphedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda batch: batch[0].sum(), FakeCapture())
    graph.close()
    assert graph.take((torch.ones(1), torch.ones(1))) is None


# ------------------------------------------------------------------------------------------------- on a fake of CUDA


class FakeGraph:
    """Notes what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def capture_begin(self, capture_error_mode: str) -> None:
        self._calls.append(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self._calls.append("end")

    def replay(self) -> None:
        self._calls.append("replay")


class FakeCuda:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self.calls)

    def current_stream(self, device: torch.device) -> FakeCuda:
        return self

    def synchronize(self) -> None:
        self.calls.append("stream synchronized")


def test_a_capture_on_cuda() -> None:
    cuda, loss = FakeCuda(), torch.tensor(1.0)

    def body() -> torch.Tensor:
        cuda.calls.append("body")
        return loss

    replay = CudaCapture(torch.device("cuda", 0), cuda)(body)
    assert cuda.calls == ["stream synchronized", "begin thread_local", "body", "end"]
    assert replay() is loss
    assert cuda.calls[-1] == "replay"


def test_a_capture_that_fails_is_ended() -> None:
    cuda = FakeCuda()

    def body() -> torch.Tensor:
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaCapture(torch.device("cuda", 0), cuda)(body)
    assert cuda.calls[-1] == "end"


# ----------------------------------------------------------------------------------------------------------- on CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Pictures, Normed, Rows])
def test_graphs_on_a_device_do_what_eager_steps_do(kind: type[Pictures]) -> None:
    device = torch.device("cuda", 0)
    results = []
    for wanted in (True, False):
        workload = kind("task")
        workload.cuda_graph = wanted  # type: ignore[attr-defined]
        work = TaskTraining(
            workload=workload,
            plan=TaskPlan(task="task", num_examples=200),
            arrays=first_weights(workload),
            origin=ORIGIN,
            device=device,
        )
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            while not work.finished:
                work.step()
            assert (work._graph is not None and work._graph._replay is not None) == wanted, work.notes
            work.finish()
        results.append(work.arrays)
    for name, value in results[1].items():
        assert np.allclose(results[0][name], value, rtol=1e-3, atol=1e-4), name
