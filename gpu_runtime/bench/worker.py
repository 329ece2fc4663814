"""A persistent worker process: trains one task when told to. Started by `gpu_runtime.bench.processes` only.

One JSON object a line on stdin and stdout: `{"prepare": TASK, "steps": N, "device": {...}}` is answered by
`{"ready": TASK}`, then `{"go": DEADLINE_S}` by `{"seconds": S, "done": FRACTION}`; a fault by `{"error": TEXT}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, TextIO

import torch

from gpu_runtime.bench.floor import SoloTimes
from gpu_runtime.bench.mixes import Share, start_arrays, synchronize
from gpu_runtime.bench.models import build
from gpu_runtime.bench.variants import drive
from gpu_runtime.contracts import DataSpec
from gpu_runtime.device import Device
from gpu_runtime.training import TaskTraining
from gpu_runtime.work import one_line

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until stdin ends."""
    end_with_parent()
    # What anything prints must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # it must reach the parent, whatever it is
            answer = {"error": one_line(error)}
        _say(answers, answer)
    return 0


class Worker:
    """What one worker holds: prepared work, and the workloads it has seen."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._training: TaskTraining | None = None
        self._device: Device | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order."""
        if "prepare" in order:
            task, self._device = order["prepare"], Device(**order["device"])
            if task not in self._shares:
                workload = build(task, DataSpec())
                self._shares[task] = Share(
                    workload=workload,
                    arrays=start_arrays(workload),
                    num_steps=1,
                    step=SoloTimes(one_s=1.0, all_s=1.0),
                )
            self._training = self._shares[task].training(self._device, order["steps"])
            return {"ready": task}
        assert self._training is not None, "go before prepare"
        assert self._device is not None, "go before prepare"
        started = time.perf_counter()
        done = drive(self._training, started + order["go"])
        synchronize(self._device)
        self._training = None
        return {"seconds": time.perf_counter() - started, "done": done}


def end_with_parent() -> None:
    """On Linux: be killed when the parent dies, even in the middle of a step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _say(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
