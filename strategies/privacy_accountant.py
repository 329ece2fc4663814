"""What repeated Gaussian noise guarantees: Renyi differential privacy composed over rounds, as (epsilon, delta)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

# Whole orders, of which the sampled mechanism has a closed form; dense where typical guarantees have their optimum.
ORDERS: tuple[int, ...] = (*range(2, 65), *range(68, 257, 4), *range(272, 1025, 16))
# Where a guarantee is weak its optimum lies below 2; only the mechanism without sampling is as simple there.
LOW_ORDERS = tuple(1.0 + k / 50.0 for k in range(1, 50))


def gaussian_rdp(order: float, noise_multiplier: float, sampling_rate: float = 1.0) -> float:
    """Renyi divergence of `order` that one round costs.

    Without sampling order / (2 z^2) (Mironov, CSF 2017, prop. 7). Where each client takes part by its own coin of
    probability q (Poisson sampling, and no other), Mironov, Talwar and Zhang, 2019, section 3.3:

        1 / (a - 1) * log sum_k C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 z^2))
    """
    if sampling_rate == 1.0:
        return order / (2.0 * noise_multiplier**2)
    whole = int(order)
    terms = [
        math.log(math.comb(whole, k))
        + (whole - k) * math.log1p(-sampling_rate)
        + k * math.log(sampling_rate)
        + (k * k - k) / (2.0 * noise_multiplier**2)
        for k in range(whole + 1)
    ]
    largest = max(terms)
    return (largest + math.log(math.fsum(math.exp(term - largest) for term in terms))) / (whole - 1)


def epsilon_of(num_rounds: int, noise_multiplier: float, delta: float, sampling_rate: float = 1.0) -> float:
    """The least epsilon over all orders (Canonne, Kamath and Steinke, NeurIPS 2020, prop. 12):

    rdp + log(1 - 1 / a) - (log delta + log a) / (a - 1)
    """
    if num_rounds == 0 or sampling_rate == 0.0:
        return 0.0
    orders = (*LOW_ORDERS, *ORDERS) if sampling_rate == 1.0 else ORDERS
    found = (
        num_rounds * gaussian_rdp(order, noise_multiplier, sampling_rate)
        + math.log1p(-1.0 / order)
        - (math.log(delta) + math.log(order)) / (order - 1)
        for order in orders
    )
    return max(0.0, min(found))


class PrivacyAccountant:
    """Counts, per client, the rounds its data went into, each at most once; the guarantee is the worst client's.

    Args:
        noise_multiplier: standard deviation of the noise over the most that one client moves the sum; above 0.
        delta: of the guarantee.
        sampling_rate: probability of each client's own coin. 1 claims nothing for choosing clients in any other way.
    """

    def __init__(self, noise_multiplier: float, delta: float, sampling_rate: float = 1.0) -> None:
        self.delta = delta
        self._noise_multiplier = noise_multiplier
        self._sampling_rate = sampling_rate
        self._rounds = 0
        self.contributions: Counter[str] = Counter()

    def count_round(self, clients: Iterable[str]) -> None:
        """One noisy sum was made, of the updates of `clients`, however many updates each had in it."""
        self._rounds += 1
        self.contributions.update(set(clients))

    @property
    def epsilon(self) -> float:
        """So far. A sampled client pays for every round: that it might have taken part is what protects it."""
        worst = self._rounds if self._sampling_rate < 1.0 else max(self.contributions.values(), default=0)
        return epsilon_of(worst, self._noise_multiplier, self.delta, self._sampling_rate)
