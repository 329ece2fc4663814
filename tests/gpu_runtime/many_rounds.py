"""Run by test_leaks.py in a process of its own: many rounds of two tasks that do well and two that fail or run short.

Prints one JSON object for each round in `LOOK_AT`.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path

import torch
from runtime_fakes import Dropping, Pictures, build, hold, plan_of, start_arrays

from gpu_runtime.contracts import DataSpec
from gpu_runtime.device import Device
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.workload import Workload

WARM_UP, ROUNDS = 5, 50
LOOK_AT = (WARM_UP, ROUNDS)


class Fails(Pictures):
    """Raises in the last step of every round, with everything it has built."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) < self.batch_size:
            raise RuntimeError("injected fault")
        return super().loss(outputs, targets)


class Short(Dropping):
    """Runs out of memory in the first step of every round, and goes on in halves."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) == self.batch_size:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(outputs, targets)


def factory(ref: str, data: DataSpec) -> Workload:
    return {"fails": Fails, "short": Short}[ref](ref) if ref in ("fails", "short") else build(ref, data)


def held_now() -> dict[str, int]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules' attributes warn when they are looked at
        tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    return {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "tensors": tensors,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    runtime = EmbeddedRuntime(factory)
    runtime._device = Device(name="test", kind="cpu", num_cores=2)
    known = ("pictures", "dropping")
    refs = (*known, "fails", "short")
    arrays = start_arrays(*known)
    for ref, like in (("fails", "pictures"), ("short", "dropping")):
        arrays |= {key.replace(like, ref): array for key, array in arrays.items() if key.startswith(like)}
    model = torch.nn.Linear(1, 1)  # kept, so that a count of tensors that finds none is known to be blind
    for number in range(1, ROUNDS + 1):
        runtime.train(plan_of(*refs, num_examples=12, trace=True), arrays, hold(*refs))
        runtime.evaluate(arrays, hold(*known))
        if number in LOOK_AT:
            print(json.dumps({"round": number, **held_now()}), flush=True)
    del model


if __name__ == "__main__":
    main()
