"""Settings of a strategy, with the key, help and range that the settings parser needs. Imports no flwr."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpu_runtime.contracts import SHARING_MODES

LOADS = ("auto", "proportional", "equal")
WEIGHTINGS = ("used", "held")


class StrategyError(ValueError):
    """A strategy that cannot be found, built or served; the text names the fault and the remedy."""


def _option(key: str, help_text: str, default: Any, **limits: Any) -> Any:
    """A field with what a settings parser needs.

    `limits` may hold `min` and `max` (inclusive), `above` and `below` (exclusive) and `choices`.
    """
    return field(default=default, metadata={"key": key, "help": help_text, **limits})


def _per_task(key: str, help_text: str, **limits: Any) -> Any:
    return field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"key": key, "help": help_text, "per_task": True, **limits},
    )


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Everything a strategy may be told. Defaults are good starting values.

    Raises:
        StrategyError: a value outside the range in its field's metadata; the text names the key and the range.
    """

    name: str = _option("strategy.name", "arch-sync, a stock Flower strategy, or package.module:Class", "arch-sync")
    seed: int = _option("seed", "fixes data, partition, initial weights and every client's training", 0, min=0)
    examples_per_round: float = _option(
        "examples-per-round", "examples trained a round, as a fraction of all examples held", 0.5, above=0.0
    )
    sharing_mode: str = _option("sharing.mode", "how tasks share a device", "competitive", choices=SHARING_MODES)
    deterministic: bool = _option("deterministic", "equal seeds give weights equal bit for bit", False)
    trace: bool = _option("trace", "clients report the spans of their lanes", False)
    round_deadline_s: float | None = _option(
        "round-deadline-s", "seconds after which a client stops training; empty: none", None, above=0.0
    )

    loads: str = _option(
        "strategy.loads", "auto: planned by arch-sync, proportional to data otherwise", "auto", choices=LOADS
    )
    min_load: float = _option(
        "strategy.min-load", "least load of a client, as a fraction of the examples it holds", 0.1, min=0.0, max=1.0
    )
    max_load: float = _option(
        "strategy.max-load", "largest load of a client, as a fraction of the examples it holds", 2.0, above=0.0
    )
    weighting: str = _option(
        "strategy.weighting", "weigh a client by examples used this round or held", "used", choices=WEIGHTINGS
    )
    learning_rates: Mapping[str, float] = _per_task(
        "learning-rates", "learning rate of a task's local steps; the task's own unless given", above=0.0
    )
    batch_sizes: Mapping[str, int] = _per_task(
        "batch-sizes", "examples a local step of a task; the task's own unless given", min=1
    )
    client_evaluation: bool = _option("strategy.client-evaluation", "clients evaluate too, every round", False)

    proximal_mu: float = _option("strategy.proximal-mu", "fedprox: pull to the round's start weights", 0.1, min=0.0)
    server_learning_rate: float = _option(
        "strategy.server-learning-rate",
        "server optimisers' step size (eta); 0: each strategy's own default",
        0.0,
        min=0.0,
    )
    client_learning_rate: float = _option(
        "strategy.client-learning-rate", "qfedavg and server optimisers: clients' step size (eta_l)", 0.1, above=0.0
    )
    server_momentum: float = _option("strategy.server-momentum", "fedavgm: momentum", 0.0, min=0.0, below=1.0)
    beta_1: float = _option("strategy.beta-1", "fedadam, fedyogi: first moment's decay", 0.9, min=0.0, below=1.0)
    beta_2: float = _option("strategy.beta-2", "fedadam, fedyogi: second moment's decay", 0.99, min=0.0, below=1.0)
    tau: float = _option("strategy.tau", "server optimisers: adaptivity floor", 1e-3, above=0.0)
    trim_fraction: float = _option(
        "strategy.trim-fraction", "fedtrimmedavg: cut from each tail", 0.2, min=0.0, below=0.5
    )
    num_malicious_nodes: int = _option(
        "strategy.num-malicious-nodes", "krum, multikrum, bulyan: clients that may lie", 0, min=0
    )
    num_nodes_to_select: int = _option("strategy.num-nodes-to-select", "multikrum: replies averaged", 1, min=1)
    q: float = _option("strategy.q", "qfedavg: fairness; 0 is fedavg", 0.1, min=0.0)

    def __post_init__(self) -> None:
        faults = [fault for spec in dataclasses.fields(self) for fault in _faults(spec, getattr(self, spec.name))]
        if not faults and self.min_load > self.max_load:
            faults.append(f"strategy.min-load {self.min_load:g} must not exceed strategy.max-load {self.max_load:g}")
        if faults:
            raise StrategyError("; ".join(faults))


def _faults(spec: dataclasses.Field[Any], value: Any) -> list[str]:
    limits = spec.metadata
    if limits.get("per_task"):
        return [
            fault for task, item in value.items() for fault in _range_faults(f"{limits['key']}.{task}", limits, item)
        ]
    return [] if value is None else _range_faults(limits["key"], limits, value)


def _range_faults(key: str, limits: Mapping[str, Any], value: Any) -> list[str]:
    if "choices" in limits:
        return [] if value in limits["choices"] else [f"{key} {value!r} must be one of {', '.join(limits['choices'])}"]
    if isinstance(value, bool | str):
        return []
    outside = (
        not math.isfinite(value)
        or value < limits.get("min", -math.inf)
        or value > limits.get("max", math.inf)
        or value <= limits.get("above", -math.inf)
        or value >= limits.get("below", math.inf)
    )
    return [f"{key} must be {_range_text(limits)}, not {value:g}"] if outside else []


def _range_text(limits: Mapping[str, Any]) -> str:
    words = {"min": "at least", "above": "above", "max": "at most", "below": "below"}
    return " and ".join(f"{word} {limits[name]:g}" for name, word in words.items() if name in limits) or "finite"
