"""Cuts by hand, and choices against the best of all that there are."""

import random
from dataclasses import replace
from typing import Any

import pytest
from pipeline_cases import block, random_cut, random_link, random_split

from gpu_runtime.contracts import ENCODINGS, EncodingCost
from gpu_runtime.pipeline.baselines import pipar_choice, pipar_count, splitfed_choice
from gpu_runtime.pipeline.cut_costs import Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.makespan import Affine, CutCost, micro_batch_sizes, schedule, step_s
from gpu_runtime.pipeline.planner import choose, lower_bound_s

ALL = SplitOptions(encodings=ENCODINGS, max_micro_batches=32)

# Forward and backward of a block take 1 s an example on the device and 0.1 s on the server; 100, 10 and 1 numbers.
THREE = SplitTask(
    task="three",
    batch_size=4,
    blocks=(block(1.0, 400, 0.5), block(1.0, 40, 0.5), block(1.0, 4, 0.5)),
    server_blocks=(block(0.1, 400), block(0.1, 40), block(0.1, 4)),
    unsplit_step_s=27.0,
    target_bytes=8,
    update_s=1.0,
    server_update_s=0.5,
)
SLOW = Link(uplink_bytes_per_s=100.0, downlink_bytes_per_s=200.0, latency_s=0.25, message_s=0.125)


# -------------------------------------------------------------------------------------------------------------- costs


def test_a_cut_by_hand() -> None:
    first, second = cuts(THREE, SLOW)
    assert first == CutCost(
        split_point=1,
        device_forward=Affine(call_s=0.5, example_s=1.0),
        uplink=Affine(call_s=0.125, example_s=4.08),
        server=Affine(example_s=0.4),
        downlink=Affine(call_s=0.125, example_s=2.0),
        device_backward=Affine(call_s=0.5, example_s=1.0),
        latency_up_s=0.25,
        latency_down_s=0.25,
        update_s=1.0,
        server_update_s=0.5,
    )
    assert second.device_forward == Affine(call_s=1.0, example_s=2.0)
    assert second.uplink == Affine(call_s=0.125, example_s=0.48)
    assert second.server == Affine(example_s=0.2)


def test_encodings_by_hand() -> None:
    split = replace(
        THREE,
        channels=(5, 5, 5),
        device_encodings=(EncodingCost(encoding="int8", encode_s=0.01, decode_s=0.02),),
        server_encodings=(EncodingCost(encoding="int8", encode_s=0.001, decode_s=0.002),),
    )
    found = {cut.encoding: cut for cut in cuts(split, SLOW, ALL) if cut.split_point == 1}
    assert [found[name].uplink.example_s for name in ENCODINGS] == [4.08, 2.08, 1.08]
    assert found["fp16"].uplink.call_s == 0.125
    # Five scales of 4 bytes at 100 and 200 bytes a second.
    assert (found["int8"].uplink.call_s, found["int8"].downlink.call_s) == (0.325, 0.225)
    assert found["int8"].device_forward.example_s == pytest.approx(1.0 + 100 * 0.01)
    assert found["int8"].device_backward.example_s == pytest.approx(1.0 + 100 * 0.02)
    assert found["int8"].server.example_s == pytest.approx(0.4 + 100 * 0.003)


def test_the_optimisers_step_is_divided_by_parameters() -> None:
    first, second = cuts(replace(THREE, parameter_bytes=(10, 30, 60)), SLOW)
    assert (first.update_s, second.update_s) == pytest.approx((0.1, 0.4))
    assert (first.server_update_s, second.server_update_s) == pytest.approx((0.45, 0.3))


def test_unlimited_links_take_the_fixed_seconds_only() -> None:
    cut = cuts(THREE, Link(message_s=0.5))[0]
    assert cut.uplink == cut.downlink == Affine(call_s=0.5)


def test_the_privacy_floor() -> None:
    assert [cut.split_point for cut in cuts(THREE, SLOW, SplitOptions(min_depth=2))] == [2]
    assert cuts(THREE, SLOW, SplitOptions(min_depth=3)) == []


# ------------------------------------------------------------------------------------------------------------ choices


def test_the_best_is_found_among_thousands() -> None:
    """Brute force: every cut and number of micro-batches, each by the exact recurrence; then the rule for ties."""
    draw = random.Random(2)
    for _ in range(120):
        split, link = random_split(draw), random_link(draw)
        split = replace(split, server_update_s=0.0)  # else `step_s` may be above the recurrence
        options = replace(ALL, mode="on", min_depth=draw.randint(1, len(split.blocks) - 1))
        every = [
            (schedule(cut, micro_batch_sizes(split.batch_size, count)).step_s, cut, count)
            for cut in cuts(split, link, options)
            for count in range(1, min(options.max_micro_batches, split.batch_size) + 1)
        ]
        choice = choose(split, link, options)
        best_s = min(seconds for seconds, _, _ in every)
        assert choice.step_s <= best_s * (1.005 + 1e-9)
        equal = [entry for entry in every if entry[0] <= best_s * (1.005 - 1e-9)]
        rank = min((cut.encoding != "fp32", count) for _, cut, count in equal)
        assert (choice.encoding != "fp32", choice.micro_batches) <= rank


