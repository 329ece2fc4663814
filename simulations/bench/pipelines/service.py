"""A split service in this process, and one client's training of a model on it, iteration by iteration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu_runtime.contracts import Emulation, SplitAccess, SplitReport, TaskPlan
from gpu_runtime.device import CPU, Device
from gpu_runtime.pipeline.channel import GrpcChannel
from gpu_runtime.pipeline.link import EmulatedLink
from gpu_runtime.pipeline.planner import Choice
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.service import ServiceSettings, SplitServer
from gpu_runtime.pipeline.session import StageHost
from gpu_runtime.pipeline.split_training import SplitTraining
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.workload import Workload

RUN, TOKEN = "bench", "bench"
HOST = torch.device(CPU)
# Of an iteration, by far longer than any of them.
DEADLINE_S = 300.0
CLOSING_S = 30.0
# Iterations that a session could do; it is abandoned before them.
MANY = 10_000


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration of one client: its seconds, the seconds it kept each resource busy, and bytes on the wire."""

    seconds: float
    device_s: float
    server_s: float
    uplink_s: float
    downlink_s: float
    bytes_up: int = 0
    bytes_down: int = 0

    def idle_fraction(self, resource: str) -> float:
        """Part of the iteration in which "device", "server", "uplink" or "downlink" had nothing to do."""
        busy_s: float = getattr(self, f"{resource}_s")
        return max(0.0, 1.0 - busy_s / self.seconds)


def median_of(iterations: Sequence[Iteration]) -> Iteration:
    """Each number's median."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in iterations))

    return Iteration(
        seconds=median("seconds"),
        device_s=median("device_s"),
        server_s=median("server_s"),
        uplink_s=median("uplink_s"),
        downlink_s=median("downlink_s"),
        bytes_up=round(median("bytes_up")),
        bytes_down=round(median("bytes_down")),
    )


class Service:
    """A split service on loopback that computes on `cores` of this machine's cores, for one model at a time."""

    def __init__(self, cores: int) -> None:
        self.device = StageDevice(Device(name="server", kind=CPU, num_cores=cores))
        self.cores = cores
        self._stages = ServerStages(self.device)
        self._server = SplitServer(self._stages, TOKEN, settings=ServiceSettings(queue_bound=256))
        self.server_round = 0

    def serve(self, workload: Workload, arrays: Mapping[str, np.ndarray]) -> None:
        """From now on sessions train `workload`; those before it are dropped."""
        self._stages.release(RUN, self.server_round)
        self.server_round += 1
        self._stages.open_round(RUN, self.server_round, 0, {workload.name: workload}, {workload.name: arrays})

    @property
    def host(self) -> StageHost:
        """For channels without a network."""
        return self._stages

    @property
    def access(self) -> SplitAccess:
        return SplitAccess(address=self._server.address, run=RUN, token=TOKEN, fallback=False)

    def wait_for_quiet(self) -> None:
        """Until no session is left: the next one has the server alone."""
        end_s = time.monotonic() + CLOSING_S
        while self._server.num_sessions and time.monotonic() < end_s:
            time.sleep(0.002)

    def close(self) -> None:
        self._server.close()
        self._stages.close()
        self.device.close()


class SplitRun:
    """One client's session. The first iteration opens it and warms up; it is none to be counted.

    Args:
        service: serves `workload`.
        workload, arrays: what to train, from where.
        choice: the cut, micro-batches and encoding.
        emulation: the device and link to act out.
        client: its name.
    """

    def __init__(
        self,
        service: Service,
        workload: Workload,
        arrays: Mapping[str, np.ndarray],
        choice: Choice,
        emulation: Emulation,
        client: str = "client",
    ) -> None:
        assert choice.split_point is not None, "a whole training has no session"
        self._service, self._emulation = service, emulation
        self._count = min(choice.micro_batches, workload.batch_size)
        access, link = service.access, EmulatedLink(replace(emulation, slowdown=1.0))
        self._training = SplitTraining(
            workload=workload,
            plan=TaskPlan(
                task=workload.name,
                num_examples=MANY * workload.batch_size,
                split_point=choice.split_point,
                micro_batches=choice.micro_batches,
                encoding=choice.encoding,
            ),
            arrays=arrays,
            origin=Origin(client=client, server_round=service.server_round, seed=0),
            device=HOST,
            access=access,
            channel=lambda: GrpcChannel(access.address, access.token, link=link, probe=False),
            emulation=emulation,
        )

    def iterate(self) -> Iteration:
        """One iteration.

        Raises:
            SplitError: the session has failed.
        """
        before = self._report()
        began_s = time.perf_counter()
        self._training.step()
        seconds = time.perf_counter() - began_s
        after, link = self._report(), self._emulation
        bytes_up, bytes_down = after.bytes_up - before.bytes_up, after.bytes_down - before.bytes_down
        messages_s = self._count * link.message_s
        return Iteration(
            seconds=seconds,
            device_s=after.device_s - before.device_s,
            server_s=after.server_s - before.server_s,
            uplink_s=messages_s + (bytes_up / link.uplink_bytes_per_s if link.uplink_bytes_per_s else 0.0),
            downlink_s=messages_s + (bytes_down / link.downlink_bytes_per_s if link.downlink_bytes_per_s else 0.0),
            bytes_up=bytes_up,
            bytes_down=bytes_down,
        )

    def close(self) -> None:
        """Give the session up."""
        self._training.abandon()

    def _report(self) -> SplitReport:
        report = self._training.report
        assert report is not None
        return report


class WholeRun:
    """Classic federated training: the whole model on the device. Nothing sleeps: a step's CPU time is multiplied.

    To be used by a thread that computes on one core.
    """

    def __init__(self, workload: Workload, arrays: Mapping[str, np.ndarray], slowdown: float) -> None:
        self._slowdown = slowdown
        self._training = TaskTraining(
            workload=workload,
            plan=TaskPlan(task=workload.name, num_examples=MANY * workload.batch_size),
            arrays=arrays,
            origin=Origin(client="client", server_round=0, seed=0),
            device=HOST,
        )

    def iterate(self) -> Iteration:
        began_s = time.thread_time()
        self._training.step()
        seconds = self._slowdown * (time.thread_time() - began_s)
        return Iteration(seconds=seconds, device_s=seconds, server_s=0.0, uplink_s=0.0, downlink_s=0.0)

    def close(self) -> None:
        self._training.abandon()


def start_arrays(workload: Workload) -> dict[str, np.ndarray]:
    """Start weights of a model."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return {name: value.numpy().copy() for name, value in workload.build_model().state_dict().items()}
