"""Split training event by event: resources with queues on a virtual clock, without the formulas of `makespan`.

The oracle of their tests, and the clock of benchmark rows that would take hours in real time. Standard library only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_runtime.pipeline.makespan import Affine, CutCost, not_negative

SERVER = "server"
ARRIVAL, PROGRESS = "arrival", "progress"


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """From `at_s` on, the links of a client run at these multiples of the rates in its costs."""

    at_s: float
    uplink_factor: float = 1.0
    downlink_factor: float = 1.0

    def __post_init__(self) -> None:
        not_negative("at_s", self.at_s)
        for name in ("uplink_factor", "downlink_factor"):
            not_negative(name, getattr(self, name))
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0")


@dataclass(frozen=True, kw_only=True)
class SimulatedSession:
    """One task of one client: what its micro-batches cost, and the sizes of those of each step.

    Sessions of the same `client` share its device and links, and all sessions share the server. `start_s` is when
    the first step begins.
    """

    client: str
    cut: CutCost
    steps: Sequence[Sequence[int]]
    task: str = ""
    start_s: float = 0.0

    def __post_init__(self) -> None:
        not_negative("start_s", self.start_s)
        if not self.steps or any(not sizes or min(sizes) < 1 for sizes in self.steps):
            raise ValueError("steps must be one or more, each of one or more micro-batches of one example or more")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A resource at work for a session: `kind` is forward, up, serve, down, backward, update or server-update."""

    resource: str
    client: str
    task: str
    kind: str
    step: int
    index: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What happened. `step_ends_s` holds, for each session in the order given, when the device had done each step."""

    work: tuple[Work, ...]
    step_ends_s: tuple[tuple[float, ...], ...]

    @property
    def end_s(self) -> float:
        """When the last device had done its last step."""
        return max(ends[-1] for ends in self.step_ends_s)

    def busy_s(self, resource: str) -> float:
        """Seconds of work of "server", "<client>/device", "<client>/uplink" or "<client>/downlink"."""
        return sum(work.end_s - work.start_s for work in self.work if work.resource == resource)

    def idle_fraction(self, resource: str) -> float:
        """Part of the time to `end_s` in which `resource` has nothing to do."""
        return max(0.0, 1.0 - self.busy_s(resource) / self.end_s) if self.end_s > 0 else 0.0


def simulate(
    sessions: Sequence[SimulatedSession],
    *,
    changes: Mapping[str, Sequence[RateChange]] | None = None,
    server_order: str = ARRIVAL,
) -> Timeline:
    """Run all sessions to their ends.

    Args:
        sessions: who trains what.
        changes: of the rates of a client's links, by client, in order of time. What a message occupies whatever its
            size does not change.
        server_order: what the server does next: "arrival", or "progress" for the session with the least of its round
            done, which keeps those with short steps from being served first all the time.

    Raises:
        ValueError: an unknown order, changes that are not in order of time, or of a client that no session has.
    """
    changes = changes or {}
    if server_order not in (ARRIVAL, PROGRESS):
        raise ValueError(f"server_order must be {ARRIVAL!r} or {PROGRESS!r}, not {server_order!r}")
    for client, some in changes.items():
        if client not in {session.client for session in sessions}:
            raise ValueError(f"changes of {client!r}, which has no session")
        if any(later.at_s < sooner.at_s for sooner, later in itertools.pairwise(some)):
            raise ValueError(f"changes of {client!r} are not in order of time")
    clock = _Clock()
    server = _Resource(SERVER, clock, by_progress=server_order == PROGRESS)
    clients: dict[str, _Client] = {}
    runs = []
    for session in sessions:
        if session.client not in clients:
            clients[session.client] = _Client(session.client, clock, changes.get(session.client, ()))
        run = _Run(session, clients[session.client], server, clock)
        clock.at(session.start_s, run.begin_step)
        runs.append(run)
    clock.run()
    resources = [server, *(resource for client in clients.values() for resource in client.resources)]
    return Timeline(
        work=tuple(sorted((work for resource in resources for work in resource.done), key=lambda work: work.start_s)),
        step_ends_s=tuple(tuple(run.step_ends_s) for run in runs),
    )


class _Clock:
    """Events in order of time, those of the same moment in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


@dataclass(kw_only=True, eq=False)
class _Job:
    """What a resource does in one go. `done` is called `hold_s` before the resource is free again."""

    run: _Run
    kind: str
    step: int
    index: int
    cost: Affine
    size: int
    done: Callable[[], None]
    hold_s: float = 0.0
    start_s: float = field(default=0.0, init=False)


