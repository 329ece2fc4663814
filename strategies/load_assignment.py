"""How many examples of each task each client trains, so that the slowest client is as fast as can be.

With load W, held examples n, demand V, solo cost c, capacity C and fixed seconds F (links included):

    minimise   T
    subject to sum_d W_di = N_i                      every task gets its examples
               F_d + sum_i V_di c_di W_di / C_d <= T  demand-seconds of a device (sequential sharing: sum_i c_di W_di)
               F_d + c_di W_di <= T                   no task beats itself running alone
               F_d + sum_i u_di W_di <= T             link seconds of split tasks, up and down alike
               sum_di s_di W_di / C_server <= T       the device of the split service
               w_min n_di <= W_di <= e_max n_di       nobody forgotten, nobody flogged

Ties: T is fixed, then sum n_di (W_di / n_di - mean_i)^2 is minimised, so that loads stay as even as the optimum allows.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import clarabel
import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog

from strategies.options import StrategyError
from strategies.whole_examples import fill_evenly, whole_bounds, whole_loads

log = logging.getLogger("paceline.strategies")

Floats = npt.NDArray[np.float64]

# The optimum T leaves a single point for the tie-break in many cases; this much room keeps it well posed.
TIE_ROOM = 1e-6


@dataclass(frozen=True, kw_only=True)
class TaskLoad:
    """One task on one client: examples held n, demand V (0..1) and solo cost c (seconds per example).

    Of a task that is split, c is the pipeline's makespan, V the device's part of it, and `uplink_s`, `downlink_s` and
    `server_s` are the seconds that an example keeps the client's link and the split service's device busy.
    """

    num_held: int
    demand: float
    solo_cost_s: float
    uplink_s: float = 0.0
    downlink_s: float = 0.0
    server_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """One client: its tasks by name, capacity C, and the seconds it needs whatever it trains (`fixed_s` + `link_s`)."""

    client: str
    tasks: Mapping[str, TaskLoad]
    capacity: float = 1.0
    fixed_s: float = 0.0
    link_s: float = 0.0

    def device_cost_s(self, task: str, sharing_mode: str) -> float:
        """Seconds of the device one example takes up: V c / C, or c where tasks run one after another."""
        load = self.tasks[task]
        if sharing_mode == "sequential":
            return load.solo_cost_s
        # Exclusive shares sum to at most 1, and speed at share v is never below v / V: the device serves at most 1.
        capacity = min(self.capacity, 1.0) if sharing_mode == "exclusive" else self.capacity
        return load.demand * load.solo_cost_s / capacity

    def finish_s(self, loads: Mapping[str, float], sharing_mode: str) -> float:
        """When the client is done with `loads` (examples by task), counted from the start of the round."""
        if not any(loads.values()):
            return 0.0
        device_s = sum(self.device_cost_s(task, sharing_mode) * load for task, load in loads.items())
        alone_s = max(self.tasks[task].solo_cost_s * load for task, load in loads.items())
        up_s = sum(self.tasks[task].uplink_s * load for task, load in loads.items())
        down_s = sum(self.tasks[task].downlink_s * load for task, load in loads.items())
        return self.fixed_s + self.link_s + max(device_s, alone_s, up_s, down_s)


@dataclass(frozen=True, kw_only=True)
class LoadProblem:
    """All clients and the examples N_i each task is to train. Clients are kept in the order of their names.

    `server_capacity` is what the split service's device serves per second, in seconds of work of one stage.
    """

    clients: tuple[ClientLoad, ...]
    totals: Mapping[str, int]
    min_load: float = 0.1
    max_load: float = 2.0
    sharing_mode: str = "competitive"
    server_capacity: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(sorted(self.clients, key=lambda client: client.client)))

    def makespan_s(self, loads: Mapping[str, Mapping[str, float]]) -> float:
        """When the last client is done with `loads` (examples by client and task)."""
        clients_s = [client.finish_s(loads.get(client.client, {}), self.sharing_mode) for client in self.clients]
        server_s = sum(
            client.tasks[task].server_s * load
            for client in self.clients
            for task, load in loads.get(client.client, {}).items()
        )
        return max([*clients_s, server_s / self.server_capacity], default=0.0)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Whole examples by client and task (no zeros), when the last client should be done, and the least possible T."""

    loads: Mapping[str, Mapping[str, int]]
    plan_s: float
    bound_s: float


