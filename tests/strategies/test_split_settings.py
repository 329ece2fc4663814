"""Settings of split training that contradict each other are all named."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.split_settings import SplitSettings


def test_the_defaults_have_no_fault_and_split_nothing() -> None:
    assert SplitSettings().faults() == []
    assert SplitSettings().mode == "off"
    assert SplitSettings().min_depth == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"point": 1, "min_depth": 2}, "split.point 1 is below split.min-depth 2, the privacy floor"),
        ({"activation_noise": 0.1}, "split.activation-noise is in multiples of split.activation-clip, which is 0"),
        ({"certificate": "/a.pem"}, "split.certificate and split.private-key go together"),
        ({"ca_certificate": "/a.pem"}, "split.ca-certificate has clients ask for TLS"),
        ({"address": "edge"}, "split.address must be host:port, not 'edge'"),
        ({"address": "edge:0"}, "split.address must be host:port, not 'edge:0'"),
        ({"address": "edge:9100", "port": 9100}, "split.address names a service elsewhere"),
        ({"activation_clip": float("inf")}, "must be finite"),
    ],
)
def test_settings_at_odds_are_named(changes: dict[str, Any], fault: str) -> None:
    (found,) = SplitSettings(**changes).faults()
    assert fault in found


def test_any_encoding_means_all_of_them() -> None:
    assert SplitSettings(encoding="any").encodings == ("fp32", "fp16", "int8")
    assert SplitSettings(encoding="fp16").encodings == ("fp16",)
