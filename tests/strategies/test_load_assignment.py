"""Load assignment: numbers checked by hand, laws by property tests, every small case against brute force."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.load_assignment import (
    ClientLoad,
    EqualAssigner,
    LinearProgramAssigner,
    LoadAssigner,
    LoadProblem,
    ProportionalAssigner,
    TaskLoad,
)
from strategies.options import StrategyError
from strategies.whole_examples import whole_loads

ASSIGNERS = (LinearProgramAssigner, ProportionalAssigner, EqualAssigner)
every_assigner = pytest.mark.parametrize("assigner", [kind() for kind in ASSIGNERS], ids=lambda a: type(a).__name__)


def client(name: str, capacity: float = 1.0, fixed_s: float = 0.0, **tasks: tuple[int, float, float]) -> ClientLoad:
    """A client from (examples held, demand, solo cost) by task."""
    loads = {task: TaskLoad(num_held=n, demand=v, solo_cost_s=c) for task, (n, v, c) in tasks.items()}
    return ClientLoad(client=name, tasks=loads, capacity=capacity, fixed_s=fixed_s)


def in_unit(load: TaskLoad, unit: float) -> TaskLoad:
    """All of a task's seconds times `unit`."""
    seconds = ("solo_cost_s", "uplink_s", "downlink_s", "server_s")
    return replace(load, **{name: getattr(load, name) * unit for name in seconds})


@st.composite
def problems(draw: st.DrawFn) -> LoadProblem:
    """Up to 6 clients with up to 3 tasks, unequal by factors of thousands; totals that the bounds allow."""
    tasks = draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=3, unique=True))
    clients = []
    for index in range(draw(st.integers(1, 6))):
        mine = tasks if index == 0 else draw(st.lists(st.sampled_from(tasks), unique=True))
        clients.append(
            ClientLoad(
                client=f"client-{index}",
                capacity=draw(st.floats(0.5, 1.5)),
                fixed_s=draw(st.sampled_from([0.0, 0.1, 2.0])),
                link_s=draw(st.sampled_from([0.0, 0.3])),
                tasks={
                    task: TaskLoad(
                        num_held=draw(st.integers(1, 500)),
                        demand=draw(st.floats(0.05, 1.0)),
                        solo_cost_s=draw(st.floats(1e-4, 0.3)),
                        uplink_s=draw(st.sampled_from([0.0, 0.0, 0.01, 0.2])),
                        downlink_s=draw(st.sampled_from([0.0, 0.0, 0.05])),
                        server_s=draw(st.sampled_from([0.0, 0.0, 0.02])),
                    )
                    for task in mine
                },
            )
        )
    part = draw(st.floats(0.1, 2.0))
    held = {task: sum(c.tasks[task].num_held for c in clients if task in c.tasks) for task in tasks}
    return LoadProblem(
        clients=tuple(clients),
        totals={task: max(1, round(part * number)) for task, number in held.items()},
        sharing_mode=draw(st.sampled_from(["competitive", "exclusive", "sequential"])),
    )


def loads_of(assigner: LoadAssigner, problem: LoadProblem) -> dict[str, dict[str, int]]:
    return {name: dict(loads) for name, loads in assigner.assign(problem).loads.items()}


def test_two_equal_clients_share_equally_and_a_twice_as_fast_one_takes_two_thirds() -> None:
    slow, fast = client("slow", x=(100, 1.0, 0.02)), client("fast", x=(100, 1.0, 0.01))
    same = replace(slow, client="same")
    assert loads_of(LinearProgramAssigner(), LoadProblem(clients=(slow, same), totals={"x": 90})) == {
        "slow": {"x": 45},
        "same": {"x": 45},
    }
    found = LinearProgramAssigner().assign(LoadProblem(clients=(slow, fast), totals={"x": 90}))
    assert found.loads == {"slow": {"x": 30}, "fast": {"x": 60}}
    assert found.bound_s == pytest.approx(0.6)
    assert found.plan_s == pytest.approx(0.6)


