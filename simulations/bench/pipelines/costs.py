"""What a model's stages cost on the emulated device and on the service, measured before anything is predicted.

The device is one thread, timed in CPU time and slowed down by a factor; the service is its own lanes, in wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from gpu_runtime.block_costs import bytes_per_example, measure_blocks
from gpu_runtime.contracts import BlockCost, EncodingCost, TaskPlan
from gpu_runtime.pipeline.cut_costs import SplitTask
from gpu_runtime.pipeline.encoding_costs import measure_encodings
from gpu_runtime.pipeline.local_channel import LocalChannel
from gpu_runtime.pipeline.session import Activation, Gradient, StageHost
from gpu_runtime.pipeline.split_training import SplitTraining
from gpu_runtime.training import Origin, on_device
from gpu_runtime.workload import Workload
from simulations.bench.pipelines.models import Blocks, ImageWorkload
from simulations.bench.pipelines.service import HOST, Service, start_arrays

T = TypeVar("T")

# Optimiser steps; the first is not timed.
UPDATES = 5
# Steps of a session that times its micro-batches; the first is not counted.
WATCHED_STEPS = 4
# Blocks on the device and micro-batches of a session that tells stages from blocks.
WATCHED_BLOCKS, WATCHED_PARTS = 3, 4
# An emulated device sleeps most of the time, and what runs first after a sleep finds cold caches.
REST_S = 0.02
# Numbers of a tensor whose memory format is changed, and how often.
LAYOUT_SHAPE, LAYOUT_REPEATS = (16, 64, 32, 32), 5


@dataclass(frozen=True, kw_only=True)
class MicroBatchTimes:
    """Seconds of micro-batches on this machine as split training runs them: CPU time on the device, server time."""

    forward_s: float
    backward_s: float
    server_s: float


@dataclass(frozen=True, kw_only=True)
class BaseCosts:
    """What does not depend on the model: encodings on either side, and a micro-batch that has next to nothing to do."""

    device_encodings: tuple[EncodingCost, ...]
    server_encodings: tuple[EncodingCost, ...]
    message: MicroBatchTimes


class Tiny(ImageWorkload):
    """A model with next to nothing to compute."""

    def build_model(self) -> nn.Module:
        return Blocks(
            nn.Sequential(nn.AvgPool2d(8), nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
        )


def base_costs(service: Service) -> BaseCosts:
    """Measured here and now, in about two seconds. The calling thread computes on one core."""
    tiny = Tiny("tiny", batch_size=32)
    service.serve(tiny, start_arrays(tiny))
    return BaseCosts(
        device_encodings=_encodings(),
        server_encodings=in_lane(service, _encodings),
        message=micro_batch_times(service, tiny, start_arrays(tiny), split_point=1, micro_batches=8, rest_s=REST_S),
    )


def split_task(
    workload: Workload,
    service: Service,
    base: BaseCosts,
    *,
    slowdown: float,
    budget_s: float = 1.0,
    server_cores: int = 0,
) -> SplitTask:
    """Blocks, optimiser and labels of `workload` as the planner wants them, the device's seconds times `slowdown`.

    What a message costs whatever its size counts to the first block on the device and to the last one on the server.
    The service serves `workload` afterwards. `server_cores` 1 gives the server's seconds while it serves several
    sessions, on one core each; by default it is all there for one.
    """
    device, update_s = _blocks(workload, budget_s, time.thread_time)

    def on_server() -> tuple[tuple[BlockCost, ...], float]:
        return _blocks(workload, budget_s, time.perf_counter)

    # This thread computes on one core, as the lanes do when they serve several sessions.
    server, server_update_s = on_server() if server_cores == 1 else in_lane(service, on_server)
    first, last, message = device[0], server[-1], base.message
    device = (
        replace(
            first,
            forward_call_s=first.forward_call_s + message.forward_s,
            backward_call_s=first.backward_call_s + message.backward_s,
        ),
        *device[1:],
    )
    device = _as_stages(device, workload, service)
    server = (*server[:-1], replace(last, forward_call_s=last.forward_call_s + message.server_s))
    size = workload.batch_size
    slow = tuple(_scaled(block, slowdown) for block in device)
    whole_s = sum(b.forward_call_s + b.backward_call_s + size * (b.forward_s + b.backward_s) for b in slow)
    targets = workload.train_examples().batch(range(size))[1]
    parameter_bytes, channels = _shapes(workload)
    return SplitTask(
        task=workload.name,
        batch_size=size,
        blocks=slow,
        server_blocks=server,
        unsplit_step_s=whole_s + slowdown * update_s,
        target_bytes=bytes_per_example(targets, size),
        update_s=slowdown * update_s,
        server_update_s=server_update_s,
        parameter_bytes=parameter_bytes,
        channels=channels,
        device_encodings=tuple(
            replace(each, encode_s=slowdown * each.encode_s, decode_s=slowdown * each.decode_s)
            for each in base.device_encodings
        ),
        server_encodings=base.server_encodings,
    )


def _as_stages(device: tuple[BlockCost, ...], workload: Workload, service: Service) -> tuple[BlockCost, ...]:
    """Blocks with what they take longer in the micro-batches of a device that rests than one after the other.

    That is measured for the first few blocks, and is a part of every block's call.
    """
    arrays = start_arrays(workload)
    service.serve(workload, arrays)
    count = min(len(device) - 1, WATCHED_BLOCKS)
    parts = min(WATCHED_PARTS, workload.batch_size)
    times = micro_batch_times(service, workload, arrays, split_point=count, micro_batches=parts, rest_s=REST_S)
    size = workload.batch_size / parts
    forward_s = sum(block.forward_call_s + size * block.forward_s for block in device[:count])
    backward_s = sum(block.backward_call_s + size * block.backward_s for block in device[:count])
    more_s = max(0.0, times.forward_s - forward_s) / count, max(0.0, times.backward_s - backward_s) / count
    return tuple(
        replace(
            block,
            forward_call_s=block.forward_call_s + more_s[0],
            backward_call_s=block.backward_call_s + more_s[1],
        )
        for block in device
    )


def in_lane(service: Service, work: Callable[[], T]) -> T:
    """What `work` returns, from the lane that serves a lone session."""
    key = object()
    service.device.join(key)
    try:
        return service.device.run(key, work).result
    finally:
        service.device.leave(key)


def micro_batch_times(
    service: Service,
    workload: Workload,
    arrays: Mapping[str, np.ndarray],
    *,
    split_point: int,
    micro_batches: int,
    rest_s: float = 0.0,
) -> MicroBatchTimes:
    """Medians over the micro-batches of a short session without a network, `rest_s` seconds of sleep between them.

    Left out are each step's first forward, which fetches the batch, and last backward, which has the optimiser's step
    behind it.
    """
    channel = _Watched(service.host, rest_s)
    training = SplitTraining(
        workload=workload,
        plan=TaskPlan(
            task=workload.name,
            num_examples=(WATCHED_STEPS + 1) * workload.batch_size,
            split_point=split_point,
            micro_batches=micro_batches,
        ),
        arrays=arrays,
        origin=Origin(client="costs", server_round=service.server_round, seed=0),
        device=HOST,
        access=service.access,
        channel=lambda: channel,
    )
    for step in range(WATCHED_STEPS):
        training.step()
        if step == 0:
            channel.forget()
    training.abandon()
    return MicroBatchTimes(
        forward_s=statistics.median(channel.forward_s),
        backward_s=statistics.median(channel.backward_s),
        server_s=statistics.median(channel.server_s),
    )


def _encodings() -> tuple[EncodingCost, ...]:
    """As the runtime measures them, and what it takes to leave and to restore the memory format of convolutions."""
    numbers = torch.randn(LAYOUT_SHAPE).to(memory_format=torch.channels_last)
    leave_s, restore_s = [], []
    for _ in range(LAYOUT_REPEATS + 1):
        began_s = time.thread_time()
        plain = numbers.contiguous()
        between_s = time.thread_time()
        plain.contiguous(memory_format=torch.channels_last)
        leave_s.append((between_s - began_s) / numbers.numel())
        restore_s.append((time.thread_time() - between_s) / numbers.numel())
    leave, restore = statistics.median(leave_s[1:]), statistics.median(restore_s[1:])
    return tuple(
        replace(each, encode_s=each.encode_s + leave, decode_s=each.decode_s + restore) for each in measure_encodings()
    )


class _Watched(LocalChannel):
    """Notes the CPU time of the device's thread between its calls, each of which rests first."""

    def __init__(self, host: StageHost, rest_s: float) -> None:
        super().__init__(host)
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.server_s: list[float] = []
        self._rest_s = rest_s
        self._left_s = 0.0
        self._backward = False

    def forget(self) -> None:
        """What was noted so far."""
        for noted in (self.forward_s, self.backward_s, self.server_s):
            noted.clear()

    def send(self, activation: Activation) -> None:
        if activation.index > 0 or activation.count == 1:
            self.forward_s.append(time.thread_time() - self._left_s)
        super().send(activation)
        self._backward = False
        time.sleep(self._rest_s)
        self._left_s = time.thread_time()

    def receive(self) -> Gradient:
        if self._backward:
            self.backward_s.append(time.thread_time() - self._left_s)
        gradient = super().receive()
        self.server_s.append(gradient.server_s)
        self._backward = True
        time.sleep(self._rest_s)
        self._left_s = time.thread_time()
        return gradient


