"""Fleets: parsing with all faults at once, and dealing out to any number of nodes and any tasks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.fleet import FleetError, fleet_names, load_fleet, parse_fleet

DRIVING = ("digits", "detection", "segmentation")


def faults_of(text: str) -> str:
    with pytest.raises(FleetError) as caught:
        parse_fleet("mine", text)
    assert all("\n" not in fault for fault in caught.value.faults)
    return "\n".join(caught.value.faults)


def test_garage_has_four_unequal_clients_of_which_two_lack_a_task() -> None:
    clients = load_fleet("garage").deal(4, DRIVING)
    assert [client.name for client in clients] == ["workstation", "desktop", "laptop", "old-laptop"]
    assert [[held.ref for held in client.holdings] for client in clients] == [
        ["digits", "detection", "segmentation"],
        ["digits", "detection", "segmentation"],
        ["digits", "segmentation"],
        ["digits", "detection"],
    ]
    assert len({client.kind.speed for client in clients}) == 4


@pytest.mark.parametrize("name", fleet_names())
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_clients", [1, 2, 4, 7, 30])
def test_shipped_fleets_suit_any_number_of_tasks_and_nodes(name: str, num_tasks: int, num_clients: int) -> None:
    refs = [f"task-{i}" for i in range(num_tasks)]
    clients = load_fleet(name).deal(num_clients, refs)
    assert len({client.name for client in clients}) == num_clients
    for ref in refs:
        parts = [held.partition for client in clients for held in client.holdings if held.ref == ref]
        assert len(parts) >= min(2, num_clients)
        assert sorted(part.index for part in parts) == list(range(len(parts)))
        assert {part.count for part in parts} == {len(parts)}
        assert {part.shares for part in parts} == {parts[0].shares}


def test_parts_carry_the_shares_of_the_holders_in_order() -> None:
    laptop = load_fleet("garage").deal(4, DRIVING)[2]
    segmentation = laptop.holdings[1].partition
    assert (segmentation.index, segmentation.count, segmentation.shares) == (2, 3, (2.0, 3.0, 3.0))


def test_classes_are_dealt_out_in_order_and_again_from_the_start() -> None:
    fleet = parse_fleet("mine", '[[client]]\nname = "big"\n[[client]]\nname = "small"\ncount = 2\n')
    names = [client.name for client in fleet.deal(7, ["digits"])]
    assert names == ["big", "small", "small-2", "big-2", "small-3", "small-4", "big-3"]


def test_generated_names_avoid_given_ones() -> None:
    fleet = parse_fleet("mine", '[[client]]\nname = "a"\ncount = 2\n[[client]]\nname = "a-2"\n')
    assert [client.name for client in fleet.deal(3, ["digits"])] == ["a", "a-3", "a-2"]


@given(st.lists(st.sampled_from(["a", "a-2", "b", "a-2-2"]), min_size=1, max_size=4, unique=True), st.integers(1, 40))
def test_names_are_unique(names: list[str], num_clients: int) -> None:
    text = "".join(f'[[client]]\nname = "{name}"\ncount = 2\n' for name in names)
    dealt = parse_fleet("mine", text).deal(num_clients, ["digits"])
    assert len({client.name for client in dealt}) == num_clients


def test_all_faults_are_reported_at_once_and_by_name() -> None:
    text = """
cost-eror = 0.1
drift = -1.0
[[client]]
name = "fast"
speed = nan
data-share = -1.0
[[client]]
name = "Slow One"
sped = 2.0
count = 0
skip-tasks = [0]
"""
    found = faults_of(text)
    for part in (
        "unknown key 'cost-eror' (did you mean 'cost-error'?)",
        "drift must be",
        "client 'fast': speed must be a finite number",
        "client 'fast': data-share must be",
        "client 2: unknown key 'sped' (did you mean 'speed'?)",
        "client 2: count must be",
        "client 2: skip-tasks must be a list of task names or positions from 1",
        "client 2: name must be lower-case",
    ):
        assert part in found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no clients"),
        ("client = 3", "[[client]] tables"),
        ('[[client]]\nname = "a"\ndata-share = 0', "data-share is 0 for all clients"),
        ('[[client]]\nname = "a"\n[[client]]\nname = "a"', "client 'a' is there twice"),
        ('[[client]]\nname = "a"\ndropout = -0.5', "dropout must be at least 0 and at most 1"),
        ('[[client]]\nname = "a"\nspeed = inf', "speed must be a finite number"),
        ('[[client]]\nname = "a"\nspeed = "fast"', "speed must be a finite number"),
        ("[[client", "is not TOML"),
    ],
)
def test_faulty_fleets(text: str, fault: str) -> None:
    assert fault in faults_of(text)


def test_a_task_that_nobody_holds_is_named() -> None:
    fleet = parse_fleet("mine", '[[client]]\nname = "a"\nskip-tasks = [2]\n')
    with pytest.raises(FleetError, match="nobody holds data of task 'detection'"):
        fleet.deal(3, DRIVING)


def test_a_client_without_tasks_is_named() -> None:
    fleet = parse_fleet("mine", '[[client]]\nname = "a"\n[[client]]\nname = "b"\nskip-tasks = ["digits"]\n')
    with pytest.raises(FleetError, match="client 'b' holds no task"):
        fleet.deal(2, ["digits"])


def test_a_skipped_task_that_the_run_lacks_is_named_with_the_nearest() -> None:
    fleet = parse_fleet("mine", '[[client]]\nname = "a"\nskip-tasks = ["digit"]\n')
    with pytest.raises(FleetError, match=r"skips task 'digit', which this run does not have.*'digits'"):
        fleet.deal(2, DRIVING)


def test_unknown_fleet_names_the_nearest() -> None:
    with pytest.raises(FleetError, match="did you mean 'garage'"):
        load_fleet("garag")
    with pytest.raises(FleetError, match="cannot be read"):
        load_fleet("./nowhere.toml")


def test_units() -> None:
    text = '[[client]]\nname = "a"\nuplink-mbit-per-s = 8.0\nmemory-gib = 2.0\n'
    kind = parse_fleet("mine", text).classes[0]
    assert kind.uplink_bytes_per_s == 1e6
    assert kind.downlink_bytes_per_s is None
    assert kind.memory_bytes == 2 * 2**30
    assert math.isclose(kind.speed, 1.0)


def test_unknown_costs_are_reported_with_the_other_faults() -> None:
    text = faults_of('costs = "nope"\n[[client]]\nname = "a"\nspeed = -1.0')
    assert "no recorded costs 'nope'; there are: cpu-2-cores" in text
    assert "speed" in text


def test_a_client_may_have_a_named_link() -> None:
    fleet = parse_fleet("f", '[[client]]\nname = "phone"\nlink = "4g"\n[[client]]\nname = "desk"\nlatency-ms = 2.0\n')
    phone, desk = fleet.classes
    assert phone.uplink_bytes_per_s == 1.25e6
    assert phone.downlink_bytes_per_s == 3.125e6
    assert phone.latency_s == 0.035
    assert phone.emulation is not None
    assert desk.uplink_bytes_per_s is None
    assert (desk.latency_s, desk.message_s) == (0.002, 0.0005)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('link = "5g"', "client 'phone': link: no link '5g'"),
        ('link = "4g"\nlatency-ms = 1.0', "client 'phone': link '4g' says what latency-ms say; give one or the other"),
    ],
)
def test_faulty_links_are_named(line: str, fault: str) -> None:
    with pytest.raises(FleetError) as caught:
        parse_fleet("f", f'[[client]]\nname = "phone"\n{line}\n')
    assert any(fault in each for each in caught.value.faults), caught.value.faults
