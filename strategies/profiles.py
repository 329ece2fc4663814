"""ProfileBook: what the server believes each client's work costs: its profile, corrected by what it reports."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gpu_runtime.contracts import TRAINED, Profile, Report, SplitReport, TaskCost, TaskProfile, TaskReport
from gpu_runtime.pipeline.cut_costs import Link
from strategies.cost_filter import GUESS_SIGMA, PRIOR_SIGMA, REPORT_SIGMA, CostFilter, Floats
from strategies.load_assignment import ClientLoad, TaskLoad

# For a task whose cost no client has measured. Loads then follow the examples held.
UNKNOWN_COST = TaskCost(demand=1.0, solo_cost_s=1.0, speed_curve=((1.0, 1.0),))
# Work that is a smaller part of the reported seconds than this, the rest being transfer and fixed seconds, teaches
# nothing about costs.
LEAST_WORK_FRACTION = 0.01
# Bytes per second and seconds within which a link may be measured; what lies outside is nonsense.
LINK_RANGES = {
    "uplink_bytes_per_s": (1.0, 1e12),
    "downlink_bytes_per_s": (1.0, 1e12),
    "latency_s": (0.0, 1e3),
}


class ProfileBook:
    """The current profile of each client, by client name.

    Attributes:
        guessed: (client, task) pairs whose cost is the median of the other clients', as none was measured.
    """

    def __init__(self, sharing_mode: str = "competitive") -> None:
        self.sharing_mode = sharing_mode
        self.guessed: set[tuple[str, str]] = set()
        self._profiles: dict[str, Profile] = {}
        self._filters: dict[str, CostFilter] = {}
        self._guesses: dict[str, TaskCost] = {}
        self._links: dict[str, Link] = {}

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

    def enter(self, profiles: Iterable[Profile]) -> None:
        """Take in profiles as sent by clients. Who comes back with the same profile keeps its corrections."""
        for profile in profiles:
            if self._profiles.get(profile.client) != profile:
                self._profiles[profile.client] = profile
                self._filters.pop(profile.client, None)
                self._links.pop(profile.client, None)
        self._guess_costs()

    def load_of(self, client: str, *, link_s: float = 0.0) -> ClientLoad:
        """The client as load assignment sees it, with all corrections made so far."""
        profile, corrections = self._profiles[client], self._filter(client)
        tasks = {}
        for task in _held(profile):
            cost = task.cost or self._guesses[task.task]
            tasks[task.task] = TaskLoad(
                num_held=task.num_examples,
                demand=cost.demand,
                solo_cost_s=cost.solo_cost_s * corrections.factor(task.task),
            )
        return ClientLoad(
            client=client,
            tasks=tasks,
            capacity=profile.capacity / corrections.device_factor,
            fixed_s=profile.fixed_s,
            link_s=link_s,
        )

    def cost_of(self, client: str, task: str) -> TaskCost | None:
        """A task's measured cost with all corrections made so far; None where no client has measured one."""
        cost = next((held.cost for held in self._profiles[client].tasks if held.task == task), None)
        return None if cost is None else cost.scaled(self._filter(client).factor(task))

    def link_of(self, client: str) -> Link:
        """The client's link to the split service: as last measured there, else as in its profile."""
        if client not in self._links:
            profile = self._profiles[client]
            self._links[client] = Link(
                uplink_bytes_per_s=profile.uplink_bytes_per_s,
                downlink_bytes_per_s=profile.downlink_bytes_per_s,
                latency_s=profile.latency_s or 0.0,
                message_s=profile.message_s,
            )
        return self._links[client]

    def learn_split(self, client: str, task: str, split: SplitReport, expected_device_s: float) -> None:
        """Correct a client's link and the cost of a task that was split.

        Args:
            client, task: whose.
            split: what the client says of it. Its rates are those of the whole round: they replace what was known.
            expected_device_s: seconds of work on the device that were expected by the costs so far.
        """
        known = self.link_of(client)
        measured = {
            name: value
            for name, (low, high) in LINK_RANGES.items()
            if (value := getattr(split, name)) is not None and low <= value <= high
        }
        self._links[client] = replace(known, **measured)
        corrections = self._filter(client)
        slope = corrections.slope({task: expected_device_s}, device=False)
        _correct(corrections, client, split.device_s, 0.0, expected_device_s, slope)

    def learn(
        self,
        report: Report,
        *,
        download_s: float = 0.0,
        upload_s: float = 0.0,
        planned_split: Collection[str] = (),
    ) -> None:
        """Correct a client's costs by what it reports. Rounds that were not trained to the end teach nothing.

        Nor do those in which a task was to be split (`planned_split`): see `learn_split`.
        """
        mine = {task.task for task in _held(self._profiles[report.client])}
        done = {task.task: task for task in report.tasks}
        if not done or any(
            task.task not in mine or task.outcome != TRAINED or task.num_examples <= 0 or task.task in planned_split
            for task in report.tasks
        ):
            return
        self._filter(report.client).drift()
        before_s = self._profiles[report.client].fixed_s + download_s
        if self.sharing_mode == "sequential":
            self._learn_in_turn(report.client, done, before_s)
        else:
            self._learn_mix(report.client, done, report.seconds, before_s + upload_s)

    def _learn_mix(self, client: str, done: Mapping[str, TaskReport], seconds: float, other_s: float) -> None:
        """Either the device was the limit (a sum over tasks), or one task was, which runs no faster than alone."""
        load, corrections = self.load_of(client), self._filter(client)
        device_s = {
            task: load.device_cost_s(task, self.sharing_mode) * entry.num_examples for task, entry in done.items()
        }
        alone_s = {task: load.tasks[task].solo_cost_s * entry.num_examples for task, entry in done.items()}
        slowest = max(sorted(alone_s), key=lambda task: alone_s[task])
        if alone_s[slowest] > sum(device_s.values()):
            slope = corrections.slope({slowest: alone_s[slowest]}, device=False)
            _correct(corrections, client, seconds, other_s, alone_s[slowest], slope)
        else:
            slope = corrections.slope(device_s, device=True)
            _correct(corrections, client, seconds, other_s, sum(device_s.values()), slope)

    def _learn_in_turn(self, client: str, done: Mapping[str, TaskReport], before_s: float) -> None:
        """Tasks ran one after another, so each one's own seconds are seen: from the end of the one before it."""
        corrections = self._filter(client)
        last_end_s = 0.0
        for entry in sorted(done.values(), key=lambda entry: (entry.seconds, entry.task)):
            own_s = entry.seconds - last_end_s
            last_end_s = entry.seconds
            expected_s = self.load_of(client).tasks[entry.task].solo_cost_s * entry.num_examples
            slope = corrections.slope({entry.task: expected_s}, device=False)
            _correct(corrections, client, own_s, before_s, expected_s, slope)
            before_s = 0.0

    def _filter(self, client: str) -> CostFilter:
        if client not in self._filters:
            tasks = [task.task for task in _held(self._profiles[client])]
            sigmas = [GUESS_SIGMA if (client, task) in self.guessed else PRIOR_SIGMA for task in tasks]
            self._filters[client] = CostFilter(tasks, sigmas)
        return self._filters[client]

    def _guess_costs(self) -> None:
        known: dict[str, list[TaskCost]] = {}
        self.guessed.clear()
        for profile in self._profiles.values():
            for task in _held(profile):
                if task.cost is None:
                    self.guessed.add((profile.client, task.task))
                else:
                    known.setdefault(task.task, []).append(task.cost)
        self._guesses = {
            task: TaskCost(
                demand=statistics.median(cost.demand for cost in known[task]),
                solo_cost_s=statistics.median(cost.solo_cost_s for cost in known[task]),
                speed_curve=((1.0, 1.0),),
            )
            if task in known
            else UNKNOWN_COST
            for _, task in self.guessed
        }


def _held(profile: Profile) -> list[TaskProfile]:
    return [task for task in profile.tasks if task.num_examples > 0]


def _correct(
    corrections: CostFilter, client: str, seconds: float, other_s: float, expected_s: float, slope: Floats
) -> None:
    """`seconds` were reported, of which `other_s` were no work. The smaller the part that was, the less it tells."""
    work_s = seconds - other_s
    if seconds > 0 and work_s > LEAST_WORK_FRACTION * seconds:
        corrections.correct(client, work_s, expected_s, slope, sigma=REPORT_SIGMA * seconds / work_s)
