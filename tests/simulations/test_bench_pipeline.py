"""The benchmark of split training: choices, virtual time, results, and one tiny setting in real time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpu_runtime.bench.rounds import Gate
from gpu_runtime.contracts import BlockCost, Emulation
from gpu_runtime.pipeline.cut_costs import Link, SplitTask
from simulations.bench import __main__ as bench
from simulations.bench import pipeline
from simulations.bench.pipelines import accuracy
from simulations.bench.pipelines.models import MODELS
from simulations.bench.pipelines.results import headline_of, row_of, targets_of, validation_of
from simulations.bench.pipelines.rounds import Amount, Sample
from simulations.bench.pipelines.service import Iteration
from simulations.bench.pipelines.table import markdown, table
from simulations.bench.pipelines.variants import FL, GRID, OURS, OURS_ANY, PIPAR, SPLITFED, WHOLE, compared, key_of
from simulations.bench.pipelines.virtual import seconds_per_step, server_idle_s, virtual_clients, virtual_iteration

# A byte a second and 8 examples of 4 bytes: one example takes 1 s to the server and 1 s back.
EMULATION = Emulation(uplink_bytes_per_s=4.0, downlink_bytes_per_s=4.0, slowdown=2.0)
LINK = Link(uplink_bytes_per_s=4.0, downlink_bytes_per_s=4.0)


def made_up() -> SplitTask:
    """Two blocks; on the device the first takes 1 s and 1 s an example, the second ten times that."""
    first = BlockCost(forward_s=1.0, backward_s=1.0, boundary_bytes=4)
    second = BlockCost(forward_s=10.0, backward_s=10.0, boundary_bytes=4)
    server = BlockCost(forward_s=0.5, backward_s=0.5, boundary_bytes=4)
    return SplitTask(
        task="made-up", batch_size=8, blocks=(first, second), server_blocks=(server, server), unsplit_step_s=176.0
    )


def samples_of(seconds: dict[Any, float], rounds: int = 5) -> Any:
    return {
        key: {
            index: Sample(iteration=Iteration(seconds=each, device_s=1, server_s=1, uplink_s=1, downlink_s=1))
            for index in range(rounds)
        }
        for key, each in seconds.items()
    }


def test_the_variants_choose_what_their_rules_say() -> None:
    found = compared(made_up(), LINK)
    assert key_of(found.choices[FL]) == WHOLE
    assert key_of(found.choices[SPLITFED]) == (1, 1, "fp32")
    # (u + s + d) / min(cf, cb) + 1 = (8 + 8 + 8) / 8 + 1, at most half the batch.
    assert key_of(found.choices[PIPAR]) == (1, 4, "fp32")
    # Two at a time: the device is never idle, and with more micro-batches it would not be less so.
    assert found.choices[OURS].micro_batches == 4
    assert found.choices[OURS].step_s == 16.0
    assert [choice.micro_batches for choice in found.grid] == [4, 8, 2, 1]
    assert found.choices[OURS_ANY].step_s <= found.choices[OURS].step_s
    assert len(found.to_measure(2)) == len({key_of(each) for each in (*found.choices.values(), *found.grid[:2])})


def test_virtual_iterations_are_those_of_the_formula() -> None:
    found = compared(made_up(), LINK)
    for name, choice in found.choices.items():
        virtual = virtual_iteration(choice, 8, LINK)
        assert virtual.seconds == pytest.approx(choice.step_s), name
        assert virtual.device_s == pytest.approx(choice.device_step_s)
    alone = virtual_iteration(found.choices[SPLITFED], 8, LINK)
    assert alone.seconds == 40.0
    assert {alone.idle_fraction(name) for name in ("server", "uplink", "downlink")} == {0.8}
    assert (alone.bytes_up, alone.bytes_down) == (32, 32)


def test_virtual_clients_share_the_server() -> None:
    ours = compared(made_up(), LINK).choices[OURS]
    one = virtual_clients([ours], 8, 1.0)
    assert seconds_per_step(one, 0) == pytest.approx(16.0)
    assert server_idle_s(one) == pytest.approx(8.0)
    crowded = virtual_clients([ours] * 4, 8, 1.0)
    # The server has 8 s of work for each of them; the first one's steps are ahead of the others' at the end.
    assert 24.0 < seconds_per_step(crowded, 0) <= 33.0
    assert seconds_per_step(virtual_clients([ours] * 4, 8, 4.0), 0) < 0.8 * seconds_per_step(crowded, 0)


def test_a_row_of_made_up_times() -> None:
    found = compared(made_up(), LINK)
    keys = {name: key_of(choice) for name, choice in found.choices.items()}
    seconds = dict.fromkeys(found.to_measure(2), 20.0)
    seconds |= {keys[FL]: 160.0, keys[SPLITFED]: 40.0, keys[OURS]: 16.8}
    row = row_of("resnet18", "4g", EMULATION, LINK, 8, 400, found, samples_of(seconds))
    assert row["clock"] == "real"
    assert row["variants"][OURS]["measured_over_predicted"]["median"] == pytest.approx(1.05)
    assert row["exchange"]["seconds"] == 200.0
    headline = headline_of([row], [], {"up": 500.0})
    assert headline["speedup_over_fl"]["resnet18/4g"] == pytest.approx(160 / 16.8)
    assert headline["speedup_over_splitfed"]["resnet18/4g"] == pytest.approx(40 / 16.8)
    assert {each["variant"] for each in validation_of([row])} == {SPLITFED, PIPAR, OURS, OURS_ANY, GRID}
    states = {each["what"]: each["state"] for each in targets_of([row], [], {"up": 300.0})}
    assert states["measured over predicted"] == states["ours over grid"] == states["ours over fl"] == "met"
    assert states["number of MB/s, up"] == "open"
    assert states["best ours-any over fl"] == "missed"


def test_too_slow_or_disturbed_is_not_met() -> None:
    found = compared(made_up(), LINK)
    samples = samples_of(dict.fromkeys(found.to_measure(2), 20.0))
    row = row_of("vgg5", "4g", EMULATION, LINK, 8, 400, found, samples)
    states = {each["what"]: each["state"] for each in targets_of([row], [], {})}
    assert states["measured over predicted"] == "missed"
    ours = samples[key_of(found.choices[OURS])]
    for index, sample in list(ours.items())[:3]:
        ours[index] = replace(sample, disturbed=True)
    row = row_of("vgg5", "4g", EMULATION, LINK, 8, 400, found, samples)
    states = {each["what"]: each["state"] for each in targets_of([row], [], {})}
    assert states["measured over predicted"] == "unclear"


def test_what_there_is_no_time_for_is_virtual() -> None:
    row = row_of("vgg5", "wifi", EMULATION, LINK, 8, 400, compared(made_up(), LINK), None)
    assert row["clock"] == "virtual"
    assert validation_of([row]) == []
    assert headline_of([row], [], {})["measured_over_predicted"] == {}
    assert all(each["clock"] == "virtual" for each in targets_of([row], [], {}) if each["setting"] == "vgg5/wifi")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "vgg"], "error: unknown names ['vgg']; there are vgg5"),
        (["--links", "5g"], "error: unknown names ['5g']; there are 3g"),
        (["--slowdown", "0.5"], "error: --slowdown must be at least 1"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["pipeline", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(complaint)


def test_the_sizes_keep_their_limits() -> None:
    assert pipeline.QUICK.total_s <= 180 - 20
    assert pipeline.FULL.total_s <= 45 * 60 - 120
    assert min(pipeline.QUICK.amount.rounds, pipeline.FULL.amount.rounds) >= 5
    assert {setting.split("/")[0] for setting in pipeline.FULL.clients} <= set(MODELS)


def test_a_tiny_setting_in_real_time() -> None:
    size = pipeline.Size(
        total_s=600.0,
        amount=Amount(rounds=1, iterations=1, run_s=0.1),
        num_grid=1,
        costs_s=0.0,
        clients=("vgg5/none",),
        num_clients=2,
        channel_s=0.01,
    )
    result = pipeline.measure(
        ("vgg5",),
        ("none",),
        size=size,
        slowdown=1.0,
        batch_size=4,
        server_cores=1,
        gate=Gate(max_repeats=0, patience_fraction=0.0),
        emulations={"none": Emulation()},
    )
    json.dumps(result, allow_nan=False)
    (row,) = result["rows"]
    assert row["clock"] == "real"
    for name in (SPLITFED, PIPAR, GRID):
        variant = row["variants"][name]
        # 32 x 16 x 16 numbers of 4 bytes or fewer for each of 4 examples, with labels and headers.
        assert variant["split_point"] >= 1
        assert variant["bytes_up"] > 0
        assert variant["bytes_down"] > 0
        assert variant["busy_s"]["server"] > 0
    assert len(result["clients"]) + len(result["not_measured"]) == 1
    assert "vgg5/none (real time" in table(result)
    assert markdown(result).count("\n") == 2


def test_a_federation_with_a_lossy_encoding_learns() -> None:
    assert accuracy.federate("tiny-digits", "int8", seed=0, rounds=2)["accuracy"] > 0.3
