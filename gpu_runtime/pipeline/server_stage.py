"""The split service's side of training: start weights of each round, sessions on them, halves for the strategy."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gpu_runtime.contracts import ENCODINGS
from gpu_runtime.pipeline.encoding import RAW
from gpu_runtime.pipeline.halves import ServerHalf
from gpu_runtime.pipeline.probe import PROBE_TASK, ProbeSession
from gpu_runtime.pipeline.server_session import ServerSession
from gpu_runtime.pipeline.session import RefusedError, SessionKey, SessionSpec, SplitError, StageHost, StageSession
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.pipeline.stages import CutError
from gpu_runtime.state import StateError
from gpu_runtime.work import TrainingError
from gpu_runtime.workload import Workload

MAX_SESSIONS = 256
MAX_HALVES = 4096
MAX_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class _Round:
    """One open round: what sessions start from, those that run, and the halves that wait for collection."""

    attempt: int
    workloads: dict[str, Workload]
    arrays: dict[str, Mapping[str, np.ndarray]]
    sessions: dict[SessionKey, ServerSession] = field(default_factory=dict)
    halves: dict[SessionKey, ServerHalf] = field(default_factory=dict)


class ServerStages(StageHost):
    """Holds the rounds of one or more runs; any number of threads may call it.

    Args:
        device: shared by all sessions.
        max_sessions: sessions at a time; more are refused.
        max_halves: halves kept for collection; with so many waiting, new sessions are refused.
        max_rounds: rounds open at a time.
    """

    def __init__(
        self,
        device: StageDevice,
        *,
        max_sessions: int = MAX_SESSIONS,
        max_halves: int = MAX_HALVES,
        max_rounds: int = MAX_ROUNDS,
    ) -> None:
        self._device = device
        self._max_sessions, self._max_halves, self._max_rounds = max_sessions, max_halves, max_rounds
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._opening = 0
        self._lock = threading.RLock()

    def open_round(
        self,
        run: str,
        server_round: int,
        attempt: int,
        workloads: Mapping[str, Workload],
        arrays: Mapping[str, Mapping[str, np.ndarray]],
    ) -> None:
        """Serve sessions of these tasks from now on.

        Where the round is open at the same attempt they come beside its other tasks, or in the place of those of the
        same name. Another attempt goes with all that it has trained.

        Args:
            run, server_round, attempt: which round; sessions have to name the same.
            workloads: by task: model, loss and optimiser. Their examples are not used.
            arrays: start weights by task and parameter, of whole models or at least of the server stages.

        Raises:
            SplitError: too many rounds are open.
        """
        opened = self._rounds.get((run, server_round))
        if opened is not None and opened.attempt != attempt:
            self.release(run, server_round)
        with self._lock:
            opened = self._rounds.get((run, server_round))
            if opened is None:
                if len(self._rounds) >= self._max_rounds:
                    raise SplitError(f"{len(self._rounds)} rounds are open; release some")
                opened = self._rounds[run, server_round] = _Round(attempt=attempt, workloads={}, arrays={})
            replaced = [key for key in opened.sessions if key.task in workloads]
            sessions = [opened.sessions.pop(key) for key in replaced]
            for key in [key for key in opened.halves if key.task in workloads]:
                del opened.halves[key]
            opened.workloads.update(workloads)
            opened.arrays.update(arrays)
        for session in sessions:
            session.abandon()

    def open(self, spec: SessionSpec) -> StageSession:
        key = spec.key
        if key.task == PROBE_TASK:
            return ProbeSession()
        with self._lock:
            opened = self._round_of(key)
            before = opened.sessions.pop(key, None)
            opened.halves.pop(key, None)
        if before is not None:
            before.abandon()
        _check(spec)
        with self._lock:
            running = self._opening + sum(len(each.sessions) for each in self._rounds.values())
            waiting = running + sum(len(each.halves) for each in self._rounds.values())
            if running >= self._max_sessions or waiting >= self._max_halves:
                raise RefusedError(f"the split service is full: {running} sessions, {waiting - running} halves waiting")
            self._opening += 1
        try:
            session = self._session(opened, spec)
        finally:
            with self._lock:
                self._opening -= 1
        return session

    def collect(self, key: SessionKey) -> ServerHalf:
        """The half that session `key` has trained; it is handed out once.

        Raises:
            SplitError: it is not there: not trained to its end, of another attempt, or collected already.
        """
        with self._lock:
            half = self._round_of(key).halves.pop(key, None)
            if half is None:
                state = "is still training" if key in self._round_of(key).sessions else "has no trained half here"
                raise SplitError(f"{key.client}/{key.task} of round {key.server_round} {state}")
            return half

    def release(self, run: str, server_round: int) -> None:
        """Drop all that belongs to a round: start weights, sessions, halves. Harmless if there is nothing."""
        with self._lock:
            closed = self._rounds.pop((run, server_round), None)
            sessions = list(closed.sessions.values()) if closed is not None else []
        for session in sessions:
            session.abandon()

    def close(self) -> None:
        """Drop every round. The device goes on."""
        for run, server_round in list(self._rounds):
            self.release(run, server_round)

    # ------------------------------------------------------------------------------------------------------ internals

    def _round_of(self, key: SessionKey) -> _Round:
        opened = self._rounds.get((key.run, key.server_round))
        if opened is None:
            raise RefusedError(f"round {key.server_round} of run {key.run!r} is not open here")
        if key.attempt != opened.attempt:
            raise RefusedError(f"round {key.server_round} is at attempt {opened.attempt}, not {key.attempt}")
        if key.task not in opened.workloads or key.task not in opened.arrays:
            raise RefusedError(f"task {key.task!r} is not split in round {key.server_round}")
        return opened

    def _session(self, opened: _Round, spec: SessionSpec) -> ServerSession:
        key = spec.key
        made: list[ServerSession] = []
        with self._lock:
            self._round_of(key)
            workload, arrays = opened.workloads[key.task], opened.arrays[key.task]

        def current() -> bool:
            """Whether the session still counts; not after its round was released or another took its place."""
            mine = self._rounds.get((key.run, key.server_round)) is opened
            return mine and bool(made) and opened.sessions.get(key) is made[0]

        def keep(half: ServerHalf) -> None:
            with self._lock:
                if not current():
                    raise SplitError("the session has ended: its round is over, or another one took its place")
                opened.halves[key] = half

        def ended() -> None:
            with self._lock:
                if current():
                    del opened.sessions[key]

        try:
            session = ServerSession(
                spec=spec,
                workload=workload,
                arrays=arrays,
                device=self._device,
                keep=keep,
                ended=ended,
            )
        except (CutError, StateError, TrainingError) as error:
            raise RefusedError(str(error)) from error
        made.append(session)
        with self._lock:
            other = opened.sessions.get(key)
            gone = (
                self._rounds.get((key.run, key.server_round)) is not opened or opened.arrays.get(key.task) is not arrays
            )
            if not gone:
                opened.sessions[key] = session
        if gone:
            session.abandon()
            raise RefusedError(f"round {key.server_round} of run {key.run!r} is not open here")
        if other is not None:
            other.abandon()
        return session


def _check(spec: SessionSpec) -> None:
    """Raises RefusedError on what no session can follow; the split point is checked against the model."""
    for name in ("micro_batches", "num_examples", "batch_size"):
        if getattr(spec, name) < 1:
            raise RefusedError(f"{name} must be at least 1, not {getattr(spec, name)}")
    for name in ("learning_rate", "proximal_mu"):
        value = getattr(spec, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise RefusedError(f"{name} must be finite and not negative, not {value}")
    if spec.encoding not in (RAW, *ENCODINGS):
        raise RefusedError(f"unknown encoding {spec.encoding!r}; there are {', '.join(ENCODINGS)}")
