"""What server and clients tell each other: Holdings, Profile, Plan and Report, and their JSON form.

Standard library only: importing this module loads no torch, so that a short-lived ClientApp process stays light.
Every value is a frozen keyword-only dataclass. `to_json` and `from_json` are the only way on and off the wire.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

SCHEMA_VERSION = 2

# JSON knows no largest integer; arrays and floats do.
MAX_INTEGER = 2**63 - 1

SHARING_MODES = ("sequential", "exclusive", "competitive")
ENCODINGS = ("fp32", "fp16", "int8")
TRAINED, FAILED, CANCELLED = "trained", "failed", "cancelled"
VIRTUAL, MEASURED = "virtual", "measured"

T = TypeVar("T")


_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
MAX_LINE = 300


class ContractError(ValueError):
    """A message that does not follow the contract; the text names the field and the fault."""


def one_line(text: object, limit: int = MAX_LINE) -> str:
    """`text` fit for a log, whoever wrote it: one line of at most `limit` characters without control characters."""
    plain = _ANSI_SEQUENCE.sub("", str(text)[: 100 * limit])
    words = " ".join("".join(char if char.isprintable() else " " for char in plain).split())
    return words if len(words) <= limit else words[: limit - 3] + "..."


def array_key(task: str, parameter: str) -> str:
    """Name of one tensor of one task on the wire: `<task>/<parameter>`."""
    return f"{task}/{parameter}"


def split_key(key: str) -> tuple[str, str]:
    """Inverse of `array_key`. Raises ContractError when there is no task in front."""
    task, slash, parameter = key.partition("/")
    if not slash or not task or not parameter:
        raise ContractError(f"array key {key!r} is not of the form '<task>/<parameter>'")
    return task, parameter


# ---------------------------------------------------------------------------------------------------------- holdings


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which part of a task's training data a client holds: part `index` of `count`.

    `shares` are the relative sizes of all parts (empty: equal sizes).
    """

    index: int = 0
    count: int = 1
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where a task's examples come from and how they are dealt out to clients.

    `directory` empty means data that comes with installed packages. `seed` fixes composition and partition.
    """

    directory: str = ""
    download: bool = False
    partitioner: str = "iid"
    alpha: float = 0.5
    classes_per_partition: int = 2
    seed: int = 0
    partition: Partition = Partition()


@dataclass(frozen=True, kw_only=True)
class HeldTask:
    """One task that a client holds: its reference in the registry (`digits` or `pkg.module:Class`) and its data."""

    ref: str
    data: DataSpec


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One entry of `NodeHoldings`: a task reference and the part of its data."""

    ref: str
    partition: Partition


