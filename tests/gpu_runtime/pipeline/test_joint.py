"""Joint choices: bounds that hold whatever the numbers, and small cases by hand."""

import itertools
import random
from dataclasses import replace

import pytest
from pipeline_cases import block, random_link, random_split

from gpu_runtime.contracts import ENCODINGS
from gpu_runtime.pipeline.contention import estimate_s
from gpu_runtime.pipeline.cut_costs import Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.joint import JointChoice, Request, choose_jointly, round_works
from gpu_runtime.pipeline.makespan import micro_batch_sizes, step_s
from gpu_runtime.pipeline.planner import choose, split_choice
from gpu_runtime.pipeline.simulator import SimulatedSession, simulate

ALL = SplitOptions(encodings=ENCODINGS, max_micro_batches=16)

# Three equal blocks: 1 s an example forward and backward on the device, 0.25 s on the server; a link without limits.
EVEN = SplitTask(
    task="even",
    batch_size=1,
    blocks=(block(1.0, 4),) * 3,
    server_blocks=(block(0.25, 4),) * 3,
    unsplit_step_s=6.0,
)


def requests_of(num_clients: int, split: SplitTask = EVEN, **changed: float) -> list[Request]:
    return [
        Request(client=f"c{index}", split=split, link=Link(), num_steps=1, **changed)  # type: ignore[arg-type]
        for index in range(num_clients)
    ]


def server_s(joint: JointChoice, requests: list[Request]) -> float:
    return sum(each.num_steps * choice.server_step_s for each, choice in zip(requests, joint.choices, strict=True))


def test_one_client_has_its_fastest_way() -> None:
    joint = choose_jointly(requests_of(1))
    # One block on the device (2 s) and two on the server (1 s).
    assert (joint.choices[0].split_point, joint.round_s, joint.binding) == (1, 3.0, "c0/device")


def test_a_full_server_takes_less_work_of_each() -> None:
    # Split points 1, 2 and none take 3, 4.5 and 6 s, with 1, 0.5 and 0 s on the server.
    assert choose_jointly(requests_of(3)).round_s == 3.0
    joint = choose_jointly(requests_of(8))
    assert sorted(choice.split_point or 3 for choice in joint.choices) == [2] * 8
    assert (joint.round_s, joint.binding) == (4.5, "server")
    # Ten of them would be 5 s for the server.
    assert choose_jointly(requests_of(10)).round_s == 5.0
    assert choose_jointly(requests_of(10), server_capacity=10).round_s == 3.0
    assert all(choice.split_point is None for choice in choose_jointly(requests_of(13)).choices)
    assert choose_jointly(requests_of(13)).round_s == 6.0
    assert choose_jointly(requests_of(13), options=SplitOptions(mode="on")).round_s == 6.5


def test_fixed_seconds_and_steps_count() -> None:
    joint = choose_jointly([replace(requests_of(1)[0], num_steps=10, fixed_s=7.0)])
    assert joint.round_s == 37.0


def test_tasks_of_a_client_share_its_device() -> None:
    one = requests_of(1)[0]
    joint = choose_jointly([one, replace(one, split=replace(EVEN, task="other"))])
    # Alone 3 s each; together the device has 4 s of work.
    assert joint.round_s == pytest.approx(4.0, rel=1e-3)
    assert joint.binding == "c0/device"
    assert [choice.task for choice in joint.choices] == ["even", "other"]


def test_what_cannot_be_cut_trains_whole() -> None:
    single = replace(EVEN, blocks=EVEN.blocks[:1], server_blocks=EVEN.server_blocks[:1])
    joint = choose_jointly(requests_of(1, single))
    assert (joint.choices[0].split_point, joint.round_s, joint.binding) == (None, 6.0, "c0/device")
    with pytest.raises(ValueError, match="even cannot be cut"):
        choose_jointly(requests_of(1, single), options=SplitOptions(mode="on"))


def random_requests(draw: random.Random, num_clients: int) -> list[Request]:
    return [
        Request(
            client=f"c{index}",
            split=random_split(draw),
            link=random_link(draw),
            num_steps=draw.randint(1, 5),
            fixed_s=draw.choice([0.0, 0.5]),
        )
        for index in range(num_clients)
    ]