def _blocks(workload: Workload, budget_s: float, clock: Callable[[], float]) -> tuple[tuple[BlockCost, ...], float]:
    """Blocks, and seconds of the optimiser's step of the whole model."""
    model = on_device(workload.build_model(), workload, HOST)
    model.train()
    batch = workload.train_examples().batch(range(workload.batch_size))
    blocks = measure_blocks(model, workload.loss, batch, budget_s, lambda: None, clock)
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    updates_s = []
    for _ in range(UPDATES + 1):
        began_s = clock()
        optimizer.step()
        updates_s.append(clock() - began_s)
    return blocks, statistics.median(updates_s[1:])


def _scaled(block: BlockCost, factor: float) -> BlockCost:
    return replace(
        block,
        forward_s=factor * block.forward_s,
        backward_s=factor * block.backward_s,
        forward_call_s=factor * block.forward_call_s,
        backward_call_s=factor * block.backward_call_s,
    )


def _shapes(workload: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parameter bytes of each block, and channels of its output; 0 for outputs without."""
    blocks = workload.build_model().blocks
    assert isinstance(blocks, nn.Sequential)
    value, _ = workload.train_examples().batch([0])
    parameter_bytes, channels = [], []
    with torch.no_grad():
        for block in blocks:
            value = block(value)
            channels.append(value.shape[1] if value.ndim >= 3 else 0)
            parameter_bytes.append(sum(each.numel() * each.element_size() for each in block.parameters()))
    return tuple(parameter_bytes), tuple(channels)