@dataclass(frozen=True, kw_only=True)
class LinkChange:
    """From `at_s` on an emulated link runs at other rates, in bytes per second; None leaves a direction unlimited."""

    at_s: float
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """A slower device and link than this machine has, acted out in real time by split training.

    Rates in bytes per second, None for unlimited. `latency_s` is one way. `message_s` is what each message occupies a
    direction for, whatever its size. `changes` count from the first message, in order of time. Work on the device
    takes `slowdown` times its own time.
    """

    slowdown: float = 1.0
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    latency_s: float = 0.0
    message_s: float = 0.0
    changes: tuple[LinkChange, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeHoldings:
    """A client's name and the tasks it holds, as a simulated fleet tells a simulated node."""

    client: str
    holdings: tuple[Holding, ...]
    emulation: Emulation | None = None


# ----------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Cost of one block of a model: seconds per example forward and backward, bytes per example at its output.

    A call on n examples takes `forward_call_s + n * forward_s`. Bytes are those of the tensors as they are (fp32).
    """

    forward_s: float
    backward_s: float
    boundary_bytes: int
    forward_call_s: float = 0.0
    backward_call_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TaskCost:
    """What training one task costs on one device.

    `demand` V in 0..1; `solo_cost_s` c in seconds per example, alone on the device; `speed_curve` samples (v, s(v))
    in rising v, ending at (1, 1). `update_s` is the optimiser's part of a step, `target_bytes` an example's labels.
    """

    demand: float
    solo_cost_s: float
    speed_curve: tuple[tuple[float, float], ...]
    peak_memory_bytes: int = 0
    blocks: tuple[BlockCost, ...] = ()
    update_s: float = 0.0
    target_bytes: int = 0

    def scaled(self, factor: float) -> TaskCost:
        """The cost on a device that needs `factor` times the seconds for the same work."""
        seconds = ("forward_s", "backward_s", "forward_call_s", "backward_call_s")
        return dataclasses.replace(
            self,
            solo_cost_s=self.solo_cost_s * factor,
            update_s=self.update_s * factor,
            blocks=tuple(
                dataclasses.replace(block, **{name: getattr(block, name) * factor for name in seconds})
                for block in self.blocks
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """One task on one client: examples held and, unless only an inventory was asked for, its cost.

    `unsplittable` says why the model cannot be cut; empty where it can.
    """

    task: str
    num_examples: int
    batch_size: int
    cost: TaskCost | None = None
    unsplittable: str = ""


@dataclass(frozen=True, kw_only=True)
class EncodingCost:
    """Seconds to encode and to decode one number of an activation on a device."""

    encoding: str
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a client tells the server about itself. Rates in bytes per second, None where unknown.

    `latency_s` is one way; `message_s` what each message occupies the link for, whatever its size.
    """

    client: str
    device: str
    num_cores: int
    clock: str
    tasks: tuple[TaskProfile, ...]
    capacity: float = 1.0
    memory_bytes: int = 0
    fixed_s: float = 0.0
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    latency_s: float | None = None
    message_s: float = 0.0
    encodings: tuple[EncodingCost, ...] = ()
    source_hash: str = ""
    errors: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """Work of one task for one round: `num_examples` W to train; None leaves a choice to the client's runtime.

    A task whose `split_point` is None trains whole on the client; else its first `split_point` blocks do, and the split
    service of the plan has the others. `proximal_mu` is FedProx's pull to the start weights.
    """

    task: str
    num_examples: int
    share: float | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    proximal_mu: float = 0.0
    split_point: int | None = None
    micro_batches: int = 1
    encoding: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class SplitAccess:
    """How a client reaches the split service, and what it may tell it.

    Attributes:
        address: "host:port" of the service.
        run: the run's name there.
        token: proves that the caller belongs to the run.
        certificate: PEM of the authority that signed the service's certificate; empty for a plain connection.
        fallback: whether a client that cannot reach the service trains the whole model instead. Its message then holds
            the whole model; else only the device stage.
        activation_clip: largest L2 norm of an example's activations; 0: not clipped.
        activation_noise: standard deviation of Gaussian noise on them, as a multiple of the clip.
        message_deadline_s: seconds the service may take for a micro-batch before the link counts as dead.
        resume_s: seconds to try to reach the service, at first and again.
    """

    address: str
    run: str
    token: str
    certificate: str = ""
    fallback: bool = True
    activation_clip: float = 0.0
    activation_noise: float = 0.0
    message_deadline_s: float = 60.0
    resume_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the server tells one client for one round. `deadline_s` counts from the arrival of the message."""

    client: str
    server_round: int
    seed: int
    tasks: tuple[TaskPlan, ...]
    sharing_mode: str = "competitive"
    deterministic: bool = False
    deadline_s: float | None = None
    attempt: int = 0
    trace: bool = False
    split: SplitAccess | None = None


# ------------------------------------------------------------------------------------------------------------ report


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work on one lane, in seconds since the start of the client's round."""

    task: str
    lane: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceSample:
    """The device at `time_s` since the start of the client's round: busy fraction, bytes in use, watts.

    None where it cannot be read.
    """

    time_s: float
    busy_fraction: float | None = None
    memory_bytes: int | None = None
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """How a task was split, and what that took: seconds and bytes of the whole round, rates in bytes per second.

    `device_s` is work on the device, `server_s` work of the service for this session, `wait_s` time in which the device
    had nothing to do but wait for gradients. Rates and latency (one way) are measured, None where they were not.
    """

    split_point: int
    micro_batches: int
    encoding: str
    bytes_up: int = 0
    bytes_down: int = 0
    device_s: float = 0.0
    server_s: float = 0.0
    wait_s: float = 0.0
    num_reconnects: int = 0
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What one task really did. `seconds` is when it finished, counted from the start of the client's round.

    `outcome` is "trained", "failed" or "cancelled"; `num_examples` counts what entered the weights of the reply.
    `micro_batch` is the examples at a time where memory made that less than a batch; `peak_memory_bytes` what was
    measured, 0 where it cannot be told apart from what others took. `split` is None for a task that trained whole,
    also where the plan had it split.
    """

    task: str
    num_examples: int
    num_steps: int
    seconds: float
    outcome: str = TRAINED
    error: str = ""
    share: float | None = None
    first_loss: float | None = None
    mean_loss: float | None = None
    last_loss: float | None = None
    micro_batch: int | None = None
    peak_memory_bytes: int = 0
    split: SplitReport | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one client really did in one round. `seconds` is its makespan, on the clock named by `clock`.

    `started_at_s` is Unix time; `spans` and `samples` are always measured seconds, whatever the clock.
    """

    client: str
    server_round: int
    seconds: float
    clock: str
    tasks: tuple[TaskReport, ...]
    backend: str = ""
    attempt: int = 0
    started_at_s: float = 0.0
    notes: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    samples: tuple[DeviceSample, ...] = ()


# -------------------------------------------------------------------------------------------------------------- wire


def to_json(value: Any) -> str:
    """JSON text of a contract value, with its schema version. Raises ContractError on numbers that are not finite."""
    body = {"schema": SCHEMA_VERSION, "kind": type(value).__name__, **dataclasses.asdict(value)}
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ContractError(f"{type(value).__name__} holds a number that is not finite: {error}") from None


def from_json(kind: type[T], text: str) -> T:
    """Read back what `to_json` wrote.

    Raises:
        ContractError: not JSON, another kind or schema version, a key unknown or missing, or a value of the wrong type.
    """
    name = kind.__name__
    try:
        body = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ContractError(f"{name} is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ContractError(f"{name} must be a JSON object, not {type(body).__name__}")
    version = body.pop("schema", None)
    if version != SCHEMA_VERSION:
        raise ContractError(f"{name} has schema version {version!r}; this program reads version {SCHEMA_VERSION}")
    found = body.pop("kind", None)
    if found != name:
        raise ContractError(f"expected a {name}, got a {found!r}")
    return typing.cast(T, _read(kind, body, name))


def from_mapping(kind: type[T], body: Any) -> T:
    """As `from_json`, from already parsed JSON without schema and kind (for files that hold many values)."""
    return typing.cast(T, _read(kind, body, kind.__name__))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, value: Any, path: str) -> Any:
    """Convert parsed JSON `value` to the type `hint`, naming `path` in every complaint."""
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(typing.cast(type, hint), value, path)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        return _read(inner, value, path)
    if origin is tuple:
        return _read_tuple(typing.get_args(hint), value, path)
    if type(value) is int and abs(value) > MAX_INTEGER:
        raise ContractError(f"{path} is beyond 64 bits")
    if hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ContractError(f"{path} must be finite, not {value}")
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ContractError(f"{path} must be {getattr(hint, '__name__', hint)}, not {value!r}")


def _read_tuple(arms: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ContractError(f"{path} must be a list, not {value!r}")
    if len(arms) == 2 and arms[1] is Ellipsis:
        return tuple(_read(arms[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arms):
        raise ContractError(f"{path} must have {len(arms)} entries, not {len(value)}")
    return tuple(_read(arm, item, f"{path}[{i}]") for i, (arm, item) in enumerate(zip(arms, value, strict=True)))


def _read_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise ContractError(f"{path} must be an object, not {value!r}")
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ContractError(f"{path} has unknown keys {unknown}")
    required = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    missing = sorted(required - set(value))
    if missing:
        raise ContractError(f"{path} lacks {missing}")
    return kind(**{key: _read(hints[key], item, f"{path}.{key}") for key, item in value.items()})