class LoadAssigner(ABC):
    """Assigns loads that meet the totals and the bounds; subclasses say by what measure they are good."""

    def assign(self, problem: LoadProblem) -> Assignment:
        """Loads for `problem`, in whole examples.

        Raises:
            StrategyError: no loads can satisfy the problem; the text names the task, the bound that binds and the
                nearest total that can be met. Or a cost that is not a positive finite number.
        """
        pairs = _Pairs(problem)
        if not len(pairs.held):
            return Assignment(loads={}, plan_s=0.0, bound_s=0.0)
        bound_s, ratios = self._solve(pairs)
        loads: dict[str, dict[str, int]] = {client.client: {} for client in problem.clients}
        for index, task in enumerate(pairs.tasks):
            chosen = np.flatnonzero(pairs.task_of == index)
            wanted = ratios[chosen] * pairs.held[chosen]
            whole = whole_loads(wanted, pairs.lower[chosen], pairs.upper[chosen], problem.totals[task])
            for pair, load in zip(chosen, whole, strict=True):
                if load:
                    loads[problem.clients[pairs.client_of[pair]].client][task] = int(load)
        loads = {client: tasks for client, tasks in loads.items() if tasks}
        plan_s = problem.makespan_s(loads)
        # The programme counts every holder's fixed seconds; whole loads may leave one out, and then it bounds nothing.
        return Assignment(loads=loads, plan_s=plan_s, bound_s=min(bound_s, plan_s))

    @abstractmethod
    def _solve(self, pairs: _Pairs) -> tuple[float, Floats]:
        """The least possible T in seconds, and W / n of every pair."""


class LinearProgramAssigner(LoadAssigner):
    """The exact optimum by linear programming (HiGHS), ties by a convex quadratic programme (Clarabel)."""

    def _solve(self, pairs: _Pairs) -> tuple[float, Floats]:
        bound, ratios = least_makespan(pairs)
        return bound * pairs.unit_s, most_even(pairs, bound, ratios)


class ProportionalAssigner(LoadAssigner):
    """Loads proportional to the examples held, moved to the nearest bound where that is outside."""

    def _solve(self, pairs: _Pairs) -> tuple[float, Floats]:
        bound, _ = least_makespan(pairs)
        return bound * pairs.unit_s, _filled(pairs, pairs.held.astype(float))


class EqualAssigner(LoadAssigner):
    """The same number of examples for every holder of a task.

    A client held at a bound takes that bound; the others share the rest equally.
    """

    def _solve(self, pairs: _Pairs) -> tuple[float, Floats]:
        bound, _ = least_makespan(pairs)
        return bound * pairs.unit_s, _filled(pairs, np.ones(len(pairs.held)))


ASSIGNERS: Mapping[str, type[LoadAssigner]] = {"proportional": ProportionalAssigner, "equal": EqualAssigner}


class _Pairs:
    """A problem as vectors over its (client, task) pairs with examples, checked; times in units of `unit_s`.

    The unit, the makespan of loads proportional to data, makes the numbers the solvers see independent of scale.
    """

    def __init__(self, problem: LoadProblem) -> None:
        self.tasks = tuple(sorted(task for task, total in problem.totals.items() if total > 0))
        rows = [
            (index, self.tasks.index(task), client, load, client.device_cost_s(task, problem.sharing_mode))
            for index, client in enumerate(problem.clients)
            for task, load in sorted(client.tasks.items())
            if load.num_held > 0 and task in self.tasks and _check_cost(client, task, load)
        ]
        self.num_clients = len(problem.clients)
        self.client_of = np.array([row[0] for row in rows], dtype=int)
        self.task_of = np.array([row[1] for row in rows], dtype=int)
        self.held = np.array([row[3].num_held for row in rows], dtype=int)
        self.totals = np.array([problem.totals[task] for task in self.tasks], dtype=float)
        self.lower = np.zeros(len(rows), dtype=int)
        self.upper = np.zeros(len(rows), dtype=int)
        for index, task in enumerate(self.tasks):
            chosen = self.task_of == index
            low, high = problem.min_load, problem.max_load
            self.lower[chosen], self.upper[chosen] = whole_bounds(
                task, self.held[chosen], low, high, problem.totals[task]
            )
        device_s = np.array([row[4] for row in rows])
        alone_s = np.array([row[3].solo_cost_s for row in rows])
        fixed_s = np.array([client.fixed_s + client.link_s for client in problem.clients])
        proportional = self.held * (self.totals / self._sums(self.held))[self.task_of] if rows else device_s
        busy_s = np.bincount(self.client_of, device_s * proportional, self.num_clients) if rows else fixed_s
        self.unit_s = float((fixed_s + busy_s).max()) if rows else 1.0
        self.device = device_s * self.held / self.unit_s
        self.alone = alone_s * self.held / self.unit_s
        self.uplink, self.downlink, self.server = (
            np.array([getattr(row[3], name) for row in rows]) * self.held / self.unit_s
            for name in ("uplink_s", "downlink_s", "server_s")
        )
        self.server /= problem.server_capacity
        self.fixed = fixed_s / self.unit_s

    def _sums(self, values: npt.NDArray[np.int_]) -> Floats:
        return np.bincount(self.task_of, values, len(self.tasks)).astype(np.float64)

    @property
    def lower_ratio(self) -> Floats:
        return np.asarray(self.lower / self.held, dtype=np.float64)

    @property
    def upper_ratio(self) -> Floats:
        return np.asarray(self.upper / self.held, dtype=np.float64)

    def totals_matrix(self) -> sparse.csr_array:
        """Row i times the ratios is the part of N_i that is assigned."""
        share = self.held / self.totals[self.task_of]
        return sparse.csr_array((share, (self.task_of, np.arange(len(share)))), (len(self.tasks), len(share)))

    def resources(self) -> tuple[sparse.csr_array, Floats]:
        """A row for each resource that several tasks share: times the ratios, plus the offset, it is its busy time.

        Resources are the device of each client that has a task, its link in either direction where a task of its own
        is split, and the device of the split service.
        """
        columns = np.arange(len(self.held))
        used = np.flatnonzero(np.bincount(self.client_of, minlength=self.num_clients))
        matrices, offsets = [], []
        for values in (self.device, self.uplink, self.downlink):
            matrix = sparse.csr_array((values, (self.client_of, columns)), (self.num_clients, len(columns)))
            rows = used if values is self.device else used[matrix.sum(axis=1)[used] > 0]
            matrices.append(matrix[rows])
            offsets.append(self.fixed[rows])
        if self.server.any():
            matrices.append(sparse.csr_array(self.server[np.newaxis, :]))
            offsets.append(np.zeros(1))
        return sparse.vstack(matrices).tocsr(), np.concatenate(offsets)


