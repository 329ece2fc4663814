"""Runs whose split service is a process of its own: the same weights, and what happens when it goes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.pipeline.channel import GrpcChannel
from server_app.checkpoint import load_weights
from server_app.edge_server import _parser
from server_app.edge_stages import EdgeStages
from server_app.settings import SettingsError
from tests.server_app.edge_process import (
    END_S,
    ROOT,
    TOKEN,
    TOKENS,
    EdgeProcess,
    run_to_its_end,
    write_certificate,
)
from tests.test_federation import GARAGE, assert_equal, federate

DIGITS = {"tasks": "tiny-digits", "split__mode": "on", "round_timeout_s": 60.0}


@contextmanager
def edge_process(*arguments: str, port: int = 0, **changes: str) -> Iterator[EdgeProcess]:
    process = EdgeProcess(*arguments, port=port, **changes)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeProcess]:
    """One that no test harms; it ends when it is asked to."""
    with edge_process() as process:
        yield process
        assert process.end() == 0


@pytest.fixture(autouse=True)
def known_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)


def split_tasks(summary: dict[str, Any], server_round: int) -> list[bool]:
    """Of each client's task in a round, whether it was trained split."""
    clients = summary["rounds"][server_round - 1]["clients"].values()
    return [task["split"] is not None for client in clients for task in client["tasks"].values()]


def before_rounds(monkeypatch: pytest.MonkeyPatch, hooks: dict[int, Callable[[], None]]) -> None:
    """Call `hooks[n]` right before round n is opened on the edge server."""
    open_round = EdgeStages.open_round

    def hooked(self: EdgeStages, server_round: int, attempt: int, arrays: Any) -> None:
        hooks.get(server_round, lambda: None)()
        open_round(self, server_round, attempt, arrays)

    monkeypatch.setattr(EdgeStages, "open_round", hooked)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_the_same_weights_as_with_the_hosted_service(tmp_path: Path, edge: EdgeProcess) -> None:
    hosted, _ = federate(tmp_path / "hosted", split__mode="on")
    there, summary = federate(tmp_path / "edge", split__mode="on", split__address=edge.address)
    assert_equal(hosted, there)
    assert [round["refused"] for round in summary["rounds"]] == [[], []]
    assert all(split_tasks(summary, 1) + split_tasks(summary, 2))
    assert TOKEN not in (tmp_path / "edge" / "summary.json").read_text()


def test_two_runs_at_once(tmp_path: Path, edge: EdgeProcess) -> None:
    """In a process each, as ServerApps are."""
    code = "import sys, json, pathlib; from tests.test_federation import federate; "
    code += "federate(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))"
    there = {**DIGITS, "split__address": edge.address, "rounds": 3}
    options = json.dumps({**there, "seed": 2})
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "two"), options], cwd=ROOT)
    try:
        one, _ = federate(tmp_path / "one", **there)
        assert other.wait(END_S) == 0
    finally:
        other.kill()
        other.wait(END_S)
    two = load_weights(tmp_path / "two" / "checkpoint", "last")
    assert_equal(one, federate(tmp_path / "one-alone", **DIGITS, rounds=3)[0])
    assert_equal(two, federate(tmp_path / "two-alone", **DIGITS, rounds=3, seed=2)[0])


def test_its_costs_are_measured_where_seconds_are(tmp_path: Path, edge: EdgeProcess) -> None:
    _, summary = federate(
        tmp_path,
        **DIGITS,
        rounds=1,
        fleet__clock="measured",
        profile_timeout_s=60.0,
        split__address=edge.address,
    )
    assert all(split_tasks(summary, 1))
    assert summary["notes"] == []


