"""How long one step of split training takes: the schedule of its micro-batches on device, links and server.

Standard library only. `simulator.py` computes the same from events; `planner.py` chooses by it.

A step runs as follows. The device does all forwards back to back. Each micro-batch is uploaded, served (forward, loss
and backward of the server's blocks) and its gradient downloaded, in order, as soon as the resource is free. The device
does the backwards in order, after the last forward, and then its optimiser's step. The server's optimiser step follows
its last micro-batch, but that one's gradient is sent before it: it delays at most the next step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

RESOURCES = ("device", "uplink", "server", "downlink")


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Seconds of one call on n examples: `call_s + n * example_s`."""

    call_s: float = 0.0
    example_s: float = 0.0

    def __post_init__(self) -> None:
        not_negative("call_s", self.call_s)
        not_negative("example_s", self.example_s)

    def at(self, num_examples: float) -> float:
        return self.call_s + num_examples * self.example_s


@dataclass(frozen=True, kw_only=True)
class CutCost:
    """What a micro-batch costs each resource when a model is cut after its first `split_point` blocks.

    Attributes:
        split_point, encoding: which cut, and how tensors cross it.
        device_forward, server, device_backward: seconds of computing, with the seconds to encode and decode.
        uplink, downlink: seconds that a message occupies the link: a fixed part and bytes over rate.
        latency_up_s, latency_down_s: seconds on the way, which occupy nothing.
        update_s, server_update_s: the optimiser's step, once per batch, on either side.

    Raises:
        ValueError: seconds that are negative or not finite; the text names the field.
    """

    split_point: int
    encoding: str = "fp32"
    device_forward: Affine
    uplink: Affine
    server: Affine
    downlink: Affine
    device_backward: Affine
    latency_up_s: float = 0.0
    latency_down_s: float = 0.0
    update_s: float = 0.0
    server_update_s: float = 0.0

    def __post_init__(self) -> None:
        if self.split_point < 1:
            raise ValueError(f"split_point must be at least 1, not {self.split_point}")
        for name in ("latency_up_s", "latency_down_s", "update_s", "server_update_s"):
            not_negative(name, getattr(self, name))

    @functools.cached_property
    def stages(self) -> tuple[tuple[float, float], ...]:
        """`call_s` and `example_s` of the five stages, in the order in which a micro-batch passes them."""
        stages = (self.device_forward, self.uplink, self.server, self.downlink, self.device_backward)
        return tuple((stage.call_s, stage.example_s) for stage in stages)

    @functools.cached_property
    def latency_s(self) -> float:
        """Both ways."""
        return self.latency_up_s + self.latency_down_s


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Seconds for which one step keeps each resource busy."""

    device: float
    uplink: float
    server: float
    downlink: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step: its seconds, and what it kept busy.

    `server_free_s` says when the server has done its optimiser's step, counted from the step's end (0: before that).
    """

    step_s: float
    busy: Busy
    server_free_s: float = 0.0

    def idle_fraction(self, resource: str) -> float:
        """Part of the step in which one of `RESOURCES` has nothing to do."""
        busy_s: float = getattr(self.busy, resource)
        return max(0.0, 1.0 - busy_s / self.step_s) if self.step_s > 0 else 0.0


def not_negative(name: str, value: float) -> None:
    """Raises ValueError, naming `name`, unless `value` is finite and at least 0."""
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, not {value}")


