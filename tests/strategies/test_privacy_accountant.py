"""The accountant against the exact guarantee of composed Gaussians and against numeric integration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from strategies.privacy_accountant import PrivacyAccountant, epsilon_of, gaussian_rdp


def exact_epsilon(num_rounds: int, noise_multiplier: float, delta: float) -> float:
    """Balle and Wang, ICML 2018, theorem 8: rounds compose to one Gaussian of mu = sqrt(rounds) / z."""
    mu = math.sqrt(num_rounds) / noise_multiplier

    def excess(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0.0, 500.0))


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("num_rounds", [1, 10, 100])
def test_epsilon_is_above_the_exact_one_and_near_it(num_rounds: int, noise_multiplier: float) -> None:
    exact = exact_epsilon(num_rounds, noise_multiplier, 1e-5)
    assert exact <= epsilon_of(num_rounds, noise_multiplier, 1e-5) <= 1.15 * exact


@pytest.mark.parametrize("order", [2, 5, 16])
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_sampled_divergence_is_that_of_the_integral(order: int, rate: float) -> None:
    z = 1.5
    x = np.linspace(-40.0, 80.0, 400_001)
    ratio = np.log1p(rate * np.expm1((2 * x - 1) / (2 * z * z)))
    integral = np.trapezoid(np.exp(order * ratio + norm.logpdf(x, scale=z)), x)
    assert gaussian_rdp(order, z, rate) == pytest.approx(math.log(integral) / (order - 1), rel=1e-6)


def test_more_rounds_cost_more_and_more_noise_and_rarer_sampling_cost_less() -> None:
    rounds = [epsilon_of(number, 1.0, 1e-5) for number in (0, 1, 2, 10, 100)]
    noise = [epsilon_of(10, z, 1e-5) for z in (4.0, 2.0, 1.0, 0.5)]
    rates = [epsilon_of(10, 1.0, 1e-5, rate) for rate in (0.0, 0.01, 0.1, 0.5, 0.999, 1.0)]
    assert rounds[0] == 0.0
    for values in (rounds, noise, rates):
        assert all(low < high for low, high in itertools.pairwise(values)), values


def test_the_guarantee_is_that_of_the_client_used_most_and_once_a_round() -> None:
    accountant = PrivacyAccountant(1.0, 1e-5)
    assert accountant.epsilon == 0.0
    for clients in (["a", "b", "a"], ["a"], ["c"]):
        accountant.count_round(clients)
    assert accountant.contributions == {"a": 2, "b": 1, "c": 1}
    assert accountant.epsilon == epsilon_of(2, 1.0, 1e-5)


def test_a_sampled_client_pays_for_every_round() -> None:
    accountant = PrivacyAccountant(1.0, 1e-5, sampling_rate=0.1)
    for clients in (["a"], ["b"], []):
        accountant.count_round(clients)
    assert accountant.epsilon == epsilon_of(3, 1.0, 1e-5, 0.1)
