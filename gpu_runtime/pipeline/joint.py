"""How all clients of one split service train: cuts that make the slowest client's round as short as can be.

Bisection on the round's seconds T: at each T every task takes the way to train with the least server work whose own
round fits into T; T is long enough when the server, and each client's device and links, have no more than T to do.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_runtime.pipeline.contention import RoundWork
from gpu_runtime.pipeline.cut_costs import AUTO, LOSSLESS, Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.makespan import Busy, CutCost, not_negative, step_s
from gpu_runtime.pipeline.planner import Choice, choose, lower_bound_s, split_choice, whole_choice

# Of the round's seconds, relative.
PRECISION = 1e-4
SHARED = ("device", "uplink", "downlink")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One task of one client for one round: `num_steps` steps, and `fixed_s` seconds of the client besides."""

    client: str
    split: SplitTask
    link: Link
    num_steps: int
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"{self.client}/{self.split.task}: num_steps must be at least 1, not {self.num_steps}")
        not_negative(f"{self.client}/{self.split.task}: fixed_s", self.fixed_s)


@dataclass(frozen=True, kw_only=True)
class JointChoice:
    """`choices` in the order of the requests, and the seconds `round_s` that no client's round exceeds.

    `round_s` counts the work of shared resources but not the waiting for one another; `contention.estimate_s` of
    `round_works` does. `binding` is the resource with the most to do: "server", or "<client>/device", "/uplink" or
    "/downlink", or "/latency" where that client mostly waits for messages on their way.
    """

    choices: tuple[Choice, ...]
    round_s: float
    binding: str


def choose_jointly(
    requests: Sequence[Request], *, server_capacity: float = 1.0, options: SplitOptions | None = None
) -> JointChoice:
    """Choices for all `requests`, whose server work shares a server that does `server_capacity` seconds of it a second.

    Where the server has time for all of them, each task has its fastest way (`planner.choose`).

    Raises:
        ValueError: no requests, a capacity that is not above 0, or mode "on" and a task that cannot be cut.
    """
    if not requests:
        raise ValueError("requests must not be empty")
    if not 0 < server_capacity < math.inf:
        raise ValueError(f"server_capacity must be finite and above 0, not {server_capacity}")
    options = options or SplitOptions()
    fastest = [_Way(each, choose(each.split, each.link, options)) for each in requests]
    least_s = max(way.round_s for way in fastest)
    if _excess_s(_shared_loads(fastest).values(), least_s) == 0 and _server_s(fastest) <= server_capacity * least_s:
        return _joint(fastest, least_s, _binding_alone(max(fastest, key=lambda way: way.round_s)))
    clients = [request.client for request in requests]
    ways = [
        _ways(request, best, options, keep_all=clients.count(request.client) > 1)
        for request, best in zip(requests, fastest, strict=True)
    ]
    chosen = _bisect(ways, least_s, server_capacity, options)
    # The fastest ways did not fit: because of the server, or of tasks that share a device.
    loads = {name: load_s for name, load_s in _shared_loads(chosen).items() if clients.count(_client_of(name)) > 1}
    loads["server"] = _server_s(chosen) / server_capacity
    round_s = max(*loads.values(), *(way.round_s for way in chosen))
    return _joint(chosen, round_s, max(loads, key=lambda name: loads[name]))


def round_works(requests: Sequence[Request], choices: Sequence[Choice]) -> list[RoundWork]:
    """What the choices mean for shared resources, for `contention.estimate_s`."""
    return [
        RoundWork(
            client=request.client,
            alone_s=request.fixed_s + request.num_steps * choice.step_s,
            busy=Busy(
                device=request.num_steps * choice.device_step_s,
                uplink=request.num_steps * choice.uplink_step_s,
                server=request.num_steps * choice.server_step_s,
                downlink=request.num_steps * choice.downlink_step_s,
            ),
        )
        for request, choice in zip(requests, choices, strict=True)
    ]


