"""Profiling measures, and leaves no trace of having done so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import Dropping, Normed, Pictures, Rows

from gpu_runtime import profile_cache, profiler
from gpu_runtime.contracts import TaskCost
from gpu_runtime.device import Device
from gpu_runtime.profile_cache import CostKey
from gpu_runtime.profiler import Profiler, measure, model_hash, speed_curve

CPU = Device(name="test", kind="cpu", num_cores=2)
KEY = CostKey(device="d", num_cores=2, driver="", torch_version="2", model_hash="m", batch_size=8)
COST = TaskCost(demand=0.7, solo_cost_s=0.01, speed_curve=((0.5, 0.7), (1.0, 1.0)))


@pytest.fixture(autouse=True)
def random_state_is_restored() -> Iterator[None]:
    torch.manual_seed(11)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", [Normed, Dropping])
def test_a_profiled_model_is_left_bit_for_bit(kind: type[Pictures]) -> None:
    workload = kind("task")
    with torch.random.fork_rng(devices=[]):
        model = workload.build_model().eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    measure(workload, CPU, budget_s=0.05, model=model)
    assert not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_measured_cost() -> None:
    cost = measure_quickly(Pictures("pictures"))
    assert 0 < cost.demand <= 1
    assert cost.solo_cost_s > 0
    assert [share for share, _ in cost.speed_curve] == [0.5, 1.0]
    assert cost.speed_curve[-1] == (1.0, 1.0)
    # V = c_one_thread / (cores c) and s(1/cores) = c / c_one_thread, so V s(1/cores) cores = 1, up to the clip of V.
    assert cost.demand * cost.speed_curve[0][1] * 2 == pytest.approx(1.0) or cost.demand == 1.0
    for block in cost.blocks:
        parts = (block.forward_s, block.forward_call_s, block.backward_s, block.backward_call_s)
        assert all(part >= 0 for part in parts)
        assert block.forward_s + block.forward_call_s > 0
        assert block.backward_s + block.backward_call_s > 0
    assert cost.update_s > 0
    assert cost.target_bytes == 8


def measure_quickly(workload: Pictures) -> TaskCost:
    return Profiler(budget_s=0.05, use_disk=False).cost(workload, CPU)


def test_boundary_bytes_by_hand() -> None:
    cost = measure_quickly(Pictures("pictures"))
    # 4x8x8, 4x4x4 and 3 numbers of 4 bytes.
    assert [block.boundary_bytes for block in cost.blocks] == [1024, 256, 12]


def test_peak_memory_counts_what_stays() -> None:
    cost = measure_quickly(Rows("rows"))
    parameters = 64 * 16 + 16 + 16 * 3 + 3
    batch = 8 * 64 * 4 + 8 * 8
    # Weights, gradients and momentum, the batch, and some activations.
    assert 3 * 4 * parameters + batch < cost.peak_memory_bytes < 3 * 4 * parameters + batch + 8 * 64 * 4 * 4


def test_one_core_has_one_thread_and_full_demand() -> None:
    cost = Profiler(budget_s=0.05, use_disk=False).cost(Rows("rows"), Device(name="t", kind="cpu", num_cores=1))
    assert (cost.demand, cost.speed_curve) == (1.0, ((1.0, 1.0),))


def test_costs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def fake(workload: Pictures, device: Device, **_: object) -> TaskCost:
        measured.append(workload.name)
        return COST

    monkeypatch.setattr(profiler, "measure", fake)
    first = Profiler()
    for repeat in (first, first, Profiler()):
        assert repeat.cost(Rows("a"), CPU) == COST
    assert measured == ["a"]
    # Another task, architecture, number of cores, batch size or code is another cost.
    Profiler().cost(Rows("b"), CPU)
    Profiler().cost(Normed("a"), CPU)
    Profiler().cost(Rows("a"), Device(name="test", kind="cpu", num_cores=1))
    larger = Rows("a")
    larger.batch_size = 9
    Profiler().cost(larger, CPU)
    monkeypatch.setattr(profiler, "code_hash", lambda workload: "edited")
    Profiler().cost(Rows("a"), CPU)
    assert measured == ["a", "b", "a", "a", "a", "a"]


def test_architectures_hash_by_modules_and_shapes() -> None:
    with torch.random.fork_rng(devices=[]):
        one, same, other = Rows("a").build_model(), Rows("b").build_model(), Dropping("c").build_model()
    assert model_hash(one) == model_hash(same) != model_hash(other)


# ------------------------------------------------------------------------------------------------------------ cache


def test_what_is_stored_is_loaded(cache_directory: Path) -> None:
    assert profile_cache.load(KEY) is None
    assert profile_cache.store(KEY, COST)
    assert profile_cache.load(KEY) == COST
    assert [path.suffix for path in (cache_directory / "profiles").iterdir()] == [".json"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema": 99}', b"\xff\xfe\x00"])
def test_a_damaged_file_is_ignored_and_replaced(cache_directory: Path, damage: bytes) -> None:
    profile_cache.store(KEY, COST)
    (path,) = (cache_directory / "profiles").iterdir()
    path.write_bytes(damage)
    assert profile_cache.load(KEY) is None
    assert profile_cache.store(KEY, COST)
    assert profile_cache.load(KEY) == COST


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not profile_cache.store(KEY, COST)
    assert profile_cache.load(KEY) is None


# ------------------------------------------------------------------------------------------------------ speed curve


@given(st.dictionaries(st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.floats(0.01, 1.5), min_size=1))
def test_speed_curves_rise_are_concave_and_end_at_one(samples: dict[float, float]) -> None:
    curve = ((0.0, 0.0), *speed_curve(samples))
    assert curve[-1] == (1.0, 1.0)
    slopes = [(s1 - s0) / (v1 - v0) for (v0, s0), (v1, s1) in pairwise(curve)]
    assert all(slope >= 0 for slope in slopes)
    assert all(after <= before + 1e-9 for before, after in pairwise(slopes))


def test_a_speed_curve_by_hand() -> None:
    assert speed_curve({0.5: 0.7, 1.0: 1.0}) == ((0.5, 0.7), (1.0, 1.0))
    # Two threads slower than one: the second is not used.
    assert speed_curve({0.5: 1.0, 1.0: 0.8}) == ((0.5, 1.0), (1.0, 1.0))


# ----------------------------------------------------------------------------------------------------------- memory


def test_a_task_whose_batch_does_not_fit_is_measured_in_micro_batches() -> None:
    class Short(Rows):
        seen: ClassVar[list[int]] = []

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(targets))
            if len(targets) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().loss(outputs, targets)

    cost = measure_quickly(Short("rows"))
    assert Short.seen[:3] == [8, 4, 2]
    assert set(Short.seen[2:]) == {2}
    assert cost.solo_cost_s > 0
    assert len(cost.blocks) == 3