def test_competing_tasks_add_up_by_demand_and_none_beats_itself_alone() -> None:
    # Demand 0.5 each: 100 examples of both keep the device busy for (0.5 + 0.5) * 100 * 0.01 = 1 s.
    both = client("a", x=(100, 0.5, 0.01), y=(100, 0.5, 0.01))
    # Demand 0.2 each: the device would need 0.4 s, but each task alone takes 1 s.
    light = client("a", x=(100, 0.2, 0.01), y=(100, 0.2, 0.01))
    for case, mode, seconds in (
        (both, "competitive", 1.0),
        (light, "competitive", 1.0),
        (replace(both, capacity=2.0), "competitive", 1.0),
        (replace(both, capacity=0.5), "competitive", 2.0),
        (replace(both, capacity=2.0), "exclusive", 1.0),
        (both, "sequential", 2.0),
        (replace(both, fixed_s=3.0, link_s=1.0), "competitive", 5.0),
    ):
        problem = LoadProblem(clients=(case,), totals={"x": 100, "y": 100}, sharing_mode=mode)
        found = LinearProgramAssigner().assign(problem)
        assert (found.plan_s, found.bound_s) == (pytest.approx(seconds), pytest.approx(seconds))


def test_ties_are_broken_evenly() -> None:
    # The slowest client's lower bound sets T = 10 s; a and b could split x in many ways, c and d likewise.
    slow = client("slow", x=(100, 1.0, 1.0))
    rest = [client(name, x=(size, 1.0, 0.01)) for name, size in (("a", 100), ("b", 300))]
    found = LinearProgramAssigner().assign(LoadProblem(clients=(slow, *rest), totals={"x": 210}))
    assert found.plan_s == pytest.approx(10.0)
    assert found.loads == {"slow": {"x": 10}, "a": {"x": 50}, "b": {"x": 150}}


def test_equal_loads_are_capped_and_the_excess_is_shared_equally() -> None:
    clients = (client("a", x=(10, 1.0, 0.01)), client("b", x=(100, 1.0, 0.01)), client("c", x=(100, 1.0, 0.01)))
    problem = LoadProblem(clients=clients, totals={"x": 120})
    # 40 each would be more than 2 * 10 for a: it takes 20, the others 50 each.
    assert loads_of(EqualAssigner(), problem) == {"a": {"x": 20}, "b": {"x": 50}, "c": {"x": 50}}
    assert loads_of(ProportionalAssigner(), replace(problem, totals={"x": 105})) == {
        "a": {"x": 5},
        "b": {"x": 50},
        "c": {"x": 50},
    }


@every_assigner
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_totals_are_met_within_bounds(assigner: LoadAssigner, problem: LoadProblem) -> None:
    found = assigner.assign(problem)
    for task, total in problem.totals.items():
        assert sum(loads.get(task, 0) for loads in found.loads.values()) == total
    for one in problem.clients:
        for task, load in one.tasks.items():
            given_load = found.loads.get(one.client, {}).get(task, 0)
            assert isinstance(given_load, int)
            # Whole examples: a bound is met to the next whole number.
            assert math.floor(0.1 * load.num_held) <= given_load <= math.ceil(2 * load.num_held)
    assert found.plan_s >= found.bound_s * (1 - 1e-6)


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_the_plan_is_at_the_bound_but_for_whole_examples(problem: LoadProblem) -> None:
    found = LinearProgramAssigner().assign(problem)
    one_more_s = max(
        sum(max(c.device_cost_s(task, problem.sharing_mode), c.tasks[task].solo_cost_s) for task in c.tasks)
        for c in problem.clients
        if c.tasks
    )
    assert found.plan_s <= found.bound_s * (1 + 1e-5) + one_more_s


@settings(max_examples=40, deadline=None)
@given(problem=problems(), which=st.integers(0, 5), speed=st.floats(1.0, 10.0))
def test_the_bound_never_rises_when_a_client_gets_faster(problem: LoadProblem, which: int, speed: float) -> None:
    clients = list(problem.clients)
    chosen = clients[which % len(clients)]
    faster = {task: replace(load, solo_cost_s=load.solo_cost_s / speed) for task, load in chosen.tasks.items()}
    clients[which % len(clients)] = replace(chosen, tasks=faster)
    before = LinearProgramAssigner().assign(problem).bound_s
    after = LinearProgramAssigner().assign(replace(problem, clients=tuple(clients))).bound_s
    assert after <= before * (1 + 1e-6)


