"""Rounds of one setting in real time: every distinct choice once a round, in random order, repeated if disturbed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gpu_runtime.bench.disturbance import ForeignLoad
from gpu_runtime.bench.rounds import Gate
from gpu_runtime.contracts import Emulation
from gpu_runtime.pipeline.planner import Choice
from gpu_runtime.workload import Workload
from simulations.bench.pipelines.service import Iteration, Service, SplitRun, WholeRun, median_of
from simulations.bench.pipelines.variants import Key

# Beside its iterations a run opens a session, builds both halves and lets them go.
OVERHEAD_S = 0.4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Medians of one run's iterations. `foreign_cores` None: unknown."""

    iteration: Iteration
    foreign_cores: float | None = None
    disturbed: bool = False


Samples = dict[Key, dict[int, Sample]]


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is measured in a setting: `rounds` of runs of `iterations` each, after one that is not counted.

    Slow choices get fewer: as many as fit into `run_s`, at least one.
    """

    rounds: int
    iterations: int
    run_s: float

    def iterations_of(self, step_s: float) -> int:
        return max(1, min(self.iterations, int(self.run_s / max(step_s, 1e-3))))

    def seconds_of(self, choice: Choice, slowdown: float) -> float:
        """About what all runs of a choice take."""
        if choice.cut is None:
            return self.rounds * choice.step_s / slowdown
        return self.rounds * (OVERHEAD_S + (1 + self.iterations_of(choice.step_s)) * choice.step_s)


class RealTime:
    """Measures settings of one service.

    Args:
        service: in this process; the calling thread computes on one core.
        gate: when a run counts as disturbed, and what is done about it.
        draw: decides the order in each round.
        foreign: what others do; replaced in tests.
        sleep: replaced in tests.
    """

    def __init__(
        self,
        service: Service,
        *,
        gate: Gate,
        draw: random.Random,
        foreign: ForeignLoad | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service, self._gate, self._draw = service, gate, draw
        self._foreign, self._sleep = foreign or ForeignLoad(), sleep
        self._patience_s = 0.0
        self._loud_lately = True

    def measure(
        self,
        workload: Workload,
        arrays: Mapping[str, np.ndarray],
        choices: Mapping[Key, Choice],
        emulation: Emulation,
        amount: Amount,
    ) -> Samples:
        """Samples of every choice in every round. The service must serve `workload` from `arrays`.

        Raises:
            SplitError: a session failed.
        """
        expected_s = sum(amount.seconds_of(choice, emulation.slowdown) for choice in choices.values())
        self._patience_s = self._gate.patience_fraction * expected_s
        whole = WholeRun(workload, arrays, emulation.slowdown)
        whole.iterate()

        def run(choice: Choice) -> Iteration:
            if choice.cut is None:
                return whole.iterate()
            self._service.wait_for_quiet()
            split = SplitRun(self._service, workload, arrays, choice, emulation)
            try:
                split.iterate()
                return median_of([split.iterate() for _ in range(amount.iterations_of(choice.step_s))])
            finally:
                split.close()

        samples: Samples = {key: {} for key in choices}
        for index in range(amount.rounds):
            order = list(choices)
            self._draw.shuffle(order)
            for key in order:
                samples[key][index] = self._gated(lambda choice=choices[key]: run(choice))  # type: ignore[misc]
        whole.close()
        return samples

    # ------------------------------------------------------------------------------------------------------ internals

    def _gated(self, run: Callable[[], Iteration]) -> Sample:
        self._wait_for_quiet()
        sample, seconds = self._once(run)
        for _ in range(self._gate.max_repeats):
            if not sample.disturbed or self._patience_s < seconds:
                break
            self._wait_for_quiet()
            again, seconds = self._once(run)
            self._patience_s -= seconds
            sample = min(sample, again, key=lambda each: each.foreign_cores or 0.0)
        return sample

    def _once(self, run: Callable[[], Iteration]) -> tuple[Sample, float]:
        began_s = time.monotonic()
        self._foreign.start()
        iteration = run()
        cores = self._foreign.cores
        self._loud_lately = self._is_loud(cores)
        sample = Sample(iteration=iteration, foreign_cores=cores, disturbed=self._loud_lately)
        return sample, time.monotonic() - began_s

    def _wait_for_quiet(self) -> None:
        while self._loud_lately and self._patience_s > 0:
            self._foreign.start()
            self._sleep(self._gate.look_s)
            self._patience_s -= self._gate.look_s
            self._loud_lately = self._is_loud(self._foreign.cores)

    def _is_loud(self, cores: float | None) -> bool:
        return cores is not None and cores > self._gate.max_foreign_cores
