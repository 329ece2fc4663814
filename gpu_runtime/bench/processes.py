"""One warmed-up worker process for each task; their start is not part of any run. None outlives the pool."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_runtime.bench.mixes import Work
from gpu_runtime.bench.variants import GRACE_S, Run, Variant, VariantError, done_fraction
from gpu_runtime.device import Device

# A worker imports torch before its first answer.
START_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """One worker in a process group of its own."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu_runtime.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise VariantError(f"a worker process has ended ({self._process.poll()}): {error}") from error

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises VariantError when there is none in time, or it is an error."""
        assert self._process.stdout is not None
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise VariantError(f"a worker process has not answered within {timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    raise VariantError(f"a worker process has ended with exit code {self._process.wait(GRACE_S)}")
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise VariantError(f"a worker process failed: {found['error']}")
        return found

    def end(self, patience_s: float = 2.0) -> None:
        """End the worker: by the end of its input, else by SIGTERM, else by SIGKILL, each to the whole group."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        for order in (None, signal.SIGTERM, signal.SIGKILL):
            if order is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, order)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
        if self._process.stdout is not None:
            self._process.stdout.close()


class ProcessPerTask(Variant):
    """Each task in a process of its own, on one thread; on CUDA the driver slices the device's time between them.

    Args:
        name: of the variant.
        device: where.
        worker: starts a worker; replaced in tests.
    """

    def __init__(self, name: str, device: Device, worker: Callable[[], WorkerProcess] = WorkerProcess) -> None:
        self.name, self._device, self._worker = name, device, worker
        self._workers: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def prepare(self, work: Work) -> None:
        """Start the workers that are still missing."""
        while len(self._workers) < len(work):
            self._workers.append(self._worker())

    def run(self, work: Work, deadline_s: float) -> Run:
        try:
            return self._run(work, deadline_s)
        except BaseException:
            # Workers may be in the middle of something: their answers no longer fit the orders.
            self.close()
            raise

    def _run(self, work: Work, deadline_s: float) -> Run:
        self.prepare(work)
        pairs = list(zip(work.items(), self._workers, strict=False))
        for (task, share), worker in pairs:
            worker.tell({"prepare": task, "steps": share.num_steps, "device": asdict(self._device)})
        for _, worker in pairs:
            worker.answer(START_S)
        started = time.perf_counter()
        for _, worker in pairs:
            worker.tell({"go": deadline_s})
        answers = {task: worker.answer(deadline_s + GRACE_S) for (task, _), worker in pairs}
        seconds = time.perf_counter() - started
        return Run(
            seconds=seconds,
            finish_s={task: answer["seconds"] for task, answer in answers.items()},
            done_fraction=done_fraction(work, {task: answer["done"] for task, answer in answers.items()}),
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
