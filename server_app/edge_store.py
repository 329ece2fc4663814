"""EdgeStore: what an edge server holds for the runs that use it, built from references to tasks it has itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from gpu_runtime.contracts import (
    MEASURED,
    ContractError,
    DataSpec,
    HeldTask,
    Profile,
    TaskProfile,
    from_json,
    one_line,
)
from gpu_runtime.device import Device
from gpu_runtime.pipeline.admin import PreparedStages, StageSpec, StageStore, TrainedStage
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.session import RefusedError, SessionEnd, SessionKey
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings
from gpu_runtime.workload import Workload
from tasks.errors import TaskError
from tasks.registry import build

MAX_KEEP_S = 7 * 86_400.0


class EdgeStore(StageStore):
    """Start weights and halves in `host`, costs measured on `device`.

    Rounds of runs that ended without a word go when their time is up and another round is prepared.

    Args:
        host: where sessions train.
        device: that of the host.
        data_dir: directory of the tasks' data here; no run names paths of this machine, nor has it download anything.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        host: ServerStages,
        device: Device,
        *,
        data_dir: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._device, self._data_dir, self._clock = host, device, data_dir, clock
        self._lock = threading.Lock()
        self._expires_s: dict[tuple[str, int], float] = {}
        self._measuring = threading.Lock()
        self._measured: dict[HeldTask, TaskProfile] = {}

    def prepare(self, stages: PreparedStages) -> None:
        try:
            spec = from_json(StageSpec, stages.spec)
        except ContractError as error:
            raise RefusedError(one_line(f"task {stages.task!r}: {error}")) from None
        if not 0 < spec.keep_s <= MAX_KEEP_S:
            raise RefusedError(f"a round is kept for at most {MAX_KEEP_S:g} s, not {spec.keep_s:g}")
        workload = self._workload(stages, spec.data)
        now_s = self._clock()
        with self._lock:
            forgotten = [key for key, expires_s in self._expires_s.items() if expires_s <= now_s]
            for key in forgotten:
                del self._expires_s[key]
            self._expires_s[stages.run, stages.server_round] = now_s + spec.keep_s
        for run, server_round in forgotten:
            if (run, server_round) != (stages.run, stages.server_round):
                self._host.release(run, server_round)
        self._host.open_round(
            stages.run, stages.server_round, spec.attempt, {stages.task: workload}, {stages.task: stages.arrays}
        )

    def collect(self, key: SessionKey) -> TrainedStage:
        half = self._host.collect(key)
        return TrainedStage(
            arrays=half.arrays, end=SessionEnd(num_steps=half.num_steps, num_examples=half.num_examples)
        )

    def release(self, run: str, server_round: int) -> None:
        with self._lock:
            self._expires_s.pop((run, server_round), None)
        self._host.release(run, server_round)

    def measure(self, held: Sequence[HeldTask]) -> Profile:
        """As `StageStore`; each task once in the life of this server. What could not be measured is tried again."""
        wanted = [replace(each, data=self._own(each.data)) for each in held]
        errors: tuple[str, ...] = ()
        with self._measuring:
            new = [each for each in dict.fromkeys(wanted) if each not in self._measured]
            for each in new:
                found = self._profile(each)
                errors += found.errors
                for task in found.tasks:
                    if task.cost is not None:
                        self._measured[each] = task
            tasks = tuple(self._measured[each] for each in wanted if each in self._measured)
        return Profile(
            client="edge server",
            device=self._device.name,
            num_cores=self._device.num_cores,
            clock=MEASURED,
            tasks=tasks,
            memory_bytes=self._device.memory_bytes,
            errors=errors,
        )

    def _profile(self, held: HeldTask) -> Profile:
        sharing = SharingSettings(mode="sequential", cores=self._device.num_cores)
        runtime = EmbeddedRuntime(sharing=sharing)
        try:
            return runtime.profile("edge server", [held])
        finally:
            runtime.close()

    def _workload(self, stages: PreparedStages, data: DataSpec) -> Workload:
        try:
            task = build(stages.reference, self._own(data))
        except TaskError as error:
            raise RefusedError(one_line(f"the edge server cannot build its stages: {error}")) from None
        if task.name != stages.task:
            raise RefusedError(
                one_line(f"the edge server knows {stages.reference!r} as task {task.name!r}, not {stages.task!r}")
            )
        return cast(Workload, task)

    def _own(self, data: DataSpec) -> DataSpec:
        return replace(data, directory=self._data_dir, download=False)
