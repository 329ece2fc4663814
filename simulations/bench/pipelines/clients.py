"""K emulated devices, each with a link of its own, on one service: all train at once, none waits for another."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpu_runtime.bench.disturbance import ForeignLoad
from gpu_runtime.contracts import Emulation
from gpu_runtime.pipeline.baselines import splitfed_choice
from gpu_runtime.pipeline.cut_costs import Link, SplitTask
from gpu_runtime.pipeline.joint import Request, choose_jointly
from gpu_runtime.pipeline.planner import Choice
from gpu_runtime.workload import Workload
from simulations.bench.pipelines.service import Iteration, Service, SplitRun
from simulations.bench.pipelines.virtual import seconds_per_step, server_idle_s, virtual_clients

START_S = 120.0


def measure_clients(
    service: Service,
    workload: Workload,
    arrays: Mapping[str, np.ndarray],
    split: SplitTask,
    link: Link,
    emulation: Emulation,
    *,
    setting: str,
    num_clients: int,
    iterations: int,
    fl_s: float,
    max_foreign_cores: float,
) -> dict[str, Any]:
    """One row: ours against SplitFed, both with `num_clients`, and what server idle time links and devices force.

    Args:
        service: serves `workload` from `arrays`.
        workload, arrays, emulation: what everybody trains, on what.
        split: costs with the server's on one core, as it serves several sessions.
        link: as probed.
        setting: `model/link`.
        num_clients: K.
        iterations: of each client; one more warms up.
        fl_s: an iteration of classic FL, which K clients do not change.
        max_foreign_cores: above it the row counts as disturbed.
    """
    capacity = float(service.cores)
    requests = [
        Request(client=f"client-{number}", split=split, link=link, num_steps=iterations)
        for number in range(num_clients)
    ]
    ours = choose_jointly(requests, server_capacity=capacity).choices
    splitfed = [splitfed_choice(split, link)] * num_clients
    foreign = ForeignLoad()
    foreign.start()
    runs = {
        name: _run(service, workload, arrays, choices, emulation, iterations)
        for name, choices in (("splitfed", splitfed), ("ours", ours))
        if all(choice.cut is not None for choice in choices)
    }
    cores = foreign.cores
    if "ours" not in runs:
        raise ValueError(f"{setting}: training whole is fastest, which leaves the server nothing to do")
    timeline = virtual_clients(ours, split.batch_size, capacity, iterations + 1)
    iteration_s, server_s = runs["ours"]
    # T minus server work, for all cores of the server: what a schedule without flaws would leave idle.
    idle_s, floor_s = iteration_s - server_s / capacity, server_idle_s(timeline)
    return {
        "setting": f"{setting}x{num_clients}",
        "choices": sorted({f"P={each.split_point} N={each.micro_batches} {each.encoding}" for each in ours}),
        "iteration_s": iteration_s,
        "predicted_s": statistics.mean(seconds_per_step(timeline, number) for number in range(num_clients)),
        "splitfed_s": runs["splitfed"][0],
        "server_work_s": server_s / capacity,
        "server_idle_s": idle_s,
        "server_idle_floor_s": floor_s,
        "server_idle_over_floor": idle_s / floor_s if floor_s > 0 else 1.0,
        "server_idle_splitfed_s": runs["splitfed"][0] - runs["splitfed"][1] / capacity,
        "speedup_over_fl": fl_s / iteration_s,
        "speedup_over_splitfed": runs["splitfed"][0] / iteration_s,
        "foreign_cores": cores,
        "disturbed": cores is not None and cores > max_foreign_cores,
    }


def _run(
    service: Service,
    workload: Workload,
    arrays: Mapping[str, np.ndarray],
    choices: Sequence[Choice],
    emulation: Emulation,
    iterations: int,
) -> tuple[float, float]:
    """Mean seconds of an iteration, and seconds of server work while all clients do one."""
    service.wait_for_quiet()
    done: list[list[Iteration]] = [[] for _ in choices]
    errors: list[BaseException] = []
    warm = threading.Barrier(len(choices))

    def train(number: int, choice: Choice) -> None:
        torch.set_num_threads(1)
        run = SplitRun(service, workload, arrays, choice, emulation, client=f"client-{number}")
        try:
            run.iterate()
            warm.wait(START_S)
            done[number] = [run.iterate() for _ in range(iterations)]
        except BaseException as error:  # it must reach the caller, whatever it is
            warm.abort()
            errors.append(error)
        finally:
            run.close()

    threads = [threading.Thread(target=train, args=each, daemon=True) for each in enumerate(choices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    seconds = [each.seconds for client in done for each in client]
    server_s = sum(statistics.mean(each.server_s for each in client) for client in done)
    return statistics.mean(seconds), server_s
