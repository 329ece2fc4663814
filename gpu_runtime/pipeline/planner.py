"""Where to cut a model, into how many micro-batches a batch, and how tensors cross: the fastest step by `makespan`.

Plain numbers and standard library only. To follow drift, choose again with new rates before each round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_runtime.pipeline.cut_costs import AUTO, LOSSLESS, ON, Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.makespan import CutCost, busy_s, step_s


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How to train a task, and what a step takes: `step_s` in all, and the seconds it keeps each resource busy.

    `split_point` and `cut` are None where the task trains whole.
    """

    task: str
    split_point: int | None
    micro_batches: int
    encoding: str
    step_s: float
    device_step_s: float
    server_step_s: float
    uplink_step_s: float
    downlink_step_s: float
    unsplit_step_s: float
    cut: CutCost | None = None


def choose(split: SplitTask, link: Link, options: SplitOptions | None = None) -> Choice:
    """The fastest cut, number of micro-batches and encoding of all there are, for a client alone on the service.

    Of equally fast ones (`tie_fraction`) a lossless encoding is better than a lossy one, and then few micro-batches.

    Raises:
        ValueError: mode "on", and no cut is allowed.
    """
    options = options or SplitOptions()
    possible = cuts(split, link, options)
    if not possible:
        return whole_or_refused(split, options)
    cut, count = fastest(possible, split.batch_size, options)
    best = split_choice(split, cut, count)
    return whole_choice(split) if options.mode == AUTO and split.unsplit_step_s < best.step_s else best


def fastest(possible: Sequence[CutCost], batch_size: int, options: SplitOptions) -> tuple[CutCost, int]:
    """The best of all `possible` cuts at all numbers of micro-batches, by branch and bound over `step_s`."""
    least, most = (min(count, batch_size) for count in (options.min_micro_batches, options.max_micro_batches))
    slack = 1.0 + options.tie_fraction
    best_s = math.inf
    found: list[tuple[float, CutCost, int]] = []
    for bound_s, _, cut in sorted((lower_bound_s(cut, batch_size, 1, 1), i, cut) for i, cut in enumerate(possible)):
        if bound_s > best_s * slack:
            break
        quick = {max(least, 2**power) for power in range(most.bit_length())}
        best_s = min(best_s, *(step_s(cut, batch_size, count) for count in quick))
        for size, first, last in _sizes(batch_size, least, most):
            # The bound rises with the number of micro-batches while they are of the same size.
            if lower_bound_s(cut, batch_size, first, size) > best_s * slack:
                continue
            for count in range(first, last + 1):
                seconds = step_s(cut, batch_size, count)
                best_s = min(best_s, seconds)
                if seconds <= best_s * slack:
                    found.append((seconds, cut, count))
    _, cut, count = min(
        (entry for entry in found if entry[0] <= best_s * slack),
        key=lambda entry: (entry[1].encoding != LOSSLESS, entry[2], entry[0], entry[1].split_point),
    )
    return cut, count


def lower_bound_s(cut: CutCost, batch_size: int, count: int, size: int) -> float:
    """No step of `count` or more micro-batches of `size` or more examples is faster.

    One stage has the whole batch, and the other stages at least one micro-batch before or after it.
    """
    (a0, e0), (a1, e1), (a2, e2), (a3, e3), (a4, e4) = cut.stages
    more, rest = count - 1, batch_size - size
    once_s = a0 + a1 + a2 + a3 + a4 + size * (e0 + e1 + e2 + e3 + e4) + cut.latency_s
    slowest_s = max(
        more * a0 + rest * e0,
        more * a1 + rest * e1,
        more * a2 + rest * e2,
        more * a3 + rest * e3,
        more * a4 + rest * e4,
    )
    return cut.update_s + max(once_s + slowest_s, count * (a0 + a4) + batch_size * (e0 + e4))


def split_choice(split: SplitTask, cut: CutCost, count: int) -> Choice:
    """What `cut` with `count` micro-batches means for `split`."""
    busy = busy_s(cut, split.batch_size, count)
    return Choice(
        task=split.task,
        split_point=cut.split_point,
        micro_batches=count,
        encoding=cut.encoding,
        step_s=step_s(cut, split.batch_size, count),
        device_step_s=busy.device,
        server_step_s=busy.server,
        uplink_step_s=busy.uplink,
        downlink_step_s=busy.downlink,
        unsplit_step_s=split.unsplit_step_s,
        cut=cut,
    )


def whole_choice(split: SplitTask) -> Choice:
    """Training without a cut."""
    return Choice(
        task=split.task,
        split_point=None,
        micro_batches=1,
        encoding=LOSSLESS,
        step_s=split.unsplit_step_s,
        device_step_s=split.unsplit_step_s,
        server_step_s=0.0,
        uplink_step_s=0.0,
        downlink_step_s=0.0,
        unsplit_step_s=split.unsplit_step_s,
    )


def _sizes(batch_size: int, least: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Size of the smallest micro-batch, and the first and last number of micro-batches at which it is that."""
    count = least
    while count <= most:
        size = batch_size // count
        last = min(most, batch_size // size)
        yield size, count, last
        count = last + 1


def whole_or_refused(split: SplitTask, options: SplitOptions) -> Choice:
    """For a task that no cut is allowed for: train it whole.

    Raises:
        ValueError: mode "on" does not want that.
    """
    if options.mode == ON:
        raise ValueError(
            f"{split.task} cannot be cut: of its {len(split.blocks)} blocks at least {options.min_depth} (min_depth) "
            "must stay on the device, and at least one must be on the server"
        )
    return whole_choice(split)
