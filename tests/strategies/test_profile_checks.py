"""A client with a bad profile is left out by name; the others go on, whoever drives the strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from gpu_runtime.contracts import BlockCost, ContractError, EncodingCost, Profile, to_json
from strategies.base import StrategyError, StrategyOptions
from strategies.inventory import query_profiles
from strategies.load_assignment import LinearProgramAssigner
from strategies.profile_checks import check_profile
from strategies.registry import build
from tests.in_process_grid import InProcessGrid
from tests.strategies.fakes import TASKS, FakeClient, fake_fleet, initial_arrays, profile_of

GOOD = profile_of("ada", {"blue": (100, 0.01)})
BLOCK = BlockCost(forward_s=0.1, backward_s=0.2, boundary_bytes=1000)


def with_task(**changes: Any) -> Profile:
    return replace(GOOD, tasks=(replace(GOOD.tasks[0], **changes),))


def with_cost(**changes: Any) -> Profile:
    cost = GOOD.tasks[0].cost
    assert cost is not None
    return with_task(cost=replace(cost, **changes))


BAD: list[tuple[Profile, str]] = [
    (replace(GOOD, capacity=0.0), "capacity must be from 1e-06 to 1e+06, not 0"),
    (replace(GOOD, capacity=-1.0), "capacity must be"),
    (replace(GOOD, capacity=1e300), "capacity must be"),
    (replace(GOOD, fixed_s=-1.0), "fixed_s must be from 0 to 1e+06, not -1"),
    (replace(GOOD, latency_s=-0.1), "latency_s must be"),
    (replace(GOOD, uplink_bytes_per_s=0.0), "uplink_bytes_per_s must be from 1 to 1e+15, not 0"),
    (replace(GOOD, downlink_bytes_per_s=-5.0), "downlink_bytes_per_s must be"),
    (replace(GOOD, memory_bytes=-1), "memory_bytes must be"),
    (replace(GOOD, clock="sundial"), "clock must be virtual or measured, not 'sundial'"),
    (replace(GOOD, client=""), "client must be 1 to 200 printable characters, not ''"),
    (replace(GOOD, client="a\nb"), r"client must be 1 to 200 printable characters, not 'a\nb'"),
    (replace(GOOD, client="\x1b[31mred"), "client must be 1 to 200 printable characters"),
    (replace(GOOD, client="a" * 1000), "client must be 1 to 200 printable characters"),
    (replace(GOOD, tasks=GOOD.tasks * 2), "tasks name 'blue' 2 times"),
    (with_task(task="blue\n"), "a task's name must be 1 to 200 printable characters"),
    (with_task(num_examples=-1), "task 'blue': num_examples must be from 0 to 1e+12, not -1"),
    (with_task(num_examples=2**62), "task 'blue': num_examples must be"),
    (with_task(batch_size=0), "task 'blue': batch_size must be"),
    (with_cost(demand=0.0), "task 'blue': demand must be from 1e-06 to 1, not 0"),
    (with_cost(demand=1.5), "task 'blue': demand must be"),
    (with_cost(solo_cost_s=0.0), "task 'blue': solo_cost_s must be"),
    (with_cost(solo_cost_s=-0.01), "task 'blue': solo_cost_s must be"),
    (with_cost(solo_cost_s=1e300), "task 'blue': solo_cost_s must be"),
    (with_cost(peak_memory_bytes=-1), "task 'blue': peak_memory_bytes must be"),
    (with_cost(update_s=-1.0), "task 'blue': update_s must be"),
    (with_cost(target_bytes=-1), "task 'blue': target_bytes must be"),
    (with_cost(blocks=(BLOCK, replace(BLOCK, forward_s=-1.0))), "task 'blue': block 1: forward_s must be"),
    (with_cost(blocks=(replace(BLOCK, backward_call_s=1e300),)), "task 'blue': block 0: backward_call_s must be"),
    (with_cost(blocks=(replace(BLOCK, boundary_bytes=-1),)), "task 'blue': block 0: boundary_bytes must be"),
    (with_cost(blocks=(BLOCK,) * 10_000), "task 'blue': blocks must be at most 4096, not 10000"),
    (replace(GOOD, message_s=-1.0), "message_s must be"),
    (replace(GOOD, encodings=(EncodingCost(encoding="int8", encode_s=-1.0),)), "encoding 'int8': encode_s must be"),
]


@pytest.mark.parametrize(("profile", "text"), BAD, ids=[text for _, text in BAD])
def test_the_field_is_named(profile: Profile, text: str) -> None:
    check_profile(GOOD)
    with pytest.raises(ContractError) as caught:
        check_profile(profile)
    assert str(caught.value).startswith(text)
    assert str(caught.value).isprintable()


def test_unknown_costs_and_links_are_fine() -> None:
    check_profile(profile_of("ada", {"blue": (0, 0)}))


def test_loads_are_assigned_whatever_passes_the_checks() -> None:
    """The extremes of all ranges together: nobody's honest-looking profile ends a run."""
    extremes: list[tuple[dict[str, Any], tuple[int, float]]] = [
        ({"capacity": 1e-6, "fixed_s": 1e6}, (1, 1e6)),
        ({"capacity": 1e6}, (10**12, 1e-12)),
        ({"uplink_bytes_per_s": 1.0, "downlink_bytes_per_s": 1.0, "latency_s": 1e6}, (1000, 1e-12)),
        ({}, (100, 0.01)),
    ]
    for mode in ("competitive", "sequential", "exclusive"):
        for name in ("arch-sync", "fedavg"):
            for index in range(3):
                bad, good = extremes[index], extremes[3]
                profiles = [
                    profile_of("ada", {"blue": bad[1], "red": (10, 0.1)}, **bad[0]),
                    profile_of("bob", {"blue": good[1], "red": good[1]}),
                ]
                for profile in profiles:
                    check_profile(profile)
                strategy = build(StrategyOptions(name=name, sharing_mode=mode), ("blue", "red"))
                grid = InProcessGrid([FakeClient(profile) for profile in profiles])
                strategy.prepare(dict(zip(grid.node_ids, profiles, strict=True)))
                arrays = initial_arrays(("blue", "red"))
                assert len(list(strategy.configure_train(1, arrays, ConfigRecord(), grid))) == 2
    assert isinstance(build(StrategyOptions(), ("blue",)).assigner, LinearProgramAssigner)


