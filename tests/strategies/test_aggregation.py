"""Aggregation against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation import TaskModel, mean_loss, normalised_average, other_arrays
from strategies.replies import Update


def update(client: str, value: float, num_examples: int, num_steps: int, **arrays: np.ndarray) -> Update:
    return Update(
        client=client,
        task="t",
        arrays={"t/w": np.full(2, value, dtype=np.float32), **{f"t/{key}": array for key, array in arrays.items()}},
        num_examples=num_examples,
        num_steps=num_steps,
        num_held=10,
        mean_loss=value,
    )


START = {"t/w": np.full(2, 1.0, dtype=np.float32)}


def test_equal_steps_give_the_weighted_average() -> None:
    found = normalised_average([update("a", 2.0, 30, 5), update("b", 6.0, 10, 5)], START)
    np.testing.assert_array_equal(found["t/w"], np.full(2, 3.0, dtype=np.float32))
    assert found["t/w"].dtype == np.float32


def test_uneven_steps_are_normalised_as_in_fednova() -> None:
    # p = (3/4, 1/4), tau = (6, 2): 1 / tau_eff = 3/24 + 1/8, so tau_eff = 4. Moves per step:
    # (7 - 1) / 6 = 1 and (5 - 1) / 2 = 2. x = 1 + 4 * (3/4 * 1 + 1/4 * 2) = 6; the plain average would be 6.5.
    found = normalised_average([update("a", 7.0, 30, 6), update("b", 5.0, 10, 2)], START)
    np.testing.assert_allclose(found["t/w"], 6.0)


def test_gradient_steps_of_unequal_length_keep_the_fixed_point() -> None:
    """Two quadratics with optima -1 and 1: whoever makes ten times the steps must not pull the model to its side."""
    x = 0.0
    for _ in range(60):
        updates = []
        for client, optimum, steps in (("a", -1.0, 20), ("b", 1.0, 2)):
            y = x
            for _ in range(steps):
                y -= 0.001 * (y - optimum)
            updates.append(update(client, y, 10, steps))
        x = float(normalised_average(updates, {"t/w": np.full(2, x, dtype=np.float32)})["t/w"][0])
    assert abs(x) < 0.02


def test_the_average_stays_among_the_clients_however_unequal_their_steps() -> None:
    steps = {"a": 10, "b": 15, "c": 135, "d": 90}
    updates = [update(client, 2.0, 8 * count, count) for client, count in steps.items()]
    np.testing.assert_allclose(normalised_average(updates, START)["t/w"], 2.0)


def test_weights_by_examples_held() -> None:
    found = normalised_average([update("a", 2.0, 30, 5), update("b", 6.0, 10, 5)], START, weighting="held")
    np.testing.assert_array_equal(found["t/w"], np.full(2, 4.0, dtype=np.float32))


def test_sums_are_in_float64_and_in_the_order_of_names() -> None:
    rng = np.random.default_rng(0)
    updates = [update(f"c{index}", float(rng.normal()) * 10.0 ** rng.integers(-6, 6), 7, 3) for index in range(9)]
    ordered = normalised_average(updates, START)["t/w"]
    for seed in range(5):
        shuffled = list(np.random.default_rng(seed).permutation(np.array(updates, dtype=object)))
        assert normalised_average(shuffled, START)["t/w"].tobytes() == ordered.tobytes()


def test_counters_are_taken_over_and_statistics_averaged_without_normalising() -> None:
    def with_buffers(client: str, num_examples: int, steps: int, var: float) -> Update:
        return update(
            client, 1.0, num_examples, steps,
            num_batches_tracked=np.asarray(steps), flag=np.asarray(steps > 5), running_var=np.asarray(var),
        )  # fmt: skip

    start = {
        **START,
        "t/num_batches_tracked": np.asarray(0),
        "t/flag": np.asarray(False),
        "t/running_var": np.asarray(1.0),
    }
    updates = [with_buffers("b", 30, 10, 2.0), with_buffers("a", 10, 1, 6.0), with_buffers("c", 30, 3, 2.0)]
    for found in (normalised_average(updates, start), other_arrays(updates, start)):
        assert found["t/num_batches_tracked"] == 10  # b: heaviest, first by name
        assert found["t/num_batches_tracked"].dtype == np.int64
        assert found["t/flag"].dtype == np.bool_
        assert found["t/flag"]
        assert found["t/running_var"] == pytest.approx((30 * 2 + 10 * 6 + 30 * 2) / 70)


def test_mean_loss_is_over_examples() -> None:
    assert mean_loss([update("a", 1.0, 30, 1), update("b", 3.0, 10, 1)]) == pytest.approx(1.5)
    assert mean_loss([]) is None


# ------------------------------------------------------------------------------- models that the server knows


def sgd(start: float, optimum: float, steps: int, momentum: float = 0.0) -> float:
    """Steps of 0.1 down half the squared distance to `optimum`."""
    x, velocity = start, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + (x - optimum)
        x -= 0.1 * velocity
    return x


def test_sgd_on_a_quadratic_at_one_two_and_five_steps() -> None:
    # From 1 towards 0 by 0.1 of the way: 0.9, 0.81 and 0.59049, moves of -0.1, -0.19 and -0.40951. Equal weights:
    # 1 / tau_eff = (1 + 1/2 + 1/5) / 3 = 17/30. x = 1 - 30/17 * (0.1 + 0.095 + 0.081902) / 3.
    assert [sgd(1.0, 0.0, steps) for steps in (1, 2, 5)] == pytest.approx([0.9, 0.81, 0.59049])
    updates = [update(f"c{steps}", sgd(1.0, 0.0, steps), 10, steps) for steps in (1, 2, 5)]
    assert normalised_average(updates, START)["t/w"][0] == pytest.approx(1 - 10 / 17 * 0.276902, abs=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_effective_steps_are_the_gradients_that_momentum_adds_up(steps: int, nesterov: bool) -> None:
    velocity = total = 0.0
    for _ in range(steps):
        velocity = 0.9 * velocity + 1.0
        total += 1.0 + 0.9 * velocity if nesterov else velocity
    model = TaskModel(trainable=frozenset({"t/w"}), momentum=0.9, nesterov=nesterov)
    assert model.effective_steps(steps) == pytest.approx(total)
    assert TaskModel().effective_steps(steps) == steps


def test_with_momentum_known_unequal_steps_keep_the_fixed_point() -> None:
    """Optima -1 and 1, five steps against one: counted plainly, momentum lets the five pull harder."""

    def rest(model: TaskModel | None) -> float:
        x = 0.0
        for _ in range(300):
            updates = []
            for client, optimum, steps in (("a", -1.0, 5), ("b", 1.0, 1)):
                y, velocity = x, 0.0
                for _ in range(steps):
                    velocity = 0.9 * velocity + (y - optimum)
                    y -= 0.002 * velocity
                updates.append(update(client, y, 10, steps))
            x = float(normalised_average(updates, {"t/w": np.full(2, x, dtype=np.float32)}, model=model)["t/w"][0])
        return x

    assert abs(rest(TaskModel(trainable=frozenset({"t/w"}), momentum=0.9))) < 0.03
    assert rest(None) < -0.3


def test_frozen_parameters_stay_and_buffers_are_averaged_as_they_are() -> None:
    model = TaskModel(trainable=frozenset({"t/w"}), frozen=frozenset({"t/f"}))
    start = {**START, "t/f": np.full(2, 0.1, dtype=np.float32), "t/ema": np.asarray(0.0, dtype=np.float32)}
    updates = [
        update(client, 2.0, examples, steps, f=np.full(2, 9.0, dtype=np.float32), ema=np.asarray(ema, dtype=np.float32))
        for client, examples, steps, ema in (("a", 30, 6, 1.0), ("b", 10, 1, 5.0))
    ]
    found = normalised_average(updates, start, model=model)
    np.testing.assert_array_equal(found["t/f"], start["t/f"])
    assert found["t/ema"] == 2.0  # (30 * 1 + 10 * 5) / 40, whatever the steps
    np.testing.assert_allclose(found["t/w"], 2.0)