@every_assigner
@settings(max_examples=30, deadline=None)
@given(problem=problems(), seed=st.integers(0, 100))
def test_the_order_of_clients_and_tasks_does_not_matter(
    assigner: LoadAssigner, problem: LoadProblem, seed: int
) -> None:
    clients = [replace(one, tasks=dict(reversed(one.tasks.items()))) for one in problem.clients]
    random.Random(seed).shuffle(clients)
    totals = dict(reversed(list(problem.totals.items())))
    shuffled = LoadProblem(clients=tuple(clients), totals=totals, sharing_mode=problem.sharing_mode)
    assert loads_of(assigner, shuffled) == loads_of(assigner, problem)


@every_assigner
@settings(max_examples=30, deadline=None)
@given(problem=problems(), exponent=st.integers(-12, 12))
def test_the_unit_of_time_does_not_matter(assigner: LoadAssigner, problem: LoadProblem, exponent: int) -> None:
    unit = 2.0**exponent
    clients = [
        replace(
            one,
            fixed_s=one.fixed_s * unit,
            link_s=one.link_s * unit,
            tasks={task: in_unit(load, unit) for task, load in one.tasks.items()},
        )
        for one in problem.clients
    ]
    found, scaled = assigner.assign(problem), assigner.assign(replace(problem, clients=tuple(clients)))
    assert scaled.loads == found.loads
    assert scaled.bound_s == pytest.approx(found.bound_s * unit)


@settings(max_examples=12, deadline=None)
@given(
    costs=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
    held=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    demand=st.floats(0.2, 1.0),
    mode=st.sampled_from(["competitive", "sequential"]),
)
def test_brute_force_finds_nothing_better(costs: list[float], held: list[int], demand: float, mode: str) -> None:
    names = ("a", "b", "c")
    clients = tuple(
        client(name, x=(held[2 * i], demand, costs[2 * i]), y=(held[2 * i + 1], 1.0, costs[2 * i + 1]))
        for i, name in enumerate(names)
    )
    totals = {"x": sum(held[::2]), "y": sum(held[1::2])}
    problem = LoadProblem(clients=clients, totals=totals, min_load=0.0, sharing_mode=mode)
    ways = {
        task: [
            loads
            for loads in itertools.product(*(range(2 * one.tasks[task].num_held + 1) for one in clients))
            if sum(loads) == total
        ]
        for task, total in totals.items()
    }
    best = min(
        problem.makespan_s({name: {"x": x, "y": y} for name, x, y in zip(names, xs, ys, strict=True)})
        for xs in ways["x"]
        for ys in ways["y"]
    )
    assert LinearProgramAssigner().assign(problem).bound_s <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"totals": {"x": 201}}, "task 'x': 201 examples a round are more than strategy.max-load 2 times the 100 held; "
         "the most that can be trained is 200"),
        ({"totals": {"x": 9}}, "task 'x': 9 examples a round are fewer than strategy.min-load 0.1 times the 100 held; "
         "the least that can be trained is 10"),
        ({"totals": {"x": 50, "y": 1}}, "task 'y': no client holds an example of it"),
        ({"clients": (client("a", x=(100, 1.0, math.nan)),)}, "client 'a', task 'x': solo cost nan"),
        ({"clients": (client("a", x=(100, 0.0, 0.1)),)}, "client 'a', task 'x': demand 0.0"),
        ({"clients": (client("a", capacity=0.0, x=(100, 1.0, 0.1)),)}, "client 'a', task 'x': capacity 0.0"),
        ({"clients": (client("a", fixed_s=-1.0, x=(100, 1.0, 0.1)),)}, "client 'a', task 'x': fixed seconds -1.0"),
    ],
)  # fmt: skip
@every_assigner
def test_what_cannot_be_done_is_said(assigner: LoadAssigner, change: dict[str, object], text: str) -> None:
    problem = LoadProblem(clients=(client("a", x=(100, 1.0, 0.1)),), totals={"x": 50})
    with pytest.raises(StrategyError) as caught:
        assigner.assign(replace(problem, **change))
    assert str(caught.value).startswith(text)