def answering(text: str) -> Any:
    def answer(message: Message, context: Context) -> Message:
        return Message(RecordDict({"profile": ConfigRecord({"json": text})}), reply_to=message)

    return answer


def answering_nothing(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def test_bad_profiles_are_left_out_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    bad = replace(profile_of("eve", {"blue": (9, 1.0)}), capacity=-1.0)
    nan = to_json(profile_of("fay", {"blue": (9, 1.0)})).replace('"fixed_s":0.0', '"fixed_s":NaN')
    grid = InProcessGrid([*fake_fleet(), FakeClient(bad), answering(nan), answering_nothing, answering("[]")])
    found = query_profiles(grid)
    assert sorted(profile.client for profile in found.values()) == ["ada", "bob", "cyd", "dan"]
    assert "client 'eve' has a bad profile: capacity must be from 1e-06 to 1e+06, not -1" in caplog.text
    assert "client 'fay' has a bad profile: Profile.fixed_s must be finite, not nan" in caplog.text
    assert "no profile: Profile must be a JSON object, not list" in caplog.text
    assert "no profile: reply without ConfigRecord 'profile'" in caplog.text


def test_namesakes_are_all_left_out_whatever_their_node_ids(caplog: pytest.LogCaptureFixture) -> None:
    twin = FakeClient(profile_of("ada", {"blue": (7, 1.0)}))
    for seed in range(3):
        found = query_profiles(InProcessGrid([*fake_fleet(), twin], seed=seed, shuffle=True))
        assert sorted(profile.client for profile in found.values()) == ["bob", "cyd", "dan"]
    assert "client 'ada': 2 nodes call themselves so and none of them takes part" in caplog.text


def test_the_cause_names_who_was_left_out() -> None:
    bad = FakeClient(replace(GOOD, fixed_s=-2.0))
    with pytest.raises(StrategyError, match="client 'ada' has a bad profile: fixed_s must be from 0 to 1e"):
        query_profiles(InProcessGrid([bad]))


def test_the_cause_holds_the_first_reasons_of_clients() -> None:
    strategy = build(StrategyOptions(), TASKS)
    profiles = [
        profile_of(name, {"blue": (9, 1.0)}, errors=(f"green: OSError: {name}'s disk\n\x1b[1mfull", "other"))
        for name in ("ada", "bob", "cyd", "dan")
    ]
    with pytest.raises(StrategyError) as caught:
        strategy.prepare(dict(enumerate(profiles)))
    assert str(caught.value) == (
        "task 'green': no client holds an example of it; client 'ada' says: green: OSError: ada's disk full; "
        "client 'bob' says: green: OSError: bob's disk full; client 'cyd' says: green: OSError: cyd's disk full"
    )


def test_a_client_without_any_task_says_why() -> None:
    profile = profile_of("ada", {}, errors=("sharing backend 'streams' cannot be used: no CUDA",))
    with pytest.raises(StrategyError, match=r"any task .*; client 'ada' says: sharing backend 'streams' cannot"):
        build(StrategyOptions(), TASKS).prepare({1: profile})


def test_profiles_of_the_fakes_are_good() -> None:
    for client in fake_fleet():
        check_profile(client.profile)
        assert json.loads(to_json(client.profile))["client"] == client.profile.client