def test_encrypted(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    with edge_process("--certificate", str(certificate), "--private-key", str(key)) as edge:
        _, summary = federate(
            tmp_path / "run", **DIGITS, rounds=1, split__address=edge.address, split__ca_certificate=str(certificate)
        )
        assert all(split_tasks(summary, 1))
        _, plain = federate(tmp_path / "plain", **DIGITS, rounds=1, split__address=edge.address)
        assert not any(split_tasks(plain, 1))
        (note,) = plain["notes"]
        assert note.startswith(f"nothing is split until it is back: edge server {edge.address}: ")


def test_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 1 is split, 2 is not, 3 is again."""
    with edge_process() as edge:
        again: list[EdgeProcess] = []
        hooks = {2: edge.kill, 3: lambda: again.append(EdgeProcess(port=edge.port))}
        before_rounds(monkeypatch, hooks)
        try:
            _, summary = federate(tmp_path, **DIGITS, rounds=3, split__address=edge.address)
        finally:
            for each in again:
                each.kill()
    assert all(split_tasks(summary, 1))
    assert not any(split_tasks(summary, 2))
    (line,) = summary["rounds"][1]["refused"]
    assert line.startswith(f"nothing is split this round: edge server {edge.address}: the edge server does not answer")
    assert all(split_tasks(summary, 3))
    assert [summary["rounds"][index]["refused"] for index in (0, 2)] == [[], []]
    for entry in summary["rounds"]:
        assert {client["outcome"] for client in entry["clients"].values()} == {"trained"}


@pytest.mark.parametrize(
    ("changed", "where"), [("PACELINE_SPLIT_TOKEN", "notes"), ("PACELINE_SPLIT_ADMIN_TOKEN", "refused")]
)
def test_a_token_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, where: str
) -> None:
    """Clients train whole and say so, or the whole round is."""
    with edge_process() as edge:
        again: list[EdgeProcess] = []

        def restart() -> None:
            edge.kill()
            again.append(EdgeProcess(port=edge.port, **{changed: "another"}))

        before_rounds(monkeypatch, {2: restart})
        try:
            _, summary = federate(tmp_path, **DIGITS, split__address=edge.address)
        finally:
            for each in again:
                each.kill()
    assert all(split_tasks(summary, 1))
    assert not any(split_tasks(summary, 2))
    entry = summary["rounds"][1]
    lines = entry["refused"] if where == "refused" else [line for c in entry["clients"].values() for line in c["notes"]]
    assert len(lines) == (1 if where == "refused" else len(GARAGE))
    assert all("wrong token" in line for line in lines)
    assert {client["outcome"] for client in entry["clients"].values()} == {"trained"}


def test_told_to_stop_in_the_middle_of_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client trains its whole model: one alone, since others would try for long to reach what has gone."""
    with edge_process() as edge:
        send = GrpcChannel.send

        told: list[int] = []

        def stop_at_once(self: GrpcChannel, activation: Any) -> None:
            if not told and self._spec is not None and self._spec.key.task == "tiny-digits":
                told.append(signal.SIGTERM)
                edge.signal(signal.SIGTERM)
            send(self, activation)

        monkeypatch.setattr(GrpcChannel, "send", stop_at_once)
        _, summary = federate(tmp_path, **DIGITS, nodes=1, rounds=1, split__address=edge.address)
        assert edge.wait() == 0
    assert not any(split_tasks(summary, 1))
    (client,) = summary["rounds"][0]["clients"].values()
    assert client["outcome"] == "trained"
    (note,) = client["notes"]
    assert note.startswith("tiny-digits: trained whole: ")


def test_an_edge_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        whole, _ = federate(tmp_path / "whole", tasks="tiny-digits", strategy__name="fedavg", rounds=1)
        split, summary = federate(
            tmp_path / "split", **DIGITS, strategy__name="fedavg", rounds=1, split__address=address
        )
    assert_equal(whole, split)
    (note,) = summary["notes"]
    assert note.startswith(f"nothing is split until it is back: edge server {address}: the edge server does not answer")


@pytest.mark.parametrize("variable", list(TOKENS))
def test_tokens_that_are_missing_or_wrong_end_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: EdgeProcess, variable: str
) -> None:
    for value, words in (("", f"split.address is set: the environment variable {variable}"), ("no", "wrong token")):
        monkeypatch.setenv(variable, value)
        with pytest.raises(SettingsError, match=words) as caught:
            federate(tmp_path, **DIGITS, split__address=edge.address)
        assert variable in str(caught.value)
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- the process


def test_a_stopped_server_ends_with_0() -> None:
    with edge_process() as edge:
        edge.signal(signal.SIGINT)
        assert edge.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "changes", "code", "words"),
    [
        (["--listen", "0.0.0.0"], {}, 2, "--listen 0.0.0.0 is open to a network"),
        (["--listen", "::"], {}, 2, "--listen :: is open to a network"),
        (["--listen", "no-such-host.invalid"], {}, 1, "--listen no-such-host.invalid: "),
        (["--certificate", "x.pem"], {}, 2, "--certificate and --private-key go together"),
        (["--certificate", "/no/x.pem", "--private-key", "/no/x.key"], {}, 2, "/no/x.pem cannot be read"),
        (["--certificate", __file__, "--private-key", __file__], {}, 2, "are no certificate and its key"),
        ([], {"PACELINE_SPLIT_TOKEN": ""}, 2, "the environment variable PACELINE_SPLIT_TOKEN must"),
        ([], {"PACELINE_SPLIT_ADMIN_TOKEN": TOKEN}, 2, "must differ"),
    ],
)
def test_faults_in_one_line(arguments: list[str], changes: dict[str, str], code: int, words: str) -> None:
    listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1"]
    found, said = run_to_its_end("--port", "0", *listen, *arguments, **changes)
    assert found == code
    (line,) = said.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert TOKEN not in line


def test_a_port_that_is_taken(edge: EdgeProcess) -> None:
    code, said = run_to_its_end("--listen", "127.0.0.1", "--port", str(edge.port))
    assert code == 1
    assert f"error: the split service cannot listen on {edge.address}" in said


def test_garbage_and_half_open_connections_harm_nobody(tmp_path: Path, edge: EdgeProcess) -> None:
    sockets = [socket.create_connection(("127.0.0.1", edge.port)) for _ in range(40)]
    try:
        for index, each in enumerate(sockets):
            if index % 2:
                each.sendall(
                    np.random.default_rng(index).bytes(10_000) if index % 4 == 1 else b"GET / HTTP/1.1\r\n\r\n"
                )
        _, summary = federate(tmp_path, **DIGITS, rounds=1, split__address=edge.address)
        assert all(split_tasks(summary, 1))
    finally:
        for each in sockets:
            each.close()


def test_the_page_on_it_names_every_option() -> None:
    page = (ROOT / "docs" / "edge-server.md").read_text()
    options = {option for action in _parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert {option for option in options if f"`{option}" not in page and f" {option} " not in page} == set()
    assert all(name in page for name in TOKENS)
