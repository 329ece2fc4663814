"""Profiles learnt from reports: under hidden errors rounds approach the bound; bad reports do no lasting harm."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpu_runtime.contracts import Report, TaskReport
from strategies.profiles import ProfileBook
from tests.strategies.fakes import bent_task, cost, profile_of
from tests.strategies.fluid import FluidFleet


def book_of(*profiles: object, sharing_mode: str = "competitive") -> ProfileBook:
    book = ProfileBook(sharing_mode)
    book.enter(profiles)  # type: ignore[arg-type]
    return book


def report(seconds: float, client: str = "a", **examples: int) -> Report:
    tasks = tuple(
        TaskReport(task=task, num_examples=number, num_steps=1, seconds=seconds) for task, number in examples.items()
    )
    return Report(client=client, server_round=1, seconds=seconds, clock="virtual", tasks=tasks)


def cost_of(book: ProfileBook, task: str = "x", client: str = "a") -> float:
    """Seconds of the device one example takes."""
    return book.load_of(client).device_cost_s(task, book.sharing_mode)


@pytest.mark.parametrize("sharing_mode", ["competitive", "sequential"])
@pytest.mark.parametrize("noisy", [False, True])
def test_rounds_approach_the_true_bound_under_hidden_errors(sharing_mode: str, noisy: bool) -> None:
    first, later = [], []
    for seed in range(8):
        fleet = FluidFleet.random(6, seed, sharing_mode=sharing_mode)
        book = book_of(*fleet.profiles, sharing_mode=sharing_mode)
        noise = np.random.default_rng(seed) if noisy else None
        ratios = [fleet.play(book, noise) for _ in range(6)]
        first.append(ratios[0])
        later.append(np.mean(ratios[3:]))
    assert np.mean(first) > 1.15  # there is something to learn
    assert np.mean(later) < (1.06 if noisy else 1.04)
    assert max(later) < 1.12


def test_right_profiles_stay_right() -> None:
    fleet = FluidFleet.random(4, 0, error=0.0)
    book = book_of(*fleet.profiles)
    assert [fleet.play(book) for _ in range(3)] == pytest.approx([1.0] * 3, rel=0.01)
    for profile in fleet.profiles:
        for task in book.load_of(profile.client).tasks:
            assert cost_of(book, task, profile.client) == pytest.approx(
                fleet.truth[profile.client].device_cost_s(task, "competitive"), rel=0.01
            )


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e3, 1e300])
def test_one_mad_report_does_not_wreck_the_estimate(seconds: float) -> None:
    book = book_of(profile_of("a", {"x": (100, 0.01)}))
    for _ in range(3):
        book.learn(report(1.0, x=100))
    before = cost_of(book)
    book.learn(report(seconds, x=100))
    assert cost_of(book) == pytest.approx(before, rel=0.1)
    book.learn(report(1.0, x=100))
    assert cost_of(book) == pytest.approx(0.01, rel=0.1)


def test_a_client_that_stays_slow_is_believed_the_second_time() -> None:
    book = book_of(profile_of("a", {"x": (100, 0.01)}))
    for _ in range(5):
        book.learn(report(1.0, x=100))
    book.learn(report(4.0, x=100))
    assert cost_of(book) == pytest.approx(0.01, rel=0.1)
    book.learn(report(4.0, x=100))
    assert cost_of(book) == pytest.approx(0.04, rel=0.1)
    # And back again, as fast.
    book.learn(report(1.0, x=100))
    book.learn(report(1.0, x=100))
    assert cost_of(book) == pytest.approx(0.01, rel=0.1)


def test_repeated_nonsense_is_never_believed() -> None:
    book = book_of(profile_of("a", {"x": (100, 0.01)}))
    for _ in range(5):
        book.learn(report(1e6, x=100))
    assert cost_of(book) == pytest.approx(0.01, rel=0.1)


def test_changing_loads_tell_tasks_apart() -> None:
    # Believed 0.01 each, in truth x is half and y is twice as dear.
    book = book_of(profile_of("a", {"x": (100, 0.01), "y": (100, 0.01)}))
    for x, y in ((80, 20), (20, 80), (90, 10), (10, 90), (50, 50), (95, 5), (5, 95)):
        book.learn(report(x * 0.0075 + y * 0.0125, x=x, y=y))
    assert cost_of(book, "x") == pytest.approx(0.0075, rel=0.05)
    assert cost_of(book, "y") == pytest.approx(0.0125, rel=0.05)


def test_in_turn_each_task_shows_its_own_seconds_after_fixed_ones_and_the_download() -> None:
    book = book_of(profile_of("a", {"x": (100, 0.01), "y": (100, 0.01)}, fixed_s=1.0), sharing_mode="sequential")
    in_turn = report(7.0, x=100, y=100)  # 1 s fixed, 2 s download, 1.2 s x, 0.8 s y, 2 s upload
    in_turn = bent_task(bent_task(in_turn, "x", seconds=4.2), "y", seconds=5.0)
    for _ in range(4):
        book.learn(in_turn, download_s=2.0, upload_s=2.0)
    assert cost_of(book, "x") == pytest.approx(0.012, rel=0.02)
    assert cost_of(book, "y") == pytest.approx(0.008, rel=0.02)


def test_a_round_not_trained_to_the_end_teaches_nothing() -> None:
    book = book_of(profile_of("a", {"x": (100, 0.01), "y": (100, 0.01)}))
    for outcome in ("failed", "cancelled"):
        book.learn(bent_task(report(9.0, x=100, y=100), "y", outcome=outcome))
    book.learn(bent_task(report(9.0, x=100, y=100), "y", num_examples=0))
    book.learn(replace(report(9.0), tasks=()))
    assert cost_of(book, "x") == cost_of(book, "y") == 0.01


def test_costs_nobody_measured_are_guessed_and_soon_corrected() -> None:
    book = book_of(
        profile_of("a", {"x": (100, 0.0), "z": (10, 0.0)}),
        profile_of("b", {"x": (100, 0.01)}),
        profile_of("c", {"x": (100, 0.03)}),
    )
    assert book.guessed == {("a", "x"), ("a", "z")}
    assert book.load_of("a").tasks["x"].solo_cost_s == pytest.approx(0.02)
    assert book.load_of("a").tasks["z"].solo_cost_s == 1.0
    assert book.is_costed()
    for _ in range(2):
        book.learn(report(5.0, x=100))
    assert cost_of(book) == pytest.approx(0.05, rel=0.1)


def test_a_client_that_returns_keeps_corrections_unless_its_profile_changed() -> None:
    profile = profile_of("a", {"x": (100, 0.01)})
    book = book_of(profile)
    book.learn(report(1.2, x=100))
    learnt = cost_of(book)
    assert learnt > 0.011
    book.enter([profile])
    assert cost_of(book) == learnt
    book.enter([replace(profile, tasks=(replace(profile.tasks[0], cost=cost(0.02)),))])
    assert cost_of(book) == 0.02
    assert math.isfinite(learnt)
