"""Every cut of a task as numbers for `makespan`: blocks measured on both sides, the link, and encodings between them.

Plain numbers and standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_runtime.contracts import ENCODINGS, BlockCost, EncodingCost
from gpu_runtime.pipeline.makespan import Affine, CutCost, not_negative

AUTO, ON = "auto", "on"
LOSSLESS = "fp32"
# Of a boundary tensor, whose size is told in fp32.
BYTES_PER_NUMBER = {"fp32": 4, "fp16": 2, "int8": 1}
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Link:
    """A client's link to the service: bytes per second (None: unlimited), latency one way, seconds of any message."""

    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    latency_s: float = 0.0
    message_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("uplink_bytes_per_s", "downlink_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"{name} must be finite and above 0, or None for unlimited, not {rate}")
        not_negative("latency_s", self.latency_s)
        not_negative("message_s", self.message_s)


@dataclass(frozen=True, kw_only=True)
class SplitTask:
    """One task between one device and the service.

    Attributes:
        task, batch_size: what it is.
        blocks, server_blocks: each block of the model, measured on the device and on the service's device.
        unsplit_step_s: a step of the whole model on the device.
        target_bytes: an example's labels; they go up with the activation.
        update_s, server_update_s: the optimiser's step of the *whole* model on either side.
        parameter_bytes: of each block, to divide the optimiser's step; empty: each side counts the whole step.
        channels: of each block's output, for the scales of int8; empty: scales are not counted.
        device_encodings, server_encodings: seconds to encode and decode on either side; one not named costs nothing.

    Raises:
        ValueError: numbers that make no sense; the text names the task and the field.
    """

    task: str
    batch_size: int
    blocks: tuple[BlockCost, ...]
    server_blocks: tuple[BlockCost, ...]
    unsplit_step_s: float
    target_bytes: int = 0
    update_s: float = 0.0
    server_update_s: float = 0.0
    parameter_bytes: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    device_encodings: tuple[EncodingCost, ...] = ()
    server_encodings: tuple[EncodingCost, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"{self.task}: batch_size must be at least 1, not {self.batch_size}")
        for name in ("unsplit_step_s", "target_bytes", "update_s", "server_update_s"):
            not_negative(f"{self.task}: {name}", getattr(self, name))
        for name in ("server_blocks", "parameter_bytes", "channels"):
            given = getattr(self, name)
            if (given or name == "server_blocks") and len(given) != len(self.blocks):
                raise ValueError(f"{self.task}: {name} has {len(given)} entries for {len(self.blocks)} blocks")
        for side in ("blocks", "server_blocks"):
            for index, block in enumerate(getattr(self, side)):
                for name in ("forward_s", "backward_s", "forward_call_s", "backward_call_s", "boundary_bytes"):
                    not_negative(f"{self.task}: {side}[{index}].{name}", getattr(block, name))
        for side in ("device_encodings", "server_encodings"):
            for cost in getattr(self, side):
                not_negative(f"{self.task}: {side} {cost.encoding} encode_s", cost.encode_s)
                not_negative(f"{self.task}: {side} {cost.encoding} decode_s", cost.decode_s)


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """What may be chosen.

    Attributes:
        encodings: the first of equally fast ones in the order of `contracts.ENCODINGS` wins.
        min_depth: the privacy floor: fewest blocks that stay on the device.
        max_depth: most blocks that stay on the device; None: all but one.
        min_micro_batches, max_micro_batches: least and most of them in a step.
        mode: "auto" trains whole where that is faster; "on" never does.
        tie_fraction: steps within this fraction of the fastest count as equally fast.
    """

    encodings: tuple[str, ...] = (LOSSLESS,)
    min_depth: int = 1
    max_depth: int | None = None
    min_micro_batches: int = 1
    max_micro_batches: int = 64
    mode: str = AUTO
    tie_fraction: float = 0.005

    def __post_init__(self) -> None:
        unknown = [encoding for encoding in self.encodings if encoding not in ENCODINGS]
        if unknown or not self.encodings:
            raise ValueError(f"encodings must be one or more of {', '.join(ENCODINGS)}, not {self.encodings}")
        for name in ("min_depth", "min_micro_batches", "max_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.min_micro_batches > self.max_micro_batches:
            raise ValueError(f"min_micro_batches is {self.min_micro_batches}, above {self.max_micro_batches}, the most")
        if self.mode not in (AUTO, ON):
            raise ValueError(f"mode must be {AUTO!r} or {ON!r}, not {self.mode!r}")
        not_negative("tie_fraction", self.tie_fraction)


def cuts(split: SplitTask, link: Link, options: SplitOptions | None = None) -> list[CutCost]:
    """Every cut at or above the privacy floor in every encoding allowed. The server has at least one block."""
    options = options or SplitOptions()
    return [
        _cut_cost(split, link, split_point, encoding)
        for encoding in sorted(set(options.encodings), key=ENCODINGS.index)
        for split_point in range(options.min_depth, _end(split, options))
    ]


def _end(split: SplitTask, options: SplitOptions) -> int:
    """One more than the deepest cut."""
    return len(split.blocks) if options.max_depth is None else min(len(split.blocks), options.max_depth + 1)


def _cut_cost(split: SplitTask, link: Link, split_point: int, encoding: str) -> CutCost:
    device, server = split.blocks[:split_point], split.server_blocks[split_point:]
    boundary = device[-1]
    numbers = boundary.boundary_bytes / BYTES_PER_NUMBER[LOSSLESS]
    encoded_bytes = numbers * BYTES_PER_NUMBER[encoding]
    scales_bytes = SCALE_BYTES * split.channels[split_point - 1] if encoding == "int8" and split.channels else 0
    here, there = _cost_of(encoding, split.device_encodings), _cost_of(encoding, split.server_encodings)
    on_device, on_server = _parameter_fractions(split, split_point)
    return CutCost(
        split_point=split_point,
        encoding=encoding,
        device_forward=Affine(
            call_s=sum(block.forward_call_s for block in device),
            example_s=sum(block.forward_s for block in device) + numbers * here.encode_s,
        ),
        uplink=_message(link.message_s, link.uplink_bytes_per_s, scales_bytes, encoded_bytes + split.target_bytes),
        server=Affine(
            call_s=sum(block.forward_call_s + block.backward_call_s for block in server),
            example_s=sum(block.forward_s + block.backward_s for block in server)
            + numbers * (there.decode_s + there.encode_s),
        ),
        downlink=_message(link.message_s, link.downlink_bytes_per_s, scales_bytes, encoded_bytes),
        device_backward=Affine(
            call_s=sum(block.backward_call_s for block in device),
            example_s=sum(block.backward_s for block in device) + numbers * here.decode_s,
        ),
        latency_up_s=link.latency_s,
        latency_down_s=link.latency_s,
        update_s=split.update_s * on_device,
        server_update_s=split.server_update_s * on_server,
    )


def _message(message_s: float, rate: float | None, fixed_bytes: float, example_bytes: float) -> Affine:
    if rate is None:
        return Affine(call_s=message_s)
    return Affine(call_s=message_s + fixed_bytes / rate, example_s=example_bytes / rate)


def _cost_of(encoding: str, costs: Sequence[EncodingCost]) -> EncodingCost:
    return next((cost for cost in costs if cost.encoding == encoding), EncodingCost(encoding=encoding))


def _parameter_fractions(split: SplitTask, split_point: int) -> tuple[float, float]:
    total_bytes = sum(split.parameter_bytes)
    if total_bytes == 0:
        return 1.0, 1.0
    on_device = sum(split.parameter_bytes[:split_point]) / total_bytes
    return on_device, 1.0 - on_device
