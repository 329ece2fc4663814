"""Plans with split tasks through the runtime: beside whole ones, on every backend, and when they cannot be split."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from local_channel import LocalChannel
from runtime_fakes import build, hold, plan_of, start_arrays
from split_fakes import distance

from gpu_runtime.contracts import CANCELLED, FAILED, TRAINED, DataSpec, Emulation, Plan, SplitAccess
from gpu_runtime.device import Device
from gpu_runtime.pipeline.halves import join_halves
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.session import Channel, LinkError, SessionKey, SplitError
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.runtime import EmbeddedRuntime, TrainResult
from gpu_runtime.settings import SharingSettings

ACCESS = SplitAccess(address="127.0.0.1:1", run="run", token="secret", fallback=False)
SPLIT = ("pictures", "rows")
WHOLE = ("pictures-whole", "rows-whole")


@contextmanager
def service(*refs: str) -> Iterator[ServerStages]:
    device = StageDevice(Device(name="test", kind="cpu", num_cores=1))
    stages = ServerStages(device)
    arrays = {ref: by_task(start_arrays(ref), ref) for ref in refs}
    stages.open_round("run", 1, 0, {ref: build(ref, DataSpec()) for ref in refs}, arrays)
    try:
        yield stages
    finally:
        stages.close()
        device.close()


def by_task(arrays: dict[str, np.ndarray], task: str) -> dict[str, np.ndarray]:
    start = f"{task}/"
    return {key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)}


def split_plan(*refs: str, split: tuple[str, ...] = SPLIT, access: SplitAccess | None = ACCESS, **options: Any) -> Plan:
    plan = plan_of(*refs, **options)
    tasks = tuple(
        dataclasses.replace(task, split_point=2, micro_batches=3) if task.task in split else task for task in plan.tasks
    )
    return dataclasses.replace(plan, tasks=tasks, split=access)


def runtime_of(stages: ServerStages | None, backend: str = "auto", mode: str = "competitive") -> EmbeddedRuntime:
    def channel(access: SplitAccess, emulation: Emulation | None) -> Channel:
        assert access.run == "run"
        if stages is None:
            raise LinkError(f"the split service at {access.address} cannot be reached: refused")
        return LocalChannel(stages)

    sharing = SharingSettings(backend=backend, mode=mode, cores=2)
    return EmbeddedRuntime(factory=build, sharing=sharing, channel_factory=channel)


def outcomes(result: TrainResult) -> dict[str, str]:
    return {report.task: report.outcome for report in result.report.tasks}


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("cpu", "competitive"), ("cpu", "exclusive"), ("cpu", "sequential"), ("processes", "competitive")],
)
def test_split_and_whole_tasks_train_side_by_side(backend: str, mode: str) -> None:
    refs = (*SPLIT, *WHOLE)
    with service(*SPLIT) as stages:
        runtime = runtime_of(stages, backend, mode)
        result = runtime.train(split_plan(*refs, sharing_mode=mode), start_arrays(*refs), hold(*refs))
        runtime.close()
        assert outcomes(result) == dict.fromkeys(refs, TRAINED)
        alone = runtime_of(None, "cpu")
        whole = alone.train(plan_of(*SPLIT), start_arrays(*SPLIT), hold(*SPLIT))
        alone.close()
        for report in result.report.tasks:
            mine = by_task(result.arrays, report.task)
            start = by_task(start_arrays(report.task), report.task)
            if report.task in WHOLE:
                assert report.split is None
                assert set(mine) == set(start)
                continue
            assert report.split is not None
            assert (report.split.split_point, report.split.micro_batches) == (2, 3)
            assert report.num_examples == 60
            half = stages.collect(SessionKey(run="run", server_round=1, attempt=0, client="a", task=report.task))
            joined = join_halves(mine, half.arrays, list(start))
            assert distance(joined, by_task(whole.arrays, report.task)) < 1e-3


def test_an_unreachable_service_means_whole_training_that_says_so() -> None:
    runtime = runtime_of(None)
    access = dataclasses.replace(ACCESS, fallback=True)
    result = runtime.train(split_plan("rows", access=access), start_arrays("rows"), hold("rows"))
    whole = runtime.train(plan_of("rows", deterministic=True), start_arrays("rows"), hold("rows"))
    runtime.close()
    assert outcomes(result) == {"rows": TRAINED}
    assert result.report.tasks[0].split is None
    note = "rows: trained whole: the split service at 127.0.0.1:1 cannot be reached: refused"
    assert note in result.report.notes
    assert distance(result.arrays, whole.arrays) < 1e-5


def test_without_fallback_the_task_fails_and_the_others_go_on() -> None:
    runtime = runtime_of(None)
    result = runtime.train(
        split_plan("rows", "pictures-whole"), start_arrays("rows", "pictures-whole"), hold("rows", "pictures-whole")
    )
    runtime.close()
    assert outcomes(result) == {"rows": FAILED, "pictures-whole": TRAINED}
    error = next(report.error for report in result.report.tasks if report.task == "rows")
    assert error == "LinkError: the split service at 127.0.0.1:1 cannot be reached: refused"


def test_a_plan_that_splits_without_a_service_is_refused() -> None:
    runtime = runtime_of(None)
    result = runtime.train(split_plan("rows", access=None), start_arrays("rows"), hold("rows"))
    runtime.close()
    assert outcomes(result) == {"rows": FAILED}
    assert result.report.tasks[0].error == "the plan splits the model at block 2 and names no split service"


def test_a_machine_without_grpc_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpu_runtime.pipeline.channel", None)
    runtime = EmbeddedRuntime(factory=build)
    access = dataclasses.replace(ACCESS, fallback=True)
    result = runtime.train(split_plan("rows", access=access), start_arrays("rows"), hold("rows"), Emulation())
    runtime.close()
    assert outcomes(result) == {"rows": TRAINED}
    assert "cannot be reached: gRPC is missing here" in result.report.notes[0]


def test_the_arrays_may_be_the_device_stage_alone() -> None:
    arrays = {key: array for key, array in start_arrays("rows").items() if "blocks.1" in key}
    with service("rows") as stages:
        runtime = runtime_of(stages)
        result = runtime.train(split_plan("rows"), arrays, hold("rows"))
        runtime.close()
    assert outcomes(result) == {"rows": TRAINED}
    assert set(result.arrays) == set(arrays)


def test_closing_the_runtime_interrupts_a_task_that_waits() -> None:
    waiting, released = threading.Event(), threading.Event()

    class Silent(LocalChannel):
        def receive(self) -> Any:
            waiting.set()
            assert released.wait(30)
            raise LinkError("the channel is closed")

        def close(self) -> None:
            released.set()
            super().close()

    with service("rows") as stages:
        runtime = EmbeddedRuntime(factory=build, channel_factory=lambda access, emulation: Silent(stages))
        results: list[TrainResult] = []
        plan = split_plan("rows", access=dataclasses.replace(ACCESS, fallback=True))
        thread = threading.Thread(
            target=lambda: results.append(runtime.train(plan, start_arrays("rows"), hold("rows")))
        )
        thread.start()
        assert waiting.wait(30)
        runtime.close()
        thread.join()
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(SessionKey(run="run", server_round=1, attempt=0, client="a", task="rows"))
    assert outcomes(results[0]) == {"rows": CANCELLED}


def test_profiles_say_what_cannot_be_cut() -> None:
    runtime = EmbeddedRuntime(factory=build)
    profile = runtime.profile("a", hold("rows", "normed"), measure=False)
    runtime.close()
    reasons = {each.task: each.unsplittable for each in profile.tasks}
    assert reasons["rows"] == ""
    assert reasons["normed"].endswith("use GroupNorm or frozen statistics")
