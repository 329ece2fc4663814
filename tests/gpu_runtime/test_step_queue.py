"""Who gets the next step, in virtual time: no threads, no clock."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import FakeWork

from gpu_runtime.allocator import TaskLoad
from gpu_runtime.lanes.base import HostLane, LaneOptions
from gpu_runtime.step_queue import Entry, Grant, StepQueue, next_in_line
from gpu_runtime.work import Work


def entry(task: str, num_steps: int, step_s: float = 1.0, done: int = 0, cap: float = 1.0) -> Entry:
    work = FakeWork(task, num_examples=num_steps)
    work.examples_done = done
    load = TaskLoad(task=task, num_examples=num_steps, solo_cost_s=step_s, maximum_share=cap)
    return Entry(work=work, load=load)


def lane(*tasks: str, width: int | None = None) -> HostLane:
    return HostLane("lane", tasks=frozenset(tasks) or None, width=width, options=LaneOptions())


class Simulation:
    """Lanes that serve a queue in virtual time; a step takes `step_s` on one thread and on all of them."""

    def __init__(self, entries: list[Entry], cores: int, **options: object) -> None:
        self.now = 0.0
        self.ended: dict[str, float] = {}
        self.most_threads = 0
        self.queue = StepQueue(
            entries,
            threads=cores,
            num_lanes=min(cores, len(entries)),
            clock=lambda: self.now,
            on_end=self._note_end,
            **options,  # type: ignore[arg-type]
        )
        self._entries = {each.work.task: each for each in entries}
        self._step_s = {each.work.task: each.load.solo_cost_s for each in entries}
        self._cores = cores

    def _note_end(self, work: Work, error: BaseException | None) -> None:
        self.ended[work.task] = self.now

    def run(self) -> float:
        """Makespan."""
        idle = [lane() for _ in range(min(self._cores, len(self._entries)))]
        busy: list[tuple[float, int, HostLane, Grant]] = []
        count = 0
        while True:
            idle = [each for each in idle if not self._start(each, busy, count := count + 1)]
            if not busy:
                return self.now
            self.most_threads = max(self.most_threads, sum(grant.width for *_, grant in busy))
            self.now, _, freed, grant = heapq.heappop(busy)
            work = grant.work
            seconds = grant.num_steps * self._step_s[work.task]
            for _ in range(grant.num_steps):
                work.step()
            self.queue.give_back(grant, seconds=seconds, num_examples=grant.num_steps, error=None)
            idle.append(freed)

    def _start(self, each: HostLane, busy: list[tuple[float, int, HostLane, Grant]], count: int) -> bool:
        grant = self._try_take(each)
        if grant is None:
            return False
        left = grant.work.num_examples - grant.work.examples_done
        assert grant.num_steps >= 1
        grant = Grant(work=grant.work, num_steps=min(grant.num_steps, left), width=grant.width)
        heapq.heappush(busy, (self.now + grant.num_steps * self._step_s[grant.work.task], count, each, grant))
        return True

    def _try_take(self, each: HostLane) -> Grant | None:
        """`take` without its waiting."""
        unfinished = [entry for entry in self._entries.values() if not entry.ended]
        grant = self.queue._grant(each, unfinished, unfinished) if unfinished else None
        if grant is not None:
            self._entries[grant.work.task].running_width = grant.width
        return grant


def test_the_step_that_is_due_first_goes_next() -> None:
    # Next steps are due at 0.6, 0.5 and 0.7 of the common line; the fourth task runs elsewhere.
    a, b, c = entry("a", 10, done=5), entry("b", 4, done=1), entry("c", 10, done=6)
    assert next_in_line([a, b, c], [a, b, c, entry("d", 5)], lanes=1) is b
    assert next_in_line([a, c], [a, b, c, entry("d", 5)], lanes=1) is a


def test_a_task_that_cannot_wait_goes_first() -> None:
    # 10 seconds in one lane against 4 in the other: a must never wait, though b has a greater part left.
    a, b = entry("a", 20, done=10), entry("b", 4)
    assert next_in_line([a, b], [a, b], lanes=2) is a


@given(
    tasks=st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 1.0)), min_size=1, max_size=6),
    cores=st.integers(1, 4),
)
@settings(deadline=None)
def test_the_makespan_is_near_the_floor(tasks: list[tuple[int, float]], cores: int) -> None:
    entries = [entry(f"t{index}", steps, step_s) for index, (steps, step_s) in enumerate(tasks)]
    simulation = Simulation(entries, cores)
    makespan = simulation.run()
    total_s = sum(steps * step_s for steps, step_s in tasks)
    floor_s = max(total_s / cores, *(steps * step_s for steps, step_s in tasks), 0.0)
    longest_step_s = max(step_s for _, step_s in tasks)
    # Steps cannot be cut, and a task runs in one lane at a time: a few of the longest steps may stick out.
    assert makespan <= floor_s + 3 * longest_step_s + 1e-9
    assert simulation.ended.keys() == {f"t{index}" for index in range(len(tasks))}
    assert simulation.most_threads <= cores


@given(counts=st.lists(st.integers(20, 60), min_size=3, max_size=5), cores=st.integers(1, 2))
@settings(deadline=None)
def test_tasks_that_can_finish_together_do(counts: list[int], cores: int) -> None:
    # Steps longer than a quantum, none of the tasks dominating: all end within a few steps of each other.
    counts = [*counts, max(counts)]
    entries = [entry(f"t{index}", count, step_s=0.01) for index, count in enumerate(counts)]
    simulation = Simulation(entries, cores)
    makespan = simulation.run()
    assert min(simulation.ended.values()) >= makespan - 0.01 * (len(counts) + 2)


def test_in_order_runs_one_task_after_another() -> None:
    entries = [entry("a", 3), entry("b", 2)]
    simulation = Simulation(entries, 1, in_order=True)
    assert simulation.run() == 5.0
    assert simulation.ended == {"a": 3.0, "b": 5.0}


def queue_of(*entries: Entry, cores: int, num_lanes: int, **options: object) -> StepQueue:
    return StepQueue(
        list(entries),
        threads=cores,
        num_lanes=num_lanes,
        clock=lambda: 0.0,
        on_end=lambda work, error: None,
        **options,  # type: ignore[arg-type]
    )


def test_a_lone_task_gets_all_threads_unless_deterministic() -> None:
    for deterministic, width in ((False, 4), (True, 1)):
        queue = queue_of(entry("a", 5), cores=4, num_lanes=1, deterministic=deterministic)
        grant = queue.take(lane())
        assert grant is not None
        assert grant.width == width


def test_a_share_in_the_plan_caps_the_threads() -> None:
    grant = queue_of(entry("a", 5, cap=0.5), cores=4, num_lanes=1).take(lane())
    assert grant is not None
    assert grant.width == 2


def test_the_width_that_was_faster_stays() -> None:
    for rate, width in ((0.5, 4), (2.0, 1)):
        each = entry("a", 5)
        each.rates, each.tried = {1: 1.0, 4: rate}, {1: 3, 4: 3}
        grant = queue_of(each, cores=4, num_lanes=1).take(lane())
        assert grant is not None
        assert grant.width == width


def test_fewer_tasks_than_cores_share_them_by_work() -> None:
    queue = queue_of(entry("a", 30), entry("b", 10), cores=8, num_lanes=2)
    widths = {}
    for _ in range(2):
        grant = queue.take(lane())
        assert grant is not None
        widths[grant.work.task] = grant.width
    assert widths == {"a": 6, "b": 2}


def test_short_steps_are_granted_several_at_a_time() -> None:
    each = entry("a", 500, step_s=0.001)
    each.rates, each.tried = {1: 0.001}, {1: 5}
    grant = queue_of(each, cores=1, num_lanes=1).take(lane())
    assert grant is not None
    assert grant.num_steps == 5


def test_a_lane_bound_to_tasks_leaves_when_they_have_ended() -> None:
    a, b = entry("a", 1), entry("b", 5)
    queue = queue_of(a, b, cores=2, num_lanes=2)
    grant = queue.take(lane("a", width=1))
    assert grant is not None
    assert grant.work.task == "a"
    grant.work.step()
    queue.give_back(grant, seconds=1.0, num_examples=1, error=None)
    assert queue.take(lane("a", width=1)) is None
    assert queue.take(lane("b", width=1)) is not None


def test_past_the_deadline_work_is_only_finished() -> None:
    queue = queue_of(entry("a", 5), cores=1, num_lanes=1, deadline_s=-1.0)
    grant = queue.take(lane())
    assert grant is not None
    assert (grant.num_steps, grant.last) == (0, True)
    queue.give_back(grant, seconds=0.0, num_examples=0, error=None)
    assert queue.take(lane()) is None


@pytest.mark.parametrize("bound", [True, False])
def test_a_lost_lane_fails_the_tasks_that_nobody_else_can_run(bound: bool) -> None:
    ended: dict[str, BaseException | None] = {}
    queue = StepQueue(
        [entry("a", 5), entry("b", 5)],
        threads=2,
        num_lanes=2 if bound else 1,
        clock=lambda: 0.0,
        on_end=lambda work, error: ended.update({work.task: error}),
    )
    error = RuntimeError("no stream")
    queue.lane_lost(lane("a") if bound else lane(), error)
    assert ended == ({"a": error} if bound else {"a": error, "b": error})