class _Way:
    """One way to train a request. Seconds are those of the round, `shared_s` those of `SHARED`."""

    __slots__ = ("choice", "request", "round_s", "server_s", "shared_s")

    def __init__(self, request: Request, choice: Choice) -> None:
        steps = request.num_steps
        self.request, self.choice = request, choice
        self.round_s = request.fixed_s + steps * choice.step_s
        self.server_s = steps * choice.server_step_s
        self.shared_s = (steps * choice.device_step_s, steps * choice.uplink_step_s, steps * choice.downlink_step_s)


def _joint(chosen: Sequence[_Way], round_s: float, binding: str) -> JointChoice:
    return JointChoice(choices=tuple(way.choice for way in chosen), round_s=round_s, binding=binding)


def _ways(request: Request, fastest: _Way, options: SplitOptions, *, keep_all: bool) -> list[_Way]:
    """Ways to train `request` by rising server work.

    Unless `keep_all`, only those that are faster than all with less, told apart by whether they lose precision.
    """
    split = request.split
    ways = [fastest]
    if options.mode == AUTO:
        ways.append(_Way(request, whole_choice(split)))
    possible = cuts(split, request.link, options)
    for lossless in (True, False):
        points = _points([cut for cut in possible if (cut.encoding == LOSSLESS) == lossless], split, options, keep_all)
        ways += [_Way(request, split_choice(split, cut, count)) for cut, count in points]
    return sorted(ways, key=lambda way: (way.server_s, way.round_s))


def _points(
    possible: Sequence[CutCost], split: SplitTask, options: SplitOptions, keep_all: bool
) -> list[tuple[CutCost, int]]:
    """Cuts with their useful numbers of micro-batches."""
    size = split.batch_size
    counts = _counts(size, options.min_micro_batches, options.max_micro_batches)
    least = counts[0]
    if keep_all:  # for each cut, what is best alone and what has the fewest messages
        return [(cut, count) for cut in possible for count in {least, min(counts, key=lambda n: step_s(cut, size, n))}]
    found: list[tuple[float, float, CutCost, int]] = []
    seen: list[tuple[float, float]] = []
    for cut in possible:
        (a, e), update_s = cut.stages[2], cut.server_update_s
        work_s, bound_s = size * e + update_s, lower_bound_s(cut, size, 1, 1)
        if any(server_s <= least * a + work_s and seconds <= bound_s for server_s, seconds in seen):
            continue
        best_s = math.inf
        for count in counts:
            seconds = step_s(cut, size, count)
            if seconds < best_s:  # else more micro-batches, with more work for the server, make nothing faster
                best_s = seconds
                found.append((count * a + work_s, seconds, cut, count))
        seen += [found[-1][:2], (least * a + work_s, step_s(cut, size, least))]
    front: list[tuple[CutCost, int]] = []
    best_s = math.inf
    for _, seconds, cut, count in sorted(found, key=lambda entry: entry[:2]):
        if seconds < best_s:
            best_s = seconds
            front.append((cut, count))
    return front


