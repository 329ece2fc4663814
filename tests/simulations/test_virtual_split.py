"""What a split task costs a simulated client, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_runtime.contracts import BlockCost, SplitReport, TaskCost, TaskPlan
from gpu_runtime.pipeline.cut_costs import Link
from simulations.virtual_split import pipeline

BLOCK = BlockCost(forward_s=1.0, backward_s=1.0, boundary_bytes=4)
DEVICE = TaskCost(demand=0.5, solo_cost_s=4.0, speed_curve=((1.0, 1.0),), blocks=(BLOCK, BLOCK))
SERVER = DEVICE.scaled(0.5)
LINK = Link(uplink_bytes_per_s=4.0, downlink_bytes_per_s=4.0, latency_s=1.0)
PLAN = TaskPlan(task="t", num_examples=8, split_point=1, micro_batches=4)


def test_a_step_of_equal_stages() -> None:
    """Forward, upload, server, download and backward of an example take 1 s each, and so do both latencies.

    L = 1 + 1 + 1 + 1 + 2 = 6 and T(4) = max{4 (1 + 1), 6 + 4, 6 + 3 + 1} = 10.
    """
    pipe = pipeline(PLAN, 4, DEVICE, SERVER, LINK)
    assert pipe is not None
    assert pipe.step_s == pytest.approx(10.0)
    assert (pipe.device_s, pipe.server_s) == (8.0, 4.0)


def test_lanes_see_the_makespan_and_the_devices_part_of_it() -> None:
    pipe = pipeline(PLAN, 4, DEVICE, SERVER, LINK)
    assert pipe is not None
    cost = pipe.cost(DEVICE)
    assert cost.solo_cost_s == pytest.approx(10.0 / 4)
    assert cost.demand == pytest.approx(0.5 * 8 / 10)


def test_reports_are_in_virtual_seconds_and_real_bytes() -> None:
    pipe = pipeline(PLAN, 4, DEVICE, SERVER, LINK)
    assert pipe is not None
    real = SplitReport(split_point=1, micro_batches=4, encoding="fp32", bytes_up=7, device_s=0.001, wait_s=3.0)
    report = pipe.report(real, 2, LINK)
    assert (report.device_s, report.server_s, report.wait_s) == (16.0, 8.0, 4.0)
    assert (report.bytes_up, report.uplink_bytes_per_s) == (7, 4.0)


@pytest.mark.parametrize("plan", [replace(PLAN, split_point=None), replace(PLAN, split_point=2)])
def test_what_is_not_split_has_no_pipeline(plan: TaskPlan) -> None:
    assert pipeline(plan, 4, DEVICE, SERVER, LINK) is None
    assert pipeline(PLAN, 4, replace(DEVICE, blocks=()), SERVER, LINK) is None
