"""Classes of device: what a client takes from one, what it keeps of its own, and the fleets made of them."""

import pytest

from simulations.devices import device_classes
from simulations.fleet import FleetError, load_fleet, parse_fleet


@pytest.mark.parametrize("name", device_classes())
def test_every_device_class_makes_a_client(name: str) -> None:
    (kind,) = parse_fleet("mine", f'[[client]]\nname = "one"\ndevice = "{name}"\n').classes
    assert kind.speed == device_classes()[name]["speed"]
    assert kind.memory_gib == device_classes()[name]["memory-gib"]


def test_own_keys_come_before_the_devices() -> None:
    (kind,) = parse_fleet("mine", '[[client]]\nname = "one"\ndevice = "t4"\nspeed = 3.0\n').classes
    assert (kind.speed, kind.memory_gib) == (3.0, 16.0)


def test_a_named_link_replaces_the_devices_rates() -> None:
    text = '[[client]]\nname = "one"\ndevice = "t4"\nlink = "3g"\n'
    alone = '[[client]]\nname = "one"\nlink = "3g"\n'
    (kind,), (other,) = parse_fleet("mine", text).classes, parse_fleet("mine", alone).classes
    assert kind.uplink_bytes_per_s == other.uplink_bytes_per_s
    assert kind.latency_s == other.latency_s


def test_an_unknown_device_is_named_with_the_nearest() -> None:
    with pytest.raises(FleetError, match=r"no device 'rtx-3061'.*rtx-3060"):
        parse_fleet("mine", '[[client]]\nname = "one"\ndevice = "rtx-3061"\n')


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("garage", 4),
        ("uniform", 4),
        ("campus", 8),
        ("workshop", 32),
        ("district", 100),
        ("city", 1000),
        ("nation", 10000),
    ],
)
def test_presets_have_as_many_clients_as_documented(name: str, number: int) -> None:
    fleet = load_fleet(name)
    assert fleet.num_clients == number
    assert len({client.name for client in fleet.deal(number, ["digits", "detection"])}) == number