def _counts(batch_size: int, least: int, most: int) -> list[int]:
    """The smallest number of micro-batches for each size of the largest: 10 examples in 1, 2, 3, 4, 5, 10."""
    counts, count = [], min(least, batch_size)
    while count <= min(most, batch_size):
        counts.append(count)
        largest = -(-batch_size // count)
        count = -(-batch_size // (largest - 1)) if largest > 1 else batch_size + 1
    return counts


def _bisect(ways: Sequence[list[_Way]], least_s: float, capacity: float, options: SplitOptions) -> list[_Way]:
    """The choices of the shortest round found that has time for all work."""
    low_s, high_s = least_s, least_s
    while (chosen := _chosen(ways, high_s, capacity, options)) is None:
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > PRECISION * high_s:
        middle_s = (low_s + high_s) / 2
        better = _chosen(ways, middle_s, capacity, options)
        if better is None:
            low_s = middle_s
        else:
            high_s, chosen = middle_s, better
    return chosen


def _chosen(ways: Sequence[list[_Way]], round_s: float, capacity: float, options: SplitOptions) -> list[_Way] | None:
    """Ways that fit into `round_s` with the least server work; None where they do not."""
    chosen = []
    for some in ways:
        fitting = [way for way in some if way.round_s <= round_s]
        if not fitting:
            return None
        limit_s = fitting[0].server_s * (1 + options.tie_fraction)
        chosen.append(min((way for way in fitting if way.server_s <= limit_s), key=_rank))
    if not _relieve(chosen, ways, round_s) or _server_s(chosen) > capacity * round_s:
        return None
    return chosen


def _rank(way: _Way) -> tuple[bool, int, float]:
    """Smaller is better among ways with as much server work."""
    return way.choice.encoding != LOSSLESS, way.choice.micro_batches, way.round_s


def _relieve(chosen: list[_Way], ways: Sequence[list[_Way]], round_s: float) -> bool:
    """Change the ways of tasks that share a device and links until those have time for all of them.

    Each change is the one with the least server work for the seconds it saves: not always the best set, always one
    that fits. False where none is found.
    """
    crowded = {_client_of(name) for name, load_s in _shared_loads(chosen).items() if _over(load_s, round_s) > 0}
    for client in sorted(crowded):
        indices = [index for index, way in enumerate(chosen) if way.request.client == client]
        while excess_s := _excess_s(loads := _client_loads([chosen[index] for index in indices]), round_s):
            best: tuple[float, int, _Way] | None = None
            for index in indices:
                now = chosen[index]
                others = [load_s - mine_s for load_s, mine_s in zip(loads, now.shared_s, strict=True)]
                for way in ways[index]:
                    if way.round_s > round_s:
                        continue
                    changed = [other_s + mine_s for other_s, mine_s in zip(others, way.shared_s, strict=True)]
                    saved_s = excess_s - _excess_s(changed, round_s)
                    if saved_s > PRECISION * excess_s:
                        price = (way.server_s - now.server_s) / saved_s
                        if best is None or price < best[0]:
                            best = price, index, way
            if best is None:
                return False
            chosen[best[1]] = best[2]
    return True


def _server_s(chosen: Sequence[_Way]) -> float:
    return sum(way.server_s for way in chosen)


def _shared_loads(chosen: Sequence[_Way]) -> dict[str, float]:
    """Seconds of "<client>/<resource>" for the devices and links of all clients."""
    clients: dict[str, list[_Way]] = {}
    for way in chosen:
        clients.setdefault(way.request.client, []).append(way)
    return {
        f"{client}/{name}": load_s
        for client, some in clients.items()
        for name, load_s in zip(SHARED, _client_loads(some), strict=True)
    }


def _client_loads(chosen: Sequence[_Way]) -> list[float]:
    """Seconds of `SHARED` of one client, whose tasks these are."""
    fixed_s = max(way.request.fixed_s for way in chosen)
    return [fixed_s + sum(seconds) for seconds in zip(*(way.shared_s for way in chosen), strict=True)]


def _excess_s(loads: Iterable[float], round_s: float) -> float:
    """By how much more there is to do than fits into `round_s`, summed over resources."""
    return sum(_over(load_s, round_s) for load_s in loads)


def _over(load_s: float, round_s: float) -> float:
    return max(0.0, load_s - round_s * (1 + 1e-12))


def _client_of(name: str) -> str:
    return name.rpartition("/")[0]


def _binding_alone(way: _Way) -> str:
    """What limits a client whose round nobody else makes longer."""
    if way.choice.cut is None:
        return f"{way.request.client}/device"
    loads = dict(zip(SHARED, way.shared_s, strict=True))
    loads |= {"server": way.server_s, "latency": way.request.num_steps * way.choice.cut.latency_s}
    name = max(loads, key=lambda key: loads[key])
    return name if name == "server" else f"{way.request.client}/{name}"
