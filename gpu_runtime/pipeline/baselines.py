"""What others choose, for comparison: split training without a pipeline, and PiPar's rule. Standard library only."""

from __future__ import annotations

import math
from dataclasses import replace

from gpu_runtime.pipeline.cut_costs import LOSSLESS, ON, Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.makespan import CutCost, step_s
from gpu_runtime.pipeline.planner import Choice, split_choice, whole_or_refused


def splitfed_choice(split: SplitTask, link: Link, options: SplitOptions | None = None) -> Choice:
    """Split training without a pipeline: the fastest cut of one micro-batch (SplitFed), never whole, lossless.

    Raises:
        ValueError: no cut is allowed.
    """
    options = replace(options or SplitOptions(), encodings=(LOSSLESS,), mode=ON)
    possible = cuts(split, link, options)
    if not possible:
        return whole_or_refused(split, options)
    best = min(possible, key=lambda cut: step_s(cut, split.batch_size, 1))
    return split_choice(split, best, 1)


def pipar_count(cut: CutCost, batch_size: int) -> int:
    """PiPar's number of micro-batches (arXiv 2302.12803): N = ceil((u + sf + sb + d) / min(cf, cb)) + 1.

    Seconds are those of the full batch; what a message occupies whatever its size is not known to it. At most half
    the batch, and 100.
    """
    between_s = batch_size * (cut.uplink.example_s + cut.downlink.example_s) + cut.server.at(batch_size)
    shorter_s = min(cut.device_forward.at(batch_size), cut.device_backward.at(batch_size))
    most = max(1, min(batch_size // 2, 100))
    return most if between_s >= most * shorter_s else min(most, math.ceil(between_s / shorter_s) + 1)


def pipar_choice(split: SplitTask, link: Link, options: SplitOptions | None = None) -> Choice:
    """PiPar's choice: its number of micro-batches at each cut, and of these the cut of the fastest step; lossless.

    Steps are estimated by the exact makespan, which is kinder than its own estimate.

    Raises:
        ValueError: no cut is allowed.
    """
    options = replace(options or SplitOptions(), encodings=(LOSSLESS,), mode=ON)
    size = split.batch_size
    possible = cuts(split, link, options)
    if not possible:
        return whole_or_refused(split, options)
    best = min(possible, key=lambda cut: step_s(cut, size, pipar_count(cut, size)))
    return split_choice(split, best, pipar_count(best, size))
