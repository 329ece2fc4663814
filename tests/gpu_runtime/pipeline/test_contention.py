"""Rounds with shared resources: by hand, and against the simulator."""

import random
from dataclasses import replace

import pytest
from pipeline_cases import STAGES, even_cut

from gpu_runtime.pipeline.contention import RoundWork, estimate_s, lower_bound_s
from gpu_runtime.pipeline.makespan import Affine, Busy, CutCost, busy_s, micro_batch_sizes, step_s
from gpu_runtime.pipeline.simulator import SimulatedSession, simulate

THIRD = RoundWork(client="a", alone_s=3.0, busy=Busy(device=2.0, uplink=0.5, server=1.0, downlink=0.25))


def clients(count: int) -> list[RoundWork]:
    return [replace(THIRD, client=f"c{index}") for index in range(count)]


def test_a_round_by_hand() -> None:
    assert lower_bound_s([]) == 0.0
    assert [lower_bound_s(clients(count)) for count in (1, 3, 4)] == [3.0, 3.0, 4.0]
    assert lower_bound_s(clients(8), server_capacity=2.0) == 4.0
    # Two tasks of a client: 4 s for its device.
    assert lower_bound_s([THIRD, THIRD]) == 4.0


def test_estimates_by_hand() -> None:
    # Alone nobody waits.
    assert estimate_s(clients(1)) == 3.0
    # Far from the server's limit, and far beyond it.
    assert 3.0 < estimate_s(clients(2)) < 3.2
    assert 30.0 <= estimate_s(clients(30)) < 30.1
    # At the limit the waiting counts most: (1 + 1)^(1/4) without what the own work had of it.
    assert estimate_s(clients(3)) == pytest.approx(3 * 1.17, rel=0.02)


def test_simulated_rounds_are_near_the_estimate() -> None:
    draw = random.Random(7)
    for _ in range(60):
        num_clients, num_tasks = draw.choice([1, 2, 4]), draw.choice([1, 1, 2])
        batch_size, count = draw.choice([8, 16]), draw.choice([1, 2, 4, 8])

        def cut() -> CutCost:
            stages = {name: Affine(example_s=10 ** draw.uniform(-2, -0.7)) for name in STAGES}
            server = Affine(example_s=stages["server"].example_s / num_clients / num_tasks)  # noqa: B023
            return even_cut(**{**stages, "server": server}, latency_up_s=0.05, latency_down_s=0.05)

        cuts = [cut() for _ in range(num_clients * num_tasks)]
        names = [f"c{index // num_tasks}" for index in range(len(cuts))]
        steps = [micro_batch_sizes(batch_size, count)] * 8
        seconds = simulate(
            [SimulatedSession(client=name, cut=cut, steps=steps) for name, cut in zip(names, cuts, strict=True)]
        ).end_s
        works = [
            RoundWork(client=name, alone_s=step_s(cut, batch_size, count), busy=busy_s(cut, batch_size, count))
            for name, cut in zip(names, cuts, strict=True)
        ]
        assert seconds / 8 >= lower_bound_s(works) * (1 - 1e-9)
        assert 0.8 < seconds / 8 / estimate_s(works) < 1.45


def test_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="alone_s"):
        replace(THIRD, alone_s=-1.0)
    with pytest.raises(ValueError, match="uplink"):
        replace(THIRD, busy=replace(THIRD.busy, uplink=float("nan")))
    with pytest.raises(ValueError, match="server_capacity"):
        lower_bound_s([THIRD], server_capacity=0.0)
