"""Links: named ones, files with changes, and all faults at once."""

from pathlib import Path

import pytest

from gpu_runtime.contracts import Emulation, LinkChange, from_json, to_json
from simulations.links import LinkFileError, link_names, load_link, parse_link


def faults_of(text: str) -> str:
    with pytest.raises(LinkFileError) as caught:
        parse_link("mine", text)
    assert all("\n" not in fault for fault in caught.value.faults)
    return "\n".join(caught.value.faults)


def test_4g_has_the_rates_of_the_paper() -> None:
    """10 Mbit/s up and 25 down are 1.25 and 3.125 million bytes a second."""
    link = load_link("4g")
    assert link == Emulation(uplink_bytes_per_s=1.25e6, downlink_bytes_per_s=3.125e6, latency_s=0.035)


def test_named_links_rise_in_rate_and_cross_the_wire() -> None:
    assert link_names() == ("3g", "4g", "4g-plus", "wifi", "lan")
    links = [load_link(name) for name in link_names()]
    ups = [link.uplink_bytes_per_s or 0.0 for link in links]
    assert ups == sorted(set(ups))
    assert [link.latency_s for link in links] == sorted((link.latency_s for link in links), reverse=True)
    for link in links:
        assert from_json(Emulation, to_json(link)) == link


def test_a_file_with_changes(tmp_path: Path) -> None:
    path = tmp_path / "tunnel.toml"
    path.write_text(
        """
link = "4g"
latency-ms = 50
[[change]]
at-s = 10
uplink-mbit-per-s = 1.0
[[change]]
at-s = 20.5
uplink-mbit-per-s = 10.0
downlink-mbit-per-s = 0
"""
    )
    assert load_link(str(path)) == Emulation(
        uplink_bytes_per_s=1.25e6,
        downlink_bytes_per_s=3.125e6,
        latency_s=0.05,
        changes=(
            LinkChange(at_s=10.0, uplink_bytes_per_s=125_000.0, downlink_bytes_per_s=3.125e6),
            LinkChange(at_s=20.5, uplink_bytes_per_s=1.25e6, downlink_bytes_per_s=None),
        ),
    )


def test_a_file_without_a_named_link() -> None:
    link = parse_link("mine", "downlink-mbit-per-s = 8\nmessage-ms = 2")
    assert link == Emulation(downlink_bytes_per_s=1e6, message_s=0.002)
    assert parse_link("none", "") == Emulation()


def test_all_faults_are_reported_at_once_and_by_name() -> None:
    found = faults_of(
        """
link = "4h"
uplink-mbit-per-s = -1.0
latency = 3
[[change]]
at-s = 5.0
uplink-mbit-per-s = inf
[[change]]
at = 3.0
downlink-mbit-per-s = 1.0
[[change]]
at-s = 5.0
[[change]]
at-s = 4.0
downlink-mbit-per-s = 1.0
"""
    )
    for part in (
        "link must be one of 3g, 4g, 4g-plus, wifi, lan, not '4h' (did you mean '4g'?)",
        "uplink-mbit-per-s must be a finite number at least 0",
        "unknown key 'latency' (did you mean 'latency-ms'?)",
        "change 1: uplink-mbit-per-s must be",
        "change 2: unknown key 'at' (did you mean 'at-s'?)",
        "change 2: at-s is missing",
        "change 3: a change needs",
        "in order of at-s",
    ):
        assert part in found


@pytest.mark.parametrize(("text", "fault"), [("change = 3", "[[change]] tables"), ("[[change", "is not TOML")])
def test_faulty_files(text: str, fault: str) -> None:
    assert fault in faults_of(text)


def test_unknown_links_name_the_nearest() -> None:
    with pytest.raises(LinkFileError, match="did you mean 'wifi'"):
        load_link("wify")
    with pytest.raises(LinkFileError, match="cannot be read: No such file"):
        load_link("./nowhere.toml")
