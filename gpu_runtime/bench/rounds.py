"""Rounds of one mix: every variant once a round in random order, again where others disturb, within a time budget."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.disturbance import ForeignLoad
from gpu_runtime.bench.mixes import Work
from gpu_runtime.bench.paired import MIN_PAIRS
from gpu_runtime.bench.variants import Run, TooSlowError, Variant, VariantError

WARM_UP_STEPS = 2
# No run may take more than this many times its equal part of the mix's time; one that is essential twice as many.
FAIR_PARTS = 3.0
# Seconds granted to a run on top of its variant's patience: small work must not be cut by a hiccup.
EXTRA_S = 2.0
# About what it takes to build models and to read the system's counters around a run.
OVERHEAD_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Gate:
    """When a run counts as disturbed, and how much waiting and repeating may be done about it.

    A run during which others kept more than `max_foreign_cores` busy is disturbed. It is repeated, at most
    `max_repeats` times, and the least disturbed attempt counts. The next run starts when others keep no more than that
    busy for `look_s` seconds. Waiting and repeating together take at most `patience_fraction` of the mix's time.
    """

    max_foreign_cores: float = 0.2
    max_repeats: int = 3
    patience_fraction: float = 0.3
    look_s: float = 0.25


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One accepted run. `foreign_cores` None: unknown; `joules` of the GPU, None where NVML does not tell."""

    run: Run
    foreign_cores: float | None = None
    disturbed: bool = False
    joules: float | None = None


@dataclass(kw_only=True)
class Measured:
    """Samples by variant and round, and why variants are missing or stopped early."""

    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    not_available: dict[str, str] = field(default_factory=dict)


class Rounds:
    """Measures one mix.

    Args:
        variants: all that are compared, the baseline first.
        essential: names of those that are never left out.
        gate: about disturbance.
        draw: decides the order in each round.
        foreign: what others do; replaced in tests.
        joules: reads the device's energy counter.
        sleep: replaced in tests.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        *,
        essential: Collection[str],
        gate: Gate,
        draw: random.Random,
        foreign: ForeignLoad | None = None,
        joules: Callable[[], float | None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._variants = {variant.name: variant for variant in variants}
        self._baseline = variants[0].name
        self._essential, self._gate, self._draw = frozenset(essential), gate, draw
        self._foreign, self._joules = foreign or ForeignLoad(), joules
        self._sleep = sleep
        self._patience_s = self._fair_s = 0.0
        self._loud_lately = True

    def measure(self, work: Work, *, pairs: int, budget: Budget) -> Measured:
        """At most `pairs` rounds, at least `MIN_PAIRS` of them if the budget allows it.

        Where it does not, variants that are not essential are stopped, the slowest first.

        Raises:
            VariantError: an essential variant failed.
        """
        self._patience_s = budget.left_s * self._gate.patience_fraction
        self._fair_s = FAIR_PARTS * budget.left_s / (MIN_PAIRS * len(self._variants))
        found = Measured()
        active = self._warmed_up(work, found)
        expected_s = sum(share.num_steps * share.step.all_s for share in work.values())
        cost_s: dict[str, float] = {}
        for index in range(pairs):
            if index > 0:
                self._drop_what_takes_too_long(active, cost_s, index, pairs, budget, found)
                due = [cost_s[name] for name in active]
                if budget.left_s < (sum(due) if index >= MIN_PAIRS else max(due)):
                    break
            order = list(active)
            self._draw.shuffle(order)
            for name in order:
                try:
                    sample = self._gated(self._variants[name], work, expected_s)
                except TooSlowError as error:
                    if name in self._essential:
                        found.not_available[name] = f"stopped after {index} pairs: {error}"
                        return self._in_order(found)
                    self._leave_out(name, f"stopped after {index} pairs: {error}", active, found)
                    continue
                except VariantError as error:
                    self._leave_out(name, f"failed: {error}", active, found, error)
                    continue
                found.samples.setdefault(name, {})[index] = sample
                cost_s[name] = sample.run.seconds + OVERHEAD_S
                if name == self._baseline:
                    expected_s = sample.run.whole_s
        return self._in_order(found)

    # ------------------------------------------------------------------------------------------------------ internals

    def _in_order(self, found: Measured) -> Measured:
        found.samples = {name: found.samples[name] for name in self._variants if name in found.samples}
        return found

    def _warmed_up(self, work: Work, found: Measured) -> list[str]:
        """Names of the variants that can do a little of the work."""
        trial = {task: replace(share, num_steps=WARM_UP_STEPS) for task, share in work.items()}
        active = list(self._variants)
        for name, variant in self._variants.items():
            try:
                variant.prepare(work)
                variant.run(trial, self._fair_s)
            except TooSlowError:
                continue  # it will show in its first round
            except VariantError as error:
                self._leave_out(name, f"failed: {error}", active, found, error)
        return active

    def _leave_out(
        self, name: str, reason: str, active: list[str], found: Measured, error: VariantError | None = None
    ) -> None:
        if name in self._essential and error is not None:
            raise VariantError(f"{name}: {error}") from error
        active.remove(name)
        found.not_available[name] = reason

    def _drop_what_takes_too_long(
        self,
        active: list[str],
        cost_s: Mapping[str, float],
        index: int,
        pairs: int,
        budget: Budget,
        found: Measured,
    ) -> None:
        rounds_left = min(MIN_PAIRS, pairs) - index
        while rounds_left > 0 and sum(cost_s[name] for name in active) * rounds_left > budget.left_s:
            optional = [name for name in active if name not in self._essential]
            if not optional:
                return
            slowest = max(optional, key=lambda name: cost_s[name])
            self._leave_out(slowest, f"stopped after {index} pairs: no time left", active, found)

    def _gated(self, variant: Variant, work: Work, expected_s: float) -> Sample:
        self._wait_for_quiet()
        sample = self._once(variant, work, expected_s)
        for _ in range(self._gate.max_repeats):
            if not sample.disturbed or self._patience_s < sample.run.seconds:
                break
            self._wait_for_quiet()
            again = self._once(variant, work, expected_s)
            self._patience_s -= again.run.seconds
            sample = min(sample, again, key=lambda each: each.foreign_cores or 0.0)
        return sample

    def _wait_for_quiet(self) -> None:
        while self._loud_lately and self._patience_s > 0:
            self._foreign.start()
            self._sleep(self._gate.look_s)
            self._patience_s -= self._gate.look_s
            self._loud_lately = self._is_loud(self._foreign.cores)

    def _deadline_s(self, variant: Variant, expected_s: float) -> float:
        """Seconds until a run is cut: by its patience and, in any case, by the time that the mix has."""
        if variant.name in self._essential:
            return 2.0 * self._fair_s
        return min(self._fair_s, variant.patience * expected_s + EXTRA_S)

    def _is_loud(self, cores: float | None) -> bool:
        return cores is not None and cores > self._gate.max_foreign_cores

    def _once(self, variant: Variant, work: Work, expected_s: float) -> Sample:
        joules = self._joules()
        self._foreign.start()
        run = variant.run(work, self._deadline_s(variant, expected_s))
        cores = self._foreign.cores
        self._loud_lately = self._is_loud(cores)
        after = self._joules()
        return Sample(
            run=run,
            foreign_cores=cores,
            disturbed=self._loud_lately,
            joules=None if joules is None or after is None else after - joules,
        )