def test_bounds_hold() -> None:
    draw = random.Random(4)
    for _ in range(40):
        requests = random_requests(draw, draw.randint(1, 8))
        capacity = 10 ** draw.uniform(-2, 1)
        joint = choose_jointly(requests, server_capacity=capacity, options=ALL)
        rounds = [
            each.fixed_s + each.num_steps * choice.step_s for each, choice in zip(requests, joint.choices, strict=True)
        ]
        assert max(rounds) <= joint.round_s * (1 + 1e-9)
        assert server_s(joint, requests) <= capacity * joint.round_s * (1 + 1e-9)
        alone = [each.fixed_s + each.num_steps * choose(each.split, each.link, ALL).step_s for each in requests]
        assert joint.round_s >= max(alone) / 1.005
        # Nobody does worse than everybody without the service.
        assert joint.round_s <= max(each.fixed_s + each.num_steps * each.split.unsplit_step_s for each in requests) * (
            1 + 1e-3
        )
        more = choose_jointly(requests, server_capacity=2 * capacity, options=ALL)
        assert more.round_s <= joint.round_s * 1.01


def test_close_to_the_best_of_all_combinations() -> None:
    draw = random.Random(5)
    for _ in range(15):
        requests = random_requests(draw, 2)
        options = replace(ALL, encodings=("fp32",), max_micro_batches=3, mode="on")
        capacity = 10 ** draw.uniform(-2, 0)
        every = [
            [
                (each.fixed_s + each.num_steps * step_s(cut, each.split.batch_size, count), each, cut, count)
                for cut in cuts(each.split, each.link, options)
                for count in range(1, min(3, each.split.batch_size) + 1)
            ]
            for each in requests
        ]
        best_s = min(
            max(
                *(round_s for round_s, _, _, _ in ways),
                sum(each.num_steps * split_choice(each.split, cut, count).server_step_s for _, each, cut, count in ways)
                / capacity,
            )
            for ways in itertools.product(*every)
        )
        joint = choose_jointly(requests, server_capacity=capacity, options=options)
        assert best_s * (1 - 1e-9) <= joint.round_s <= best_s * 1.01


def test_tasks_that_share_a_client_fit_into_the_round() -> None:
    draw = random.Random(6)
    for _ in range(20):
        requests = [replace(each, client="c", num_steps=2, fixed_s=0.0) for each in random_requests(draw, 3)]
        joint = choose_jointly(requests, server_capacity=0.5, options=ALL)
        for resource in ("device_step_s", "uplink_step_s", "downlink_step_s"):
            assert sum(2 * getattr(choice, resource) for choice in joint.choices) <= joint.round_s * (1 + 1e-9)


def test_a_simulated_round_takes_somewhat_longer_than_said_where_all_queue_for_the_server() -> None:
    draw = random.Random(9)
    for _ in range(15):
        requests = [replace(each, num_steps=6, fixed_s=0.0) for each in random_requests(draw, 4)]
        joint = choose_jointly(requests, options=replace(ALL, mode="on"))
        sessions = [
            SimulatedSession(
                client=each.client,
                cut=choice.cut,
                steps=[micro_batch_sizes(each.split.batch_size, choice.micro_batches)] * 6,
            )
            for each, choice in zip(requests, joint.choices, strict=True)
            if choice.cut is not None
        ]
        estimated_s = estimate_s(round_works(requests, joint.choices))
        # First come, first served: who has short rounds is served first, and the others catch up late.
        assert 0.85 * estimated_s < simulate(sessions).end_s < 1.5 * estimated_s
        assert estimated_s >= joint.round_s * (1 - 1e-9)


def test_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="num_steps"):
        replace(requests_of(1)[0], num_steps=0)
    with pytest.raises(ValueError, match="c0/even: fixed_s"):
        requests_of(1, fixed_s=float("nan"))
    with pytest.raises(ValueError, match="requests"):
        choose_jointly([])
    for capacity in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="server_capacity"):
            choose_jointly(requests_of(1), server_capacity=capacity)
