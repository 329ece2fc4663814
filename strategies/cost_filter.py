"""CostFilter: how far off one client's costs are, learnt from the seconds it reports.

An extended Kalman filter on logarithms of factors: one per task on its solo cost, one on the whole device. The profile
is the prior. One report gives one equation between all factors (how long the mix took); as loads change from round to
round the factors come apart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

log = logging.getLogger("paceline.strategies")

Floats = npt.NDArray[np.float64]

# Standard deviations of logarithms (0.15 is about 15%): of a measured cost, of a guessed one, of a report, and of the
# drift from one report to the next.
PRIOR_SIGMA = 0.15
GUESS_SIGMA = 1.0
REPORT_SIGMA = 0.02
DRIFT_SIGMA = 0.02
# A report further off than this many deviations counts as this far: it moves the estimate but cannot wreck it.
CLIP_SIGMAS = 3.0
# One off by more than this factor is not believed until the next report agrees within the same factor: throttling
# lasts, a hiccup does not. Nothing is believed to be off by more than the limit.
SURPRISE_FACTOR = 2.0
LIMIT_FACTOR = 100.0


class CostFilter:
    """Factors of one client's costs; all 1 at first.

    Args:
        tasks: the client's tasks.
        sigmas: of each task's cost before anything was reported.
    """

    def __init__(self, tasks: Sequence[str], sigmas: Sequence[float]) -> None:
        self._index = {task: index for index, task in enumerate(tasks)}
        self._mean: Floats = np.zeros(len(tasks) + 1)
        self._covariance: Floats = np.diag(np.square([*sigmas, PRIOR_SIGMA]))
        self._surprise = 0.0

    def factor(self, task: str) -> float:
        """What the profile's solo cost of `task` is to be multiplied by."""
        return math.exp(self._mean[self._index[task]])

    @property
    def device_factor(self) -> float:
        """What the profile's capacity is to be divided by."""
        return math.exp(self._mean[-1])

    def slope(self, parts_s: dict[str, float], *, device: bool) -> Floats:
        """Slope of the logarithm of a sum of seconds by task over all factors; `device`: the device's factor too."""
        slope = np.zeros(len(self._mean))
        total = sum(parts_s.values())
        for task, seconds in parts_s.items():
            slope[self._index[task]] = seconds / total
        slope[-1] = 1.0 if device else 0.0
        return slope

    def drift(self) -> None:
        """Time has passed: old knowledge is worth a little less."""
        self._covariance = self._covariance + np.eye(len(self._mean)) * DRIFT_SIGMA**2

    def correct(
        self, client: str, seconds: float, expected_s: float, slope: Floats, sigma: float = REPORT_SIGMA
    ) -> None:
        """One report: work took `seconds`, known to `sigma`, where the present factors lead to expect `expected_s`."""
        if not (math.isfinite(seconds) and seconds > 0 and expected_s > 0):
            return
        residual = math.log(seconds / expected_s)
        variance = float(slope @ self._covariance @ slope) + sigma**2
        if abs(residual) > max(CLIP_SIGMAS * math.sqrt(variance), math.log(SURPRISE_FACTOR)):
            agrees = self._surprise != 0.0 and abs(residual - self._surprise) < math.log(SURPRISE_FACTOR)
            if abs(residual) > math.log(LIMIT_FACTOR) or not agrees:
                log.info("client %s: work took %.3g s instead of %.3g s; not believed yet", client, seconds, expected_s)
                self._surprise = residual
                return
            # The client has changed: what was known of its speed is void.
            self._covariance = self._covariance + np.outer(slope, slope) / float(slope @ slope) * residual**2
            variance = float(slope @ self._covariance @ slope) + sigma**2
        self._surprise = 0.0
        reach = CLIP_SIGMAS * math.sqrt(variance)
        gain = self._covariance @ slope / variance
        limit = math.log(LIMIT_FACTOR)
        self._mean = np.clip(self._mean + gain * min(max(residual, -reach), reach), -limit, limit)
        covariance = self._covariance - np.outer(gain, slope @ self._covariance)
        self._covariance = (covariance + covariance.T) / 2
