"""Settings of a strategy, and the error strategies raise. Imports no flwr, so that settings can be checked cheaply."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpu_runtime.contracts import one_line
from gpu_runtime.settings import describe_range, setting

LOADS = ("auto", "proportional", "equal")
WEIGHTINGS = ("used", "held")
AGGREGATORS = ("normalised", "coordinate-median", "trimmed-mean", "geometric-median", "norm-clipping")
NO_VALUES: Mapping[str, Any] = MappingProxyType({})
BELOW_ONE = 0.999999


class StrategyError(ValueError):
    """A strategy that cannot be found, built or served; the text names the fault and the remedy."""


def cannot_be_made(name: str, error: Exception) -> str:
    """What to say of a user's strategy whose constructor raised `error`."""
    return f"strategy.name {name!r} cannot be made: {one_line(error) or type(error).__name__}"


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Everything a strategy may be told. Defaults are good starting values.

    Fields made by `setting` are read from the run config; the others are filled in by the run from its own settings.

    Attributes:
        learning_rates: learning rate of a task's local steps, where it is not the task's own.
        batch_sizes: examples a local step of a task, where it is not the task's own.
    """

    name: str = setting(
        "strategy.name", "arch-sync", "arch-sync, a stock Flower strategy, or package.module:Class of your own"
    )
    examples_per_round: float = setting(
        "examples-per-round", 0.5, "examples of a task trained a round, as a fraction of all examples held", above=0.0
    )
    round_deadline_s: float = setting(
        "strategy.round-deadline-s", 0.0, "seconds after which a client stops training; 0: none", minimum=0.0
    )
    loads: str = setting(
        "strategy.loads", "auto", "auto: planned by arch-sync, proportional to data otherwise", choices=LOADS
    )
    min_load: float = setting(
        "strategy.min-load", 0.1, "least load, as a fraction of the examples a client holds", minimum=0.0, maximum=1.0
    )
    max_load: float = setting(
        "strategy.max-load", 2.0, "largest load, as a fraction of the examples a client holds", above=0.0
    )
    weighting: str = setting(
        "strategy.weighting", "used", "weigh clients by examples used this round, or held", choices=WEIGHTINGS
    )
    aggregator: str = setting(
        "strategy.aggregator", "normalised", "arch-sync: how a task's updates are joined", choices=AGGREGATORS
    )
    norm_bound: float = setting(
        "strategy.norm-bound", 0.0, "norm-clipping: longest move; 0: the median of the clients'", minimum=0.0
    )
    client_evaluation: bool = setting("strategy.client-evaluation", False, "clients evaluate too, every round")
    proximal_mu: float = setting("strategy.proximal-mu", 0.1, "fedprox: pull to the round's start weights", minimum=0.0)
    server_learning_rate: float = setting(
        "strategy.server-learning-rate", 0.0, "server optimisers: step (eta); 0: the strategy's own", minimum=0.0
    )
    client_learning_rate: float = setting(
        "strategy.client-learning-rate", 0.1, "qfedavg, server optimisers: clients' step (eta_l)", above=0.0
    )
    server_momentum: float = setting(
        "strategy.server-momentum", 0.9, "fedavgm: momentum", minimum=0.0, maximum=BELOW_ONE
    )
    beta_1: float = setting(
        "strategy.beta-1", 0.9, "fedadam, fedyogi: decay of the first moment", minimum=0.0, maximum=BELOW_ONE
    )
    beta_2: float = setting(
        "strategy.beta-2", 0.99, "fedadam, fedyogi: decay of the second moment", minimum=0.0, maximum=BELOW_ONE
    )
    tau: float = setting("strategy.tau", 1e-3, "server optimisers: floor of the adaptive step", above=0.0)
    trim_fraction: float = setting(
        "strategy.trim-fraction", 0.2, "fedtrimmedavg, trimmed-mean: cut from each tail", minimum=0.0, maximum=0.499
    )
    num_malicious_nodes: int = setting(
        "strategy.num-malicious-nodes", 0, "krum, multikrum, bulyan: clients that may lie", minimum=0
    )
    num_nodes_to_select: int = setting("strategy.num-nodes-to-select", 2, "multikrum: replies averaged", minimum=1)
    q: float = setting("strategy.q", 0.1, "qfedavg: fairness; 0 is fedavg", minimum=0.0)

    seed: int = 0
    sharing_mode: str = "competitive"
    deterministic: bool = False
    trace: bool = False
    learning_rates: Mapping[str, float] = field(default_factory=lambda: NO_VALUES)
    batch_sizes: Mapping[str, int] = field(default_factory=lambda: NO_VALUES)

    def faults(self) -> list[str]:
        """One line for each value out of range, each pair at odds, and an unknown name; empty when all is well."""
        from strategies.registry import check_name

        found = [fault for spec in dataclasses.fields(self) for fault in _range_faults(spec, getattr(self, spec.name))]
        try:
            check_name(self.name)
        except StrategyError as error:
            found.append(str(error))
        if found:
            return found
        if self.min_load > self.max_load:
            found.append(f"strategy.min-load {self.min_load:g} is above strategy.max-load {self.max_load:g}")
        elif not self.min_load <= self.examples_per_round <= self.max_load:
            found.append(
                f"examples-per-round {self.examples_per_round:g} must lie between strategy.min-load {self.min_load:g} "
                f"and strategy.max-load {self.max_load:g}, or no loads can meet it"
            )
        return found


def _range_faults(spec: dataclasses.Field[Any], value: Any) -> list[str]:
    limits = spec.metadata
    if not limits:
        return []
    if limits["choices"]:
        valid = value in limits["choices"]
    elif isinstance(value, bool | str):
        valid = True
    else:
        low, above, high = limits["min"], limits["above"], limits["max"]
        valid = (
            math.isfinite(value)
            and (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
        )
    return [] if valid else [f"{limits['key']} must be{describe_range(limits) or ' finite'}, not {value!r}"]
