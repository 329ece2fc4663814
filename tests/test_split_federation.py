"""Split training through the whole program: ServerApp with its service, virtual fleet, ClientApp, runtime, tasks."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server_app.settings import SettingsError
from server_app.split_service import HostedStages
from tests.test_federation import GARAGE, assert_equal, federate

DIGITS = {"tasks": "tiny-digits", "split__mode": "on"}


def splits(summary: dict[str, Any], server_round: int = 1) -> dict[str, dict[str, int | None]]:
    """Split point by client and task."""
    return {
        client: {task: each["split"] and each["split"]["split_point"] for task, each in record["tasks"].items()}
        for client, record in summary["rounds"][server_round - 1]["clients"].items()
    }


def distance(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> float:
    """Norm of the difference over the norm, all arrays together."""
    assert one.keys() == two.keys()
    difference = sum(float(((one[key] - two[key]) ** 2).sum()) for key in one)
    return float(np.sqrt(difference / sum(float((value**2).sum()) for value in one.values())))


def test_split_training_changes_nothing_in_the_result(tmp_path: Path) -> None:
    """FedAvg's loads do not depend on speed, so both runs train the same; float32 rounds differently in parts."""
    whole, _ = federate(tmp_path / "whole", strategy__name="fedavg", rounds=1)
    split, summary = federate(tmp_path / "split", strategy__name="fedavg", rounds=1, split__mode="on")
    assert summary["rounds"][0]["refused"] == []
    assert all(point for client in splits(summary).values() for point in client.values())
    assert distance(whole, split) < 1e-4
    start, _ = federate(tmp_path / "other", strategy__name="fedavg", rounds=1, seed=2)
    assert distance(whole, start) > 1e-2


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    one, _ = federate(tmp_path / "one", split__mode="on")
    two, summary = federate(tmp_path / "two", split__mode="on", shuffle=True, grid_seed=5)
    assert_equal(one, two)
    assert set(summary["rounds"][0]["clients"]) == set(GARAGE)
    assert [each["refused"] for each in summary["rounds"]] == [[], []]


def test_every_part_of_the_plan_reaches_the_client(tmp_path: Path) -> None:
    _, summary = federate(
        tmp_path,
        **DIGITS,
        rounds=1,
        split__point=2,
        split__micro_batches=3,
        split__encoding="int8",
        split__fallback=False,
    )
    for client in summary["rounds"][0]["clients"].values():
        split = client["tasks"]["tiny-digits"]["split"]
        assert (split["split_point"], split["micro_batches"], split["encoding"]) == (2, 3, "int8")
        assert split["bytes_up"] > 0
        assert split["device_s"] > 0
    assert summary["rounds"][0]["refused"] == []
    assert summary["final"]["tiny-digits"]["accuracy"] > 0.5


def test_clipped_and_noisy_activations_still_train(tmp_path: Path) -> None:
    _, summary = federate(tmp_path, **DIGITS, split__activation_clip=5.0, split__activation_noise=0.001)
    assert summary["final"]["tiny-digits"]["accuracy"] > 0.5


def test_clients_without_a_way_to_the_service_train_whole_and_say_so(tmp_path: Path) -> None:
    whole, _ = federate(tmp_path / "whole", tasks="tiny-digits", strategy__name="fedavg", rounds=1)
    split, summary = federate(
        tmp_path / "split",
        **DIGITS,
        strategy__name="fedavg",
        rounds=1,
        split__public_host="127.0.0.2",
        split__resume_s=0.3,
    )
    assert_equal(whole, split)
    for client in summary["rounds"][0]["clients"].values():
        assert client["outcome"] == "trained"
        (note,) = client["notes"]
        assert note.startswith("tiny-digits: trained whole: ")


def test_without_fallback_they_fail_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no client trained anything: client 'desktop', task 'tiny-digits': failed"):
        federate(tmp_path, **DIGITS, split__public_host="127.0.0.2", split__resume_s=0.3, split__fallback=False)


def test_a_half_that_is_lost_costs_its_clients_task_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = HostedStages.collect

    def lossy(self: HostedStages, server_round: int, client: str, task: str, attempt: int) -> Any:
        half = collect(self, server_round, client, task, attempt)
        return collect(self, server_round, client, task, attempt) if client == "laptop" else half

    monkeypatch.setattr(HostedStages, "collect", lossy)
    _, summary = federate(tmp_path, **DIGITS, rounds=1)
    (line,) = summary["rounds"][0]["refused"]
    assert line.startswith("client 'laptop', task 'tiny-digits': the split service has no other half")


def test_measured_seconds_over_the_fleets_links(tmp_path: Path) -> None:
    _, summary = federate(
        tmp_path, **DIGITS, rounds=2, fleet__clock="measured", profile_timeout_s=60.0, round_timeout_s=60.0
    )
    for client in summary["rounds"][1]["clients"].values():
        split = client["tasks"]["tiny-digits"]["split"]
        assert split["device_s"] > 0
        assert split["bytes_down"] > 0
    assert summary["final"]["tiny-digits"]["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"certificate": "bad.pem", "private_key": "bad.pem"}, "split.certificate and split.private-key are no"),
        ({"certificate": "none.pem", "private_key": "bad.pem"}, "none.pem cannot be read: No such file"),
    ],
)
def test_certificates_are_checked_before_anybody_waits_for_them(
    tmp_path: Path, settings: dict[str, str], complaint: str
) -> None:
    (tmp_path / "bad.pem").write_bytes(bytes(range(256)))
    changes = {f"split__{key}": str(tmp_path / name) for key, name in settings.items()}
    with pytest.raises(SettingsError, match=complaint):
        federate(tmp_path, **DIGITS, **changes)


def test_an_ipv6_address_to_listen_on(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    _, summary = federate(tmp_path, **DIGITS, rounds=1, split__listen="::1")
    assert all(each["tiny-digits"] for each in splits(summary).values())
