"""ProfileBook: what the server believes each client's work costs, corrected by the seconds clients report.

A client's profile is kept as it came. Beside it stand correction factors, one per task on its solo cost and one on the
device, in logarithms, with their uncertainty: an extended Kalman filter whose prior is the profile. One report gives one
equation between all factors (how long the mix took); as loads change from round to round the factors come apart. Where
tasks run one after another each task's own seconds are seen and each factor is corrected by itself.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gpu_runtime.contracts import TRAINED, Profile, Report, TaskCost, TaskProfile
from strategies.load_assignment import ClientLoad, TaskLoad

log = logging.getLogger("paceline.strategies")

Floats = npt.NDArray[np.float64]

# Standard deviations of logarithms: of a measured profile, of a guessed cost, of one report, of drift from one round
# to the next. 0.15 is about 15%.
PRIOR_SIGMA = 0.15
GUESS_SIGMA = 1.0
REPORT_SIGMA = 0.02
DRIFT_SIGMA = 0.02
# A report further than this many deviations from what was expected counts as this far: it moves the estimate, but
# cannot wreck it.
CLIP_SIGMAS = 3.0
# A report off by more than this factor is not believed until the next one says the same (throttling lasts, a hiccup
# does not); nothing is ever believed to be off by more than the limit.
SURPRISE_FACTOR = 2.0
LIMIT_FACTOR = 100.0


@dataclass(kw_only=True)
class _Estimate:
    """Factors of one client: `tasks` in order, then the device. Logarithms; all 0 where the profile is right."""

    tasks: tuple[str, ...]
    mean: Floats
    covariance: Floats
    surprise: float = 0.0  # log of how far the last report that was not believed was off; 0 when there is none

    def factor(self, task: str) -> float:
        return math.exp(self.mean[self.tasks.index(task)]) if task in self.tasks else 1.0

    @property
    def device_factor(self) -> float:
        return math.exp(self.mean[-1])


@dataclass(kw_only=True)
class ProfileBook:
    """The current profile of each client, by client name."""

    sharing_mode: str = "competitive"
    _profiles: dict[str, Profile] = field(default_factory=dict)
    _estimates: dict[str, _Estimate] = field(default_factory=dict)
    guessed: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, profiles: Iterable[Profile]) -> None:
        """Take in profiles as clients sent them. A client that comes back with the same costs keeps its corrections.

        A cost that was not measured is guessed from the other clients of the task; `guessed` names (client, task).
        """
        for profile in profiles:
            if self._profiles.get(profile.client) != profile:
                self._profiles[profile.client] = profile
                self._estimates.pop(profile.client, None)
        self._guess_costs()

    def load_of(self, client: str, *, link_s: float = 0.0) -> ClientLoad:
        """The client as load assignment sees it, with all corrections made so far."""
        profile, estimate = self._profiles[client], self._estimate(client)
        tasks = {
            task.task: TaskLoad(
                num_held=task.num_examples,
                demand=cost.demand,
                solo_cost_s=cost.solo_cost_s * estimate.factor(task.task),
            )
            for task in profile.tasks
            if task.num_examples > 0
            for cost in (self._cost(client, task),)
        }
        return ClientLoad(
            client=client,
            tasks=tasks,
            capacity=profile.capacity / estimate.device_factor,
            fixed_s=profile.fixed_s,
            link_s=link_s,
        )

    def learn(self, report: Report, *, link_s: float = 0.0) -> None:
        """Correct a client's factors by what it reports. A report that makes no sense changes nothing."""
        estimate = self._estimate(report.client)
        done = {task.task: task for task in report.tasks if task.outcome == TRAINED and task.num_examples > 0}
        whole = len(done) == len(report.tasks)
        done = {task: entry for task, entry in done.items() if task in estimate.tasks}
        if not done or not whole:
            return
        estimate.covariance += np.eye(len(estimate.mean)) * DRIFT_SIGMA**2
        loads = {task: float(entry.num_examples) for task, entry in done.items()}
        if self.sharing_mode == "sequential":
            end_s = 0.0
            for task, entry in sorted(done.items(), key=lambda item: item[1].seconds):
                self._correct(report.client, {task: loads[task]}, entry.seconds - end_s, fixed_s=0.0 if end_s else None)
                end_s = entry.seconds
        else:
            self._correct(report.client, loads, report.seconds, fixed_s=None, link_s=link_s)

    def _correct(
        self, client: str, loads: Mapping[str, float], seconds: float, *, fixed_s: float | None, link_s: float = 0.0
    ) -> None:
        """One step of the filter: `seconds` is what `loads` took, with `fixed_s` (None: the profile's) before them."""
        estimate = self._estimate(client)
        expected_load = self.load_of(client)
        before_s = expected_load.fixed_s if fixed_s is None else fixed_s
        expected_s, slope = self._expected(expected_load, estimate, loads)
        work_s = seconds - before_s - link_s
        if not (math.isfinite(seconds) and seconds > 0 and expected_s > 0):
            return
        # Fixed seconds of the profile may be too long; never let them eat the whole report.
        work_s = max(work_s, 0.1 * seconds)
        residual = math.log(work_s / expected_s)
        if abs(residual) > math.log(LIMIT_FACTOR):
            log.warning(
                "client %s: a report of %.3g s where %.3g s were expected is ignored", client, seconds, expected_s
            )
            return
        variance = float(slope @ estimate.covariance @ slope) + REPORT_SIGMA**2
        deviation = math.sqrt(variance)
        surprising = abs(residual) > max(CLIP_SIGMAS * deviation, math.log(SURPRISE_FACTOR))
        confirmed = estimate.surprise * residual > 0 and abs(estimate.surprise - residual) < math.log(SURPRISE_FACTOR)
        estimate.surprise = residual if surprising else 0.0
        if surprising and confirmed:
            # The client has changed: what was known about its speed is void, and this report is the news.
            estimate.covariance += np.eye(len(estimate.mean)) * residual**2
            variance = float(slope @ estimate.covariance @ slope) + REPORT_SIGMA**2
            estimate.surprise = 0.0
        else:
            residual = max(-CLIP_SIGMAS * deviation, min(CLIP_SIGMAS * deviation, residual))
            if surprising:
                return
        gain = estimate.covariance @ slope / variance
        limit = math.log(LIMIT_FACTOR)
        estimate.mean = np.clip(estimate.mean + gain * residual, -limit, limit)
        estimate.covariance = estimate.covariance - np.outer(gain, slope @ estimate.covariance)
        estimate.covariance = (estimate.covariance + estimate.covariance.T) / 2

    def _expected(self, client: ClientLoad, estimate: _Estimate, loads: Mapping[str, float]) -> tuple[float, Floats]:
        """Seconds `loads` should take and the slope of their logarithm over the factors.

        Either the device is the limit (a sum over tasks) or one task is, which runs no faster than alone.
        """
        slope = np.zeros(len(estimate.mean))
        device = {task: client.device_cost_s(task, self.sharing_mode) * load for task, load in loads.items()}
        alone = {task: client.tasks[task].solo_cost_s * load for task, load in loads.items()}
        device_s = sum(device.values())
        slowest = max(alone, key=lambda task: alone[task])
        if alone[slowest] > device_s:
            slope[estimate.tasks.index(slowest)] = 1.0
            return alone[slowest], slope
        for task, seconds in device.items():
            slope[estimate.tasks.index(task)] = seconds / device_s
        if self.sharing_mode != "sequential":
            slope[-1] = 1.0
        return device_s, slope

    def _estimate(self, client: str) -> _Estimate:
        if client not in self._estimates:
            profile = self._profiles[client]
            tasks = tuple(task.task for task in profile.tasks if task.num_examples > 0)
            sigmas = [GUESS_SIGMA if (client, task) in self.guessed else PRIOR_SIGMA for task in tasks]
            covariance = np.diag(np.square([*sigmas, PRIOR_SIGMA]))
            self._estimates[client] = _Estimate(tasks=tasks, mean=np.zeros(len(tasks) + 1), covariance=covariance)
        return self._estimates[client]

    def _cost(self, client: str, task: TaskProfile) -> TaskCost:
        return task.cost or self._guesses[task.task]

    def _guess_costs(self) -> None:
        """For each task the median of the known costs; 1 s per example at full demand where nobody knows any."""
        known: dict[str, list[TaskCost]] = {}
        self.guessed.clear()
        for profile in self._profiles.values():
            for task in profile.tasks:
                found = known.setdefault(task.task, [])
                if task.cost is not None:
                    found.append(task.cost)
                elif task.num_examples > 0:
                    self.guessed.add((profile.client, task.task))
        unknown = TaskCost(demand=1.0, solo_cost_s=1.0, speed_curve=((1.0, 1.0),))
        self._guesses = {
            task: replace(
                costs[0],
                demand=statistics.median(cost.demand for cost in costs),
                solo_cost_s=statistics.median(cost.solo_cost_s for cost in costs),
            )
            if costs
            else unknown
            for task, costs in known.items()
        }

    def __post_init__(self) -> None:
        self._guesses: dict[str, TaskCost] = {}

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of all clients ever entered, in order."""
        return tuple(sorted(self._profiles))

    def profile(self, client: str) -> Profile:
        """The profile of a client as it came."""
        return self._profiles[client]

    def is_costed(self) -> bool:
        """Whether any cost was ever measured, so that planned seconds mean something."""
        return any(task.cost is not None for profile in self._profiles.values() for task in profile.tasks)
