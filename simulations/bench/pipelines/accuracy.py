"""Final accuracy of federations whose activations and gradients lose precision on the wire, against fp32."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from gpu_runtime.contracts import DataSpec, Partition, SplitAccess, TaskPlan
from gpu_runtime.device import CPU, Device
from gpu_runtime.evaluation import TaskEvaluation
from gpu_runtime.pipeline.halves import join_halves
from gpu_runtime.pipeline.local_channel import LocalChannel
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.session import SessionKey
from gpu_runtime.pipeline.split_training import SplitTraining
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.training import Origin
from gpu_runtime.workload import Workload
from simulations.bench.pipelines.service import HOST, start_arrays
from tasks.registry import build

# The metric of each task that is compared.
TASKS = {"digits": "accuracy", "segmentation": "miou"}
LOSSY = ("fp16", "int8")
NUM_CLIENTS, NUM_ROUNDS, SEEDS = 3, 5, (0, 1, 2)
RUN = "accuracy"

Arrays = dict[str, np.ndarray]


def accuracy_rows(
    say: Callable[[str], None],
    *,
    tasks: dict[str, str] = TASKS,
    rounds: int = NUM_ROUNDS,
    seeds: tuple[int, ...] = SEEDS,
) -> list[dict[str, Any]]:
    """A row for each task and lossy encoding: mean final metric, and points (hundredths) lost against fp32."""
    rows = []
    for task, metric in tasks.items():
        finals: dict[str, list[float]] = {}
        for encoding in ("fp32", *LOSSY):
            finals[encoding] = [federate(task, encoding, seed, rounds)[metric] for seed in seeds]
            say(f"accuracy: {task} with {encoding}: {statistics.mean(finals[encoding]):.4f}")
        for encoding in LOSSY:
            lost = [100 * (one - other) for one, other in zip(finals["fp32"], finals[encoding], strict=True)]
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "encoding": encoding,
                    "fp32": statistics.mean(finals["fp32"]),
                    "lossy": statistics.mean(finals[encoding]),
                    "points_lost": statistics.mean(lost),
                    "points_lost_by_seed": lost,
                }
            )
    return rows


def federate(task: str, encoding: str, seed: int, rounds: int) -> dict[str, float]:
    """Final metrics of a small federation by FedAvg, every client split after its first block."""
    data = DataSpec(seed=seed)
    held = [
        cast(Workload, build(task, replace(data, partition=Partition(index=index, count=NUM_CLIENTS))))
        for index in range(NUM_CLIENTS)
    ]
    arrays = start_arrays(held[0])
    device = StageDevice(Device(name="server", kind=CPU, num_cores=1))
    stages = ServerStages(device)
    try:
        for server_round in range(1, rounds + 1):
            stages.open_round(RUN, server_round, 0, {held[0].name: held[0]}, {held[0].name: arrays})
            trained = [
                _trained(stages, workload, arrays, encoding, f"client-{index}", server_round, seed)
                for index, workload in enumerate(held)
            ]
            stages.release(RUN, server_round)
            total = sum(len(workload.train_examples()) for workload in held)
            weights = [len(workload.train_examples()) / total for workload in held]
            arrays = {name: _mean([each[name] for each in trained], weights) for name in arrays}
    finally:
        stages.close()
        device.close()
    evaluation = TaskEvaluation(workload=held[0], arrays=arrays, examples=held[0].test_examples(), device=HOST)
    while not evaluation.finished:
        evaluation.step()
    evaluation.finish()
    return evaluation.results


def _mean(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    mean = np.average(np.stack(arrays).astype(np.float64), axis=0, weights=weights)
    return np.asarray(mean, dtype=arrays[0].dtype)


def _trained(
    stages: ServerStages, workload: Workload, arrays: Arrays, encoding: str, client: str, server_round: int, seed: int
) -> Arrays:
    training = SplitTraining(
        workload=workload,
        plan=TaskPlan(
            task=workload.name,
            num_examples=len(workload.train_examples()),
            split_point=1,
            micro_batches=2,
            encoding=encoding,
        ),
        arrays=arrays,
        origin=Origin(client=client, server_round=server_round, seed=seed),
        device=HOST,
        access=SplitAccess(address="", run=RUN, token="", fallback=False),
        channel=lambda: LocalChannel(stages),
    )
    while not training.finished:
        training.step()
    training.finish()
    key = SessionKey(run=RUN, server_round=server_round, attempt=0, client=client, task=workload.name)
    return join_halves(training.arrays, stages.collect(key).arrays, list(arrays))