def test_bounds_are_below_every_step() -> None:
    draw = random.Random(8)
    for _ in range(1000):
        cut, batch_size = random_cut(draw), draw.randint(1, 30)
        count = draw.randint(1, batch_size)
        fewer, size = draw.randint(1, count), draw.randint(1, batch_size // count)
        bound_s = lower_bound_s(cut, batch_size, fewer, size)
        assert bound_s <= step_s(cut, batch_size, count) * (1 + 1e-9)


def test_ties_prefer_lossless_and_few() -> None:
    # The link is no limit: encodings are equally fast, and messages cost nothing.
    split = replace(THREE, update_s=0.0, server_update_s=0.0, unsplit_step_s=1e9)
    choice = choose(split, Link(), ALL)
    assert choice.encoding == "fp32"
    # Only the server has anything to do: one micro-batch is as fast as four.
    split = replace(
        split,
        blocks=(block(0.0, 4), block(0.0, 4)),
        server_blocks=(block(0.0, 4), block(10.0, 4)),
    )
    assert choose(split, Link(), ALL).micro_batches == 1


def test_a_lossy_encoding_is_chosen_on_a_slow_link() -> None:
    split, slow = replace(THREE, target_bytes=0), replace(SLOW, uplink_bytes_per_s=1.0)
    assert choose(split, slow, replace(ALL, mode="on")).encoding == "int8"
    assert choose(split, slow, SplitOptions(mode="on")).encoding == "fp32"


def test_a_choice_adds_up() -> None:
    choice = choose(THREE, SLOW, SplitOptions(mode="on", min_depth=2, max_micro_batches=2))
    assert (choice.split_point, choice.micro_batches, choice.task) == (2, 2, "three")
    assert choice.device_step_s == 2 * (1.0 + 1.0) + 4 * (2.0 + 2.0) + 1.0
    assert choice.server_step_s == pytest.approx(4 * 0.2 + 0.5)
    assert choice.uplink_step_s == pytest.approx(2 * 0.125 + 4 * 0.48)
    assert choice.downlink_step_s == pytest.approx(2 * 0.125 + 4 * 0.2)
    assert choice.cut is not None
    assert choice.step_s == step_s(choice.cut, 4, 2)


def test_whole_where_that_is_faster() -> None:
    slow = replace(SLOW, uplink_bytes_per_s=0.1)
    whole = choose(THREE, slow)
    assert (whole.split_point, whole.step_s, whole.device_step_s, whole.server_step_s) == (None, 27.0, 27.0, 0.0)
    assert choose(THREE, slow, SplitOptions(mode="on")).split_point is not None
    assert choose(THREE, SLOW, SplitOptions(min_depth=3)).split_point is None
    with pytest.raises(ValueError, match="three cannot be cut"):
        choose(THREE, SLOW, SplitOptions(min_depth=3, mode="on"))


# ---------------------------------------------------------------------------------------------------------- baselines


def test_pipars_number_by_hand() -> None:
    # Full batch of 8: u 4 s, server 2 s, d 2 s, cf 4 s, cb 8 s: ceil(8 / 4) + 1 = 3. The message's second is unknown.
    cut = CutCost(
        split_point=1,
        device_forward=Affine(example_s=0.5),
        uplink=Affine(call_s=1.0, example_s=0.5),
        server=Affine(example_s=0.25),
        downlink=Affine(call_s=1.0, example_s=0.25),
        device_backward=Affine(example_s=1.0),
    )
    assert pipar_count(cut, 8) == 3
    # At most half the batch, at most 100, at least one.
    assert pipar_count(replace(cut, server=Affine(example_s=100.0)), 8) == 4
    assert pipar_count(replace(cut, device_forward=Affine()), 8) == 4
    assert pipar_count(replace(cut, device_forward=Affine()), 1000) == 100
    assert pipar_count(cut, 1) == 1


def test_nobody_chooses_better() -> None:
    draw = random.Random(3)
    for _ in range(60):
        split, link = random_split(draw), random_link(draw)
        others = [pipar_choice(split, link, ALL), splitfed_choice(split, link, ALL)]
        assert all(other.split_point is not None and other.encoding == "fp32" for other in others)
        assert others[1].micro_batches == 1
        options = replace(ALL, encodings=("fp32",), max_micro_batches=100)
        assert choose(split, link, options).step_s <= 1.005 * min(other.step_s for other in others)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"batch_size": 0}, "three: batch_size"),
        ({"unsplit_step_s": -1.0}, "three: unsplit_step_s"),
        ({"update_s": float("nan")}, "three: update_s"),
        ({"server_blocks": ()}, "three: server_blocks has 0 entries"),
        ({"parameter_bytes": (1,)}, "three: parameter_bytes"),
        ({"blocks": (block(1.0, 4), block(float("nan"), 4), block(1.0, 4))}, r"three: blocks\[1\].forward_s"),
        ({"device_encodings": (EncodingCost(encoding="int8", encode_s=-1.0),)}, "device_encodings int8 encode_s"),
    ],
)
def test_nonsense_tasks_are_named(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(THREE, **changed)


@pytest.mark.parametrize("name", ["uplink_bytes_per_s", "downlink_bytes_per_s", "latency_s", "message_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_nonsense_links_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Link(**{name: value})


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"encodings": ("fp8",)}, "encodings"),
        ({"encodings": ()}, "encodings"),
        ({"min_depth": 0}, "min_depth"),
        ({"max_micro_batches": 0}, "max_micro_batches"),
        ({"mode": "off"}, "mode"),
        ({"tie_fraction": -0.1}, "tie_fraction"),
    ],
)
def test_nonsense_options_are_named(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SplitOptions(**changed)