class _Resource:
    """Does one job at a time. `factors` are (from when, speed of what depends on the size)."""

    def __init__(
        self, name: str, clock: _Clock, factors: Sequence[tuple[float, float]] = (), *, by_progress: bool = False
    ) -> None:
        self._name, self._clock, self._by_progress = name, clock, by_progress
        self._factors = [(0.0, 1.0), *factors]
        self._waiting: deque[_Job] = deque()
        self._busy = False
        self.done: list[Work] = []

    def submit(self, job: _Job) -> None:
        self._waiting.append(job)
        if not self._busy:
            self._start()

    def _start(self) -> None:
        job = min(self._waiting, key=lambda job: job.run.progress) if self._by_progress else self._waiting[0]
        self._waiting.remove(job)
        self._busy, job.start_s = True, self._clock.now_s
        self._clock.at(self._end_s(job), lambda: self._finish(job))

    def _end_s(self, job: _Job) -> float:
        """When the job is done: its fixed seconds, then its examples at the speeds of their time."""
        now_s, left_s = self._clock.now_s + job.cost.call_s, job.size * job.cost.example_s
        speed = [factor for at_s, factor in self._factors if at_s <= now_s][-1]
        for at_s, factor in self._factors:
            if at_s > now_s:
                if now_s + left_s / speed <= at_s:
                    break
                left_s -= (at_s - now_s) * speed
                now_s, speed = at_s, factor
        return now_s + left_s / speed

    def _finish(self, job: _Job) -> None:
        self._note(job, job.kind, job.start_s, self._clock.now_s)
        job.done()
        if job.hold_s > 0:
            self._note(job, "server-update", self._clock.now_s, self._clock.now_s + job.hold_s)
            self._clock.at(self._clock.now_s + job.hold_s, self._free)
        else:
            self._free()

    def _note(self, job: _Job, kind: str, start_s: float, end_s: float) -> None:
        session = job.run.session
        self.done.append(
            Work(
                resource=self._name,
                client=session.client,
                task=session.task,
                kind=kind,
                step=job.step,
                index=job.index,
                start_s=start_s,
                end_s=end_s,
            )
        )

    def _free(self) -> None:
        self._busy = False
        if self._waiting:
            self._start()


class _Client:
    """A device and its two links."""

    def __init__(self, name: str, clock: _Clock, changes: Sequence[RateChange]) -> None:
        self.device = _Resource(f"{name}/device", clock)
        self.uplink = _Resource(f"{name}/uplink", clock, [(change.at_s, change.uplink_factor) for change in changes])
        self.downlink = _Resource(
            f"{name}/downlink", clock, [(change.at_s, change.downlink_factor) for change in changes]
        )
        self.resources = (self.device, self.uplink, self.downlink)


class _Run:
    """One session under way: each method is an event."""

    def __init__(self, session: SimulatedSession, client: _Client, server: _Resource, clock: _Clock) -> None:
        self.session = session
        self._client, self._server, self._clock, self._cut = client, server, clock, session.cut
        self._step = self._num_served = 0
        self._num_micro_batches = sum(len(sizes) for sizes in session.steps)
        self.step_ends_s: list[float] = []

    @property
    def progress(self) -> float:
        """Part of the round's micro-batches that the server has done."""
        return self._num_served / self._num_micro_batches

    def begin_step(self) -> None:
        if self._step < len(self.session.steps):
            for index in range(len(self._sizes)):
                self._submit(self._client.device, "forward", index, self._cut.device_forward, self._upload)

    @property
    def _sizes(self) -> Sequence[int]:
        return self.session.steps[self._step]

    def _submit(
        self, resource: _Resource, kind: str, index: int, cost: Affine, then: Callable[[int], None], hold_s: float = 0.0
    ) -> None:
        resource.submit(
            _Job(
                run=self,
                kind=kind,
                step=self._step,
                index=index,
                cost=cost,
                size=self._sizes[index],
                done=lambda: then(index),
                hold_s=hold_s,
            )
        )

    def _after(self, seconds: float, then: Callable[[int], None], index: int) -> None:
        self._clock.at(self._clock.now_s + seconds, lambda: then(index))

    def _upload(self, index: int) -> None:
        self._submit(self._client.uplink, "up", index, self._cut.uplink, self._travel_up)

    def _travel_up(self, index: int) -> None:
        self._after(self._cut.latency_up_s, self._serve, index)

    def _serve(self, index: int) -> None:
        hold_s = self._cut.server_update_s if index == len(self._sizes) - 1 else 0.0
        self._submit(self._server, "serve", index, self._cut.server, self._download, hold_s)

    def _download(self, index: int) -> None:
        self._num_served += 1
        self._submit(self._client.downlink, "down", index, self._cut.downlink, self._travel_down)

    def _travel_down(self, index: int) -> None:
        self._after(self._cut.latency_down_s, self._backward, index)

    def _backward(self, index: int) -> None:
        self._submit(self._client.device, "backward", index, self._cut.device_backward, self._count)

    def _count(self, index: int) -> None:
        if index == len(self._sizes) - 1:
            self._submit(self._client.device, "update", index, Affine(call_s=self._cut.update_s), self._end_step)

    def _end_step(self, _index: int) -> None:
        self.step_ends_s.append(self._clock.now_s)
        self._step += 1
        self.begin_step()