def least_makespan(pairs: _Pairs) -> tuple[float, Floats]:
    """The least T, in units of `pairs.unit_s`, and ratios W / n that reach it."""
    num_pairs = len(pairs.held)
    shared, offsets = pairs.resources()
    shared = sparse.hstack([shared, -np.ones((len(offsets), 1))])
    alone = sparse.hstack([sparse.diags_array(pairs.alone), -np.ones((num_pairs, 1))])
    solution = linprog(
        np.append(np.zeros(num_pairs), 1.0),
        A_ub=sparse.vstack([shared, alone]).tocsr(),
        b_ub=-np.concatenate([offsets, pairs.fixed[pairs.client_of]]),
        A_eq=sparse.hstack([pairs.totals_matrix(), sparse.csr_array((len(pairs.tasks), 1))]).tocsr(),
        b_eq=np.ones(len(pairs.tasks)),
        bounds=np.column_stack([np.append(pairs.lower_ratio, 0.0), np.append(pairs.upper_ratio, np.inf)]),
        method="highs",
    )
    # Totals lie within the sums of the bounds and T is free, so an optimum exists.
    assert solution.status == 0, f"load assignment: {solution.message}"
    return float(solution.x[-1]), np.asarray(solution.x[:-1], dtype=np.float64)


def most_even(pairs: _Pairs, bound: float, ratios: Floats) -> Floats:
    """Among all loads that finish by `bound`, those with the least sum of n (W / n - mean)^2.

    The mean N_i / sum_d n_di is the same for all loads that meet the totals: minimising sum n (W / n)^2 is the same.
    """
    num_pairs = len(pairs.held)
    shared, offsets = pairs.resources()
    deadline = max(bound, float((shared @ ratios + offsets).max())) * (1 + TIE_ROOM)
    room = np.maximum(deadline - pairs.fixed[pairs.client_of], 0.0)
    upper = np.maximum(np.minimum(pairs.upper_ratio, room / pairs.alone), pairs.lower_ratio)
    identity = sparse.identity(num_pairs)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    solution = clarabel.DefaultSolver(
        sparse.diags(pairs.held / pairs.held.mean()).tocsc(),
        np.zeros(num_pairs),
        sparse.vstack([pairs.totals_matrix(), shared, identity, -identity]).tocsc(),
        np.concatenate([np.ones(len(pairs.tasks)), deadline - offsets, upper, -pairs.lower_ratio]),
        [clarabel.ZeroConeT(len(pairs.tasks)), clarabel.NonnegativeConeT(len(offsets) + 2 * num_pairs)],
        settings,
    ).solve()
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        log.warning("load assignment: ties are not broken evenly this round: %s", solution.status)
        return ratios
    return np.clip(np.asarray(solution.x, dtype=np.float64), pairs.lower_ratio, pairs.upper_ratio)


def _filled(pairs: _Pairs, weights: Floats) -> Floats:
    ratios = np.zeros(len(pairs.held))
    for index, total in enumerate(pairs.totals):
        chosen = pairs.task_of == index
        loads = fill_evenly(weights[chosen], pairs.lower[chosen], pairs.upper[chosen], total)
        ratios[chosen] = loads / pairs.held[chosen]
    return ratios


def _check_cost(client: ClientLoad, task: str, load: TaskLoad) -> bool:
    values: Sequence[tuple[str, float, float]] = (
        ("solo cost", load.solo_cost_s, 0.0),
        ("demand", load.demand, 0.0),
        ("capacity", client.capacity, 0.0),
        ("fixed seconds", client.fixed_s, -1e-300),
        ("link seconds", client.link_s, -1e-300),
        ("uplink seconds", load.uplink_s, -1e-300),
        ("downlink seconds", load.downlink_s, -1e-300),
        ("server seconds", load.server_s, -1e-300),
    )
    for what, value, above in values:
        if not (math.isfinite(value) and value > above):
            raise StrategyError(f"client {client.client!r}, task {task!r}: {what} {value!r} is no usable number")
    return True
