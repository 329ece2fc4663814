"""What every aggregator of one task must do, and what the robust ones withstand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_runtime.contracts import Plan, Report
from strategies.aggregation import TaskModel
from strategies.options import AGGREGATORS, StrategyOptions
from strategies.replies import Update
from strategies.robust import aggregator_of
from strategies.task_aggregators import TaskAggregator
from tests.strategies.rounds import new_game

ROBUST = [name for name in AGGREGATORS if name != "normalised"]
START = {
    "t/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "t/n": np.asarray(0, dtype=np.int64),
    "t/bn.running_var": np.ones(2, dtype=np.float32),
}


def aggregator(name: str) -> TaskAggregator:
    return aggregator_of(StrategyOptions(aggregator=name))


def update(client: str, move: float | np.ndarray, steps: int = 4) -> Update:
    arrays = {
        "t/w": (START["t/w"] + move).astype(np.float32),
        "t/n": np.asarray(steps, dtype=np.int64),
        "t/bn.running_var": np.full(2, 2.0, dtype=np.float32),
    }
    return Update(client=client, task="t", arrays=arrays, num_examples=8 * steps, num_steps=steps, num_held=40)


def honest(number: int = 7) -> list[Update]:
    rng = np.random.default_rng(3)
    return [update(f"c{index}", 1.0 + 0.1 * rng.normal(size=(2, 3))) for index in range(number)]


@pytest.mark.parametrize("name", AGGREGATORS)
def test_types_shapes_and_keys_stay_and_the_order_of_replies_does_not_matter(name: str) -> None:
    found = aggregator(name).aggregate(1, honest(), START)
    again = aggregator(name).aggregate(1, honest()[::-1], START)
    assert list(found) == list(START)
    for key, start in START.items():
        assert (found[key].dtype, found[key].shape) == (start.dtype, start.shape)
        assert found[key].tobytes() == again[key].tobytes()
    assert found["t/n"] == 4
    np.testing.assert_array_equal(found["t/bn.running_var"], [2.0, 2.0])


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_clients_that_agree_get_what_they_agree_on_whatever_their_steps(name: str, number: int) -> None:
    # Moves of 0.5 a step: at equal steps all agree, and one client alone is the average.
    updates = [update(f"c{index}", 1.5, steps=3) for index in range(number)]
    np.testing.assert_allclose(aggregator(name).aggregate(1, updates, START)["t/w"], START["t/w"] + 1.5, rtol=1e-6)
    uneven = [update("a", 2.0, steps=4), update("b", 1.0, steps=2), update("c", 0.5, steps=1)]
    # p = (4, 2, 1) / 7: 1 / tau_eff = 3/7, so all normalised moves are 0.5 * 7/3.
    np.testing.assert_allclose(aggregator(name).aggregate(1, uneven, START)["t/w"], START["t/w"] + 7 / 6, rtol=1e-5)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_frozen_parameters_stay(name: str) -> None:
    how = aggregator(name)
    how.model = TaskModel(frozen=frozenset({"t/w"}))
    np.testing.assert_array_equal(how.aggregate(1, honest(), START)["t/w"], START["t/w"])


LIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "scaled": lambda move: 1e6 * move,
    "far": lambda move: 1e13 * move,
    "sign-flipped": lambda move: -20.0 * move,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_two_liars_of_seven_move_only_the_average_far(name: str, lie: str) -> None:
    updates = honest()
    for index in (2, 5):
        updates[index] = update(f"c{index}", LIES[lie](np.ones((2, 3))))
    error = np.abs(aggregator(name).aggregate(1, updates, START)["t/w"] - START["t/w"] - 1.0).max()
    if name == "normalised":
        assert error > 5.0
    else:
        # Clipped liars still pull with their full weight: from 1 to (5 - 2) / 7 when their signs are flipped.
        assert error < (0.65 if name == "norm-clipping" else 0.25)


def test_the_geometric_median_of_a_line_is_the_middle_point_and_of_a_triangle_its_fermat_point() -> None:
    line = [update(name, move) for name, move in (("a", 0.0), ("b", 1.0), ("c", 50.0))]
    np.testing.assert_allclose(
        aggregator("geometric-median").aggregate(1, line, START)["t/w"], START["t/w"] + 1.0, atol=1e-3
    )
    corners = [np.zeros((2, 3)) for _ in range(3)]
    for corner, (x, y) in zip(corners, ((0.0, 0.0), (1.0, 0.0), (0.5, np.sqrt(0.75))), strict=True):
        corner[0, :2] = x, y
    found = aggregator("geometric-median").aggregate(
        1, [update(f"c{index}", corner) for index, corner in enumerate(corners)], START
    )
    np.testing.assert_allclose(found["t/w"][0, :2] - START["t/w"][0, :2], [0.5, np.sqrt(0.75) / 3], atol=1e-3)


@pytest.mark.parametrize("name", ROBUST)
def test_a_round_with_a_liar_and_a_client_of_nans_goes_on(name: str) -> None:
    def scaled(plan: Plan, arrays: dict, report: Report) -> tuple[dict, Report]:
        return {key: 1e5 * value if key.endswith("/w") else value for key, value in arrays.items()}, report

    def nans(plan: Plan, arrays: dict, report: Report) -> tuple[dict, Report]:
        return {key: np.full_like(value, np.nan) if key == "red/w" else value for key, value in arrays.items()}, report

    game = new_game(aggregator=name)
    game.fleet[0].bend, game.fleet[1].bend = scaled, nans
    before = game.weights
    record = game.play(1)
    assert [line for line in record.refused if "finite" in line]
    assert not [line for line in record.refused if "proportion" in line]  # the aggregator saw the liar
    # Three clients train blue, of which one lies.
    assert not np.array_equal(game.weights["blue/w"], before["blue/w"])
    assert np.abs(game.weights["blue/w"]).max() < 10.0