def test_one_example_each_and_nobody_at_all() -> None:
    crowd = tuple(client(f"c{index}", x=(1, 1.0, 0.1)) for index in range(10))
    loads = loads_of(LinearProgramAssigner(), LoadProblem(clients=crowd, totals={"x": 5}))
    assert sum(load["x"] for load in loads.values()) == 5
    assert LinearProgramAssigner().assign(LoadProblem(clients=(), totals={})).loads == {}


def test_a_hundred_clients_and_ten_tasks() -> None:
    rng = np.random.default_rng(1)
    clients = tuple(
        client(
            f"c{d:03}",
            capacity=rng.uniform(0.8, 1.3),
            fixed_s=rng.uniform(0, 0.5),
            **{
                f"t{i}": (int(rng.integers(5, 2000)), rng.uniform(0.2, 1), 0.002 * math.exp(rng.normal(0, 1)))
                for i in range(10)
                if rng.random() < 0.7
            },
        )
        for d in range(100)
    )
    totals = {f"t{i}": sum(c.tasks[f"t{i}"].num_held for c in clients if f"t{i}" in c.tasks) // 2 for i in range(10)}
    found = LinearProgramAssigner().assign(LoadProblem(clients=clients, totals=totals))
    assert found.bound_s <= found.plan_s <= found.bound_s * 1.02


def test_rounding_of_huge_loads_ends() -> None:
    wanted = np.array([4.0e11, 6.0e11])
    loads = whole_loads(wanted, np.array([0, 0]), np.array([10**12, 10**12]), 10**12 + 10**8)
    assert loads.sum() == 10**12 + 10**8


def split_client(name: str, num_held: int, **costs: float) -> ClientLoad:
    """A client with one task of demand 0.1 that costs 0.1 s an example, and what is given."""
    load = replace(TaskLoad(num_held=num_held, demand=0.1, solo_cost_s=0.1), **costs)
    return ClientLoad(client=name, tasks={"x": load})


def test_the_link_of_split_tasks_bounds_a_client() -> None:
    """Two tasks of 10 examples whose uploads take 1 s an example share one uplink: 20 s, not 10."""
    task = TaskLoad(num_held=10, demand=0.1, solo_cost_s=1.0, uplink_s=1.0, downlink_s=0.5)
    one = ClientLoad(client="a", tasks={"x": task, "y": task})
    problem = LoadProblem(clients=(one,), totals={"x": 10, "y": 10})
    found = LinearProgramAssigner().assign(problem)
    assert found.plan_s == pytest.approx(20.0)
    assert found.bound_s == pytest.approx(20.0)


@pytest.mark.parametrize(("capacity", "expected_s"), [(1.0, 8.0), (2.0, 4.0), (100.0, 2.0)])
def test_the_split_service_bounds_all_clients_together(capacity: float, expected_s: float) -> None:
    """Two clients of 20 examples each, 0.2 s of the service's device an example: 8 s of it, or 2 s of each client."""
    clients = (split_client("a", 20, server_s=0.2), split_client("b", 20, server_s=0.2))
    problem = LoadProblem(clients=clients, totals={"x": 40}, server_capacity=capacity)
    found = LinearProgramAssigner().assign(problem)
    assert found.plan_s == pytest.approx(expected_s)
    assert found.bound_s == pytest.approx(expected_s)


def test_work_moves_from_a_busy_service_to_clients_that_train_whole() -> None:
    """The split client takes 0.1 s an example of its own and 0.4 s of the service's; the other one 0.4 s, whole."""
    whole = ClientLoad(client="b", tasks={"x": TaskLoad(num_held=50, demand=1.0, solo_cost_s=0.4)})
    problem = LoadProblem(clients=(split_client("a", 50, server_s=0.4), whole), totals={"x": 60})
    found = LinearProgramAssigner().assign(problem)
    assert found.loads == {"a": {"x": 30}, "b": {"x": 30}}
    assert found.plan_s == pytest.approx(12.0)