def micro_batch_sizes(batch_size: int, count: int) -> tuple[int, ...]:
    """Examples of each micro-batch: as even as can be, larger ones first, none empty.

    Both sides of a session use it. A batch of fewer than `count` examples is cut into single ones.

    Raises:
        ValueError: nothing to cut, or no parts to cut it into.
    """
    if batch_size < 1 or count < 1:
        raise ValueError(f"cannot cut a batch of {batch_size} examples into {count} micro-batches")
    count = min(count, batch_size)
    size, larger = divmod(batch_size, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def equal_makespan_s(cut: CutCost, micro_batch: float, count: int) -> float:
    """Seconds of one step of `count` equal micro-batches, without the optimisers' steps.

        T(N) = max{ N (cf + cb),  L + N cb,  L + (N - 1) m + cb },
        L = cf + u + s + d + l_up + l_down,  m = max(cf, u, s, d)

    The device is never idle; or it waits for the first gradient only; or it waits for the slowest resource. Example:
    with all five stages at 1 s and no latency, N = 3 takes max{6, 4 + 3, 4 + 2 + 1} = 7 s.
    """
    forward, up, server, down, backward = (call_s + micro_batch * example_s for call_s, example_s in cut.stages)
    first_s = forward + up + server + down + cut.latency_s
    slowest_s = max(forward, up, server, down)
    return max(
        count * (forward + backward),
        first_s + count * backward,
        first_s + (count - 1) * slowest_s + backward,
    )


def step_s(cut: CutCost, batch_size: int, count: int) -> float:
    """Seconds from one step's start to the next one's, its micro-batches cut by `micro_batch_sizes`, in closed form.

    A micro-batch passes five stages in order, and each stage takes the micro-batches in order: a flow shop, whose
    makespan is its longest staircase path. With r micro-batches of seconds p_j at stage j, then N - r of q_j, a path
    changes from the large to the small ones at some stage i:

        max_i  sum_{j<=i} p_j + (r - 1) max_{j<=i} p_j + sum_{j>=i} q_j + (N - r - 1) max_{j>=i} q_j

    Where all are equal this is the formula of `equal_makespan_s`. Where the server's optimiser step is longer than a
    micro-batch takes on its way from the server and back, the next step's server work starts late by the difference:
    then the result is an upper bound (exact where the server is the slowest stage); else it is exact.

    Raises:
        ValueError: `count` is not in 1..batch_size.
    """
    if not 1 <= count <= batch_size:
        raise ValueError(f"count must be in 1..{batch_size}, not {count}")
    size, num_larger = divmod(batch_size, count)
    (a0, e0), (a1, e1), (a2, e2), (a3, e3), (a4, e4) = cut.stages
    small = (a0 + size * e0, a1 + size * e1, a2 + size * e2, a3 + size * e3, a4 + size * e4)
    total_small = sum(small)
    if num_larger:
        large = (small[0] + e0, small[1] + e1, small[2] + e2, small[3] + e3, small[4] + e4)
        path_s = _staircase_s(large, num_larger, small, count - num_larger)
    else:
        path_s = total_small + (count - 1) * max(small)
    away_s = cut.latency_s + cut.update_s + total_small - small[2]
    device_s = count * (a0 + a4) + batch_size * (e0 + e4)
    return cut.update_s + max(device_s, path_s + cut.latency_s + max(0.0, cut.server_update_s - away_s))


def _staircase_s(large: Sequence[float], num_large: int, small: Sequence[float], num_small: int) -> float:
    """The longest path through a flow shop of `num_large` micro-batches and then `num_small`, at least one of each."""
    after: list[float] = []
    total, slowest = 0.0, 0.0
    for seconds in reversed(small):
        total += seconds
        slowest = max(slowest, seconds)
        after.append(total + (num_small - 1) * slowest)
    longest, total, slowest = 0.0, 0.0, 0.0
    for seconds in large:
        total += seconds
        slowest = max(slowest, seconds)
        longest = max(longest, total + (num_large - 1) * slowest + after.pop())
    return longest


def busy_s(cut: CutCost, batch_size: int, count: int) -> Busy:
    """Seconds of each resource for one step of `count` micro-batches, however they are cut."""
    forward, up, server, down, backward = (count * call_s + batch_size * example_s for call_s, example_s in cut.stages)
    return Busy(device=forward + backward + cut.update_s, uplink=up, server=server + cut.server_update_s, downlink=down)


def schedule(cut: CutCost, sizes: Sequence[int], server_free_s: float = 0.0) -> Schedule:
    """One step of micro-batches of any `sizes`, exactly.

    Args:
        cut: what they cost.
        sizes: examples of each micro-batch, in order.
        server_free_s: when the server is ready, counted from the step's start.

    Raises:
        ValueError: no micro-batches, or an empty one.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be one or more numbers above 0, not {list(sizes)}")
    forward_end = up_end = down_end = 0.0
    server_end = server_free_s
    arrivals = []
    for size in sizes:
        forward_end += cut.device_forward.at(size)
        up_end = max(up_end, forward_end) + cut.uplink.at(size)
        server_end = max(server_end, up_end + cut.latency_up_s) + cut.server.at(size)
        down_end = max(down_end, server_end) + cut.downlink.at(size)
        arrivals.append(down_end + cut.latency_down_s)
    backward_end = forward_end
    for size, arrival in zip(sizes, arrivals, strict=True):
        backward_end = max(backward_end, arrival) + cut.device_backward.at(size)
    end = backward_end + cut.update_s
    return Schedule(
        step_s=end,
        busy=busy_s(cut, sum(sizes), len(sizes)),
        server_free_s=max(0.0, server_end + cut.server_update_s - end),
    )


def steps_s(cut: CutCost, steps: Sequence[Sequence[int]]) -> float:
    """Seconds of consecutive steps, each given by its `sizes`, until the device has done the last one."""
    total_s, server_free_s = 0.0, 0.0
    for sizes in steps:
        step = schedule(cut, sizes, server_free_s)
        total_s, server_free_s = total_s + step.step_s, step.server_free_s
    return total_s


def total(parts: Sequence[Busy]) -> Busy:
    """Seconds of each resource, summed."""
    return Busy(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Busy)})
