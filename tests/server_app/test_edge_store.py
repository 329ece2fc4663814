"""EdgeStages against an edge server's store over gRPC: what is built there, what is refused, what is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.contracts import DataSpec, HeldTask, SplitAccess, array_key, to_json
from gpu_runtime.device import Device
from gpu_runtime.pipeline.admin import PreparedStages, StageSpec, admin_handler
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.service import SplitServer
from gpu_runtime.pipeline.session import RefusedError, SessionKey, SessionSpec, SplitError
from gpu_runtime.pipeline.stage_device import StageDevice
from server_app.edge_stages import EdgeStages
from server_app.edge_store import EdgeStore
from server_app.settings import SettingsError
from strategies.server_stages import StageError
from tasks.registry import build
from tests.server_app.edge_process import ADMIN_TOKEN, TOKEN

MACHINE = Device(name="test", kind="cpu", num_cores=1)
HELD = {name: HeldTask(ref=name, data=DataSpec(seed=1)) for name in ("tiny-digits", "tiny-faces")}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def host() -> Iterator[ServerStages]:
    with closing(StageDevice(MACHINE)) as device, closing(ServerStages(device)) as host:
        yield host


@pytest.fixture
def store(host: ServerStages, clock: Clock) -> EdgeStore:
    return EdgeStore(host, MACHINE, clock=clock)


@pytest.fixture
def server(host: ServerStages, store: EdgeStore) -> Iterator[SplitServer]:
    with closing(SplitServer(host, TOKEN, handlers=(admin_handler(store, ADMIN_TOKEN),))) as server:
        yield server


def access(server: SplitServer, **changes: Any) -> SplitAccess:
    return SplitAccess(**{"address": server.address, "run": "run", "token": TOKEN, "resume_s": 5.0, **changes})


@pytest.fixture
def stages(server: SplitServer) -> Iterator[EdgeStages]:
    with closing(EdgeStages(access(server), ADMIN_TOKEN, HELD, keep_s=60.0)) as stages:
        yield stages


def arrays_of(*tasks: str) -> dict[str, np.ndarray]:
    return {
        array_key(task, name): value.numpy()
        for task in tasks
        for name, value in build(task, DataSpec()).build_model().state_dict().items()
    }


def spec_of(task: str, server_round: int = 1, attempt: int = 0, run: str = "run") -> SessionSpec:
    key = SessionKey(run=run, server_round=server_round, attempt=attempt, client="a", task=task)
    return SessionSpec(key=key, split_point=1, micro_batches=2, encoding="fp32", num_examples=8, batch_size=8, seed=1)


def is_open(host: ServerStages, spec: SessionSpec) -> bool:
    try:
        host.open(spec).abandon()
    except RefusedError:
        return False
    return True


def test_all_tasks_of_a_round_are_open_at_once(stages: EdgeStages, host: ServerStages) -> None:
    stages.open_round(1, 0, arrays_of("tiny-digits", "tiny-faces"))
    assert is_open(host, spec_of("tiny-digits"))
    assert is_open(host, spec_of("tiny-faces"))
    assert not is_open(host, spec_of("tiny-scenes"))
    assert not is_open(host, spec_of("tiny-faces", attempt=1))


def test_a_new_round_or_attempt_takes_the_place_of_the_last(stages: EdgeStages, host: ServerStages) -> None:
    stages.open_round(1, 0, arrays_of("tiny-digits"))
    stages.open_round(1, 1, arrays_of("tiny-faces"))
    assert is_open(host, spec_of("tiny-faces", attempt=1))
    assert not is_open(host, spec_of("tiny-digits", attempt=1))
    stages.open_round(2, 0, arrays_of("tiny-digits"))
    assert not is_open(host, spec_of("tiny-faces", attempt=1))
    stages.close()
    assert not is_open(host, spec_of("tiny-digits", 2))


def test_two_runs_do_not_meet(stages: EdgeStages, server: SplitServer, host: ServerStages) -> None:
    with closing(EdgeStages(access(server, run="other"), ADMIN_TOKEN, HELD, keep_s=60.0)) as other:
        stages.open_round(1, 0, arrays_of("tiny-digits"))
        other.open_round(1, 3, arrays_of("tiny-digits"))
        assert is_open(host, spec_of("tiny-digits"))
        assert is_open(host, spec_of("tiny-digits", attempt=3, run="other"))
    assert is_open(host, spec_of("tiny-digits"))


def test_a_half_that_nobody_trained(stages: EdgeStages, server: SplitServer) -> None:
    stages.open_round(1, 0, arrays_of("tiny-digits"))
    with pytest.raises(StageError, match=f"edge server {server.address}: a/tiny-digits of round 1 has no trained half"):
        stages.collect(1, "a", "tiny-digits", 0)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("nonsense", "the edge server cannot build its stages: unknown task 'nonsense'"),
        ("no_such_pkg.tasks:Mine", "cannot import module 'no_such_pkg.tasks'"),
        ("os:system", "task 'os:system' is not a subclass of tasks.base.Task"),
        ("tiny-faces", "the edge server knows 'tiny-faces' as task 'tiny-faces', not 'tiny-digits'"),
    ],
)
def test_references_that_mean_nothing_there(server: SplitServer, ref: str, words: str) -> None:
    held = {"tiny-digits": HeldTask(ref=ref, data=DataSpec())}
    with closing(EdgeStages(access(server), ADMIN_TOKEN, held, keep_s=60.0)) as stages:
        with pytest.raises(StageError, match=words) as caught:
            stages.open_round(1, 0, arrays_of("tiny-digits"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "StageSpec is not JSON"),
        (to_json(DataSpec()), "expected a StageSpec, got a 'DataSpec'"),
        (to_json(StageSpec(attempt=0, data=DataSpec(), keep_s=0.0)), "a round is kept for at most 604800 s, not 0"),
        (to_json(StageSpec(attempt=0, data=DataSpec(), keep_s=1e9)), "a round is kept for at most 604800 s, not 1e"),
    ],
)
def test_specs_are_checked(store: EdgeStore, spec: str, words: str) -> None:
    prepared = PreparedStages(
        run="run", server_round=1, task="tiny-digits", reference="tiny-digits", spec=spec, arrays={}
    )
    with pytest.raises(RefusedError, match=words):
        store.prepare(prepared)


def test_rounds_that_nobody_releases_are_forgotten(store: EdgeStore, host: ServerStages, clock: Clock) -> None:
    arrays = {key.partition("/")[2]: value for key, value in arrays_of("tiny-digits").items()}

    def prepare(run: str, keep_s: float) -> None:
        spec = to_json(StageSpec(attempt=0, data=DataSpec(), keep_s=keep_s))
        store.prepare(
            PreparedStages(
                run=run, server_round=1, task="tiny-digits", reference="tiny-digits", spec=spec, arrays=arrays
            )
        )

    prepare("crashed", 60.0)
    prepare("alive", 60.0)
    clock.now_s = 59.0
    prepare("alive", 60.0)
    clock.now_s = 61.0
    prepare("new", 60.0)
    assert [is_open(host, spec_of("tiny-digits", run=run)) for run in ("crashed", "alive", "new")] == [
        False,
        True,
        True,
    ]


def test_runs_name_no_paths_here(store: EdgeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DataSpec] = []
    monkeypatch.setattr("server_app.edge_store.build", lambda ref, data: [asked.append(data), build(ref, data)][1])
    spec = StageSpec(attempt=0, data=DataSpec(directory=str(tmp_path), download=True, seed=4), keep_s=1.0)
    store.prepare(
        PreparedStages(
            run="run", server_round=1, task="tiny-digits", reference="tiny-digits", spec=to_json(spec), arrays={}
        )
    )
    assert asked == [DataSpec(seed=4)]


def test_costs_are_measured_once(stages: EdgeStages, store: EdgeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, faults = stages.costs()
    assert costs.keys() == HELD.keys()
    assert all(cost.blocks and cost.solo_cost_s > 0 for cost in costs.values())
    assert faults == ()
    monkeypatch.setattr(store, "_profile", None)
    assert stages.costs() == (costs, ())


def test_a_task_that_cannot_be_measured_is_named(server: SplitServer) -> None:
    held = {**HELD, "mine": HeldTask(ref="no_such_pkg.tasks:Mine", data=DataSpec())}
    del held["tiny-faces"]
    with closing(EdgeStages(access(server), ADMIN_TOKEN, held, keep_s=60.0)) as stages:
        costs, (fault,) = stages.costs()
    assert costs.keys() == {"tiny-digits"}
    assert fault.startswith("the edge server: no_such_pkg.tasks:Mine: ")


def test_tokens_are_tried_before_the_run(stages: EdgeStages, server: SplitServer) -> None:
    stages.check()
    with closing(EdgeStages(access(server), "guessed", HELD, keep_s=60.0)) as guessing:
        with pytest.raises(SettingsError, match="wrong token: see PACELINE_SPLIT_ADMIN_TOKEN here and there"):
            guessing.check()
        with pytest.raises(StageError, match="wrong token"):
            guessing.open_round(1, 0, arrays_of("tiny-digits"))
    guessing = EdgeStages(access(server, token="guessed"), ADMIN_TOKEN, HELD, keep_s=60.0)
    with closing(guessing), pytest.raises(SettingsError, match="wrong token: see PACELINE_SPLIT_TOKEN here and there"):
        guessing.check()


def test_a_server_that_goes_and_comes_back(host: ServerStages, store: EdgeStore) -> None:
    handlers = (admin_handler(store, ADMIN_TOKEN),)
    server = SplitServer(host, TOKEN, handlers=handlers)
    with closing(EdgeStages(access(server), ADMIN_TOKEN, HELD, keep_s=60.0)) as stages:
        stages.open_round(1, 0, arrays_of("tiny-digits"))
        server.close()
        for _ in range(3):
            with pytest.raises(StageError, match=f"edge server {server.address}: the edge server does not answer"):
                stages.open_round(2, 0, arrays_of("tiny-digits"))
        with closing(SplitServer(host, TOKEN, address=server.address, handlers=handlers)):
            stages.open_round(3, 0, arrays_of("tiny-digits"))
            assert is_open(host, spec_of("tiny-digits", 3))
            assert not is_open(host, spec_of("tiny-digits", 1))


def test_nobody_there() -> None:
    there = SplitAccess(address="127.0.0.1:1", run="run", token=TOKEN)
    with closing(EdgeStages(there, ADMIN_TOKEN, HELD, keep_s=60.0)) as stages:
        with pytest.raises(StageError, match=r"edge server 127\.0\.0\.1:1: the edge server does not answer"):
            stages.check()
        with pytest.raises(StageError):
            stages.costs()


def test_a_reopened_session_of_another_attempt_is_no_half(stages: EdgeStages, host: ServerStages) -> None:
    stages.open_round(1, 0, arrays_of("tiny-digits"))
    session = host.open(spec_of("tiny-digits"))
    stages.open_round(1, 1, arrays_of("tiny-digits"))
    with pytest.raises(StageError, match="round 1 is at attempt 1, not 0"):
        stages.collect(1, "a", "tiny-digits", 0)
    with pytest.raises(SplitError):
        host.collect(replace(spec_of("tiny-digits").key, attempt=1))
    session.abandon()
