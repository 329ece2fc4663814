"""The few CUDA driver calls that partitions of a device need: an interface, and cuda-bindings behind it.

Nothing here is imported before `load` is called: machines without a GPU, or without cuda-bindings, lose nothing else.
Used by lanes/green.py; tests put a fake in its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# cuGreenCtxCreate came with CUDA 12.4, cuGreenCtxStreamCreate, without which a green context must be made current to a
# thread before a stream can be made in it, with 12.5 (the version under which cuda-bindings looks it up).
MINIMUM_VERSION = (12, 5)


class CudaDriverError(RuntimeError):
    """A driver call that failed or cannot be made; one line that names the call and the CUDA error."""


@dataclass(frozen=True, kw_only=True)
class SmResource:
    """Some SMs of a device. `minimum` is the least partition that can be cut from them, 0 where not told."""

    num_sms: int
    minimum: int
    handle: Any


class CudaDriver(ABC):
    """Green contexts: parts of a device's SMs, with streams whose kernels run on no other SMs.

    Contexts and streams are the driver's handles as integers. All methods raise CudaDriverError.
    """

    @abstractmethod
    def version(self) -> tuple[int, int]:
        """The newest CUDA that the installed driver supports, e.g. (12, 8)."""

    @abstractmethod
    def device_sms(self, device: int) -> SmResource:
        """All SMs of a device, by its index."""

    @abstractmethod
    def split(self, sms: SmResource, num_groups: int, minimum: int) -> tuple[SmResource, ...]:
        """At most `num_groups` disjoint groups of equal size, each of about `minimum` SMs or what the hardware rounds
        that to. What is left over is in no group."""

    @abstractmethod
    def create_context(self, device: int, parts: Sequence[SmResource]) -> int:
        """A green context on these parts: all from the same `split`, or one whole device."""

    @abstractmethod
    def context_sms(self, context: int) -> int:
        """Number of SMs that a green context really has."""

    @abstractmethod
    def destroy_context(self, context: int) -> None:
        """After all its streams have been destroyed."""

    @abstractmethod
    def create_stream(self, context: int, priority: int) -> int:
        """A stream (a `cudaStream_t`) in a green context; lower `priority` is more urgent."""

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Work already in the stream still ends."""


class CudaBindings(CudaDriver):
    """The real driver. `cu` is the module cuda.bindings.driver.

    Checked against its documentation (13.5) and CUDA's (driver API, "Green Contexts").
    """

    def __init__(self, cu: Any) -> None:
        self._cu = cu

    def version(self) -> tuple[int, int]:
        (number,) = self._call("cuDriverGetVersion")
        return int(number) // 1000, int(number) % 1000 // 10

    def device_sms(self, device: int) -> SmResource:
        self._call("cuInit", 0)
        (resource,) = self._call("cuDeviceGetDevResource", self._device(device), self._sm_type())
        return _sm_resource(resource)

    def split(self, sms: SmResource, num_groups: int, minimum: int) -> tuple[SmResource, ...]:
        groups, made, _remainder = self._call("cuDevSmResourceSplitByCount", num_groups, sms.handle, 0, minimum)
        # The list is as long as what was asked for; only the first `made` are groups.
        return tuple(_sm_resource(group) for group in groups[: int(made)])

    def create_context(self, device: int, parts: Sequence[SmResource]) -> int:
        (description,) = self._call("cuDevResourceGenerateDesc", [part.handle for part in parts], len(parts))
        flags = self._cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        (context,) = self._call("cuGreenCtxCreate", description, self._device(device), flags)
        return int(context)

    def context_sms(self, context: int) -> int:
        (resource,) = self._call("cuGreenCtxGetDevResource", self._cu.CUgreenCtx(context), self._sm_type())
        return int(resource.sm.smCount)

    def destroy_context(self, context: int) -> None:
        self._call("cuGreenCtxDestroy", self._cu.CUgreenCtx(context))

    def create_stream(self, context: int, priority: int) -> int:
        flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING  # the only kind allowed in a green context
        (stream,) = self._call("cuGreenCtxStreamCreate", self._cu.CUgreenCtx(context), flags, priority)
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", self._cu.CUstream(stream))

    def _device(self, device: int) -> Any:
        (handle,) = self._call("cuDeviceGet", device)
        return handle

    def _sm_type(self) -> Any:
        return self._cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What a driver function returns after its CUresult."""
        function = getattr(self._cu, name, None)
        if function is None:
            raise CudaDriverError(f"{name} is not in the installed cuda-bindings; version 12.8 or newer has it")
        try:
            result, *values = function(*arguments)
        except Exception as error:  # a missing libcuda, a function that this driver lacks, a wrong argument
            raise CudaDriverError(f"{name} cannot be called: {_first_line(error)}") from error
        if int(result) != 0:
            raise CudaDriverError(f"{name} failed: {getattr(result, 'name', None) or f'CUDA error {int(result)}'}")
        return tuple(values)


def load() -> CudaDriver:
    """The driver of this machine, if it can make green contexts.

    Raises:
        CudaDriverError: cuda-bindings or the driver is absent or too old; says what is needed and what is there.
    """
    try:
        from cuda.bindings import driver as cu
    except ImportError as error:
        raise CudaDriverError(f"the package cuda-bindings is needed and cannot be imported: {error}") from error
    driver = CudaBindings(cu)
    check_version(driver)
    return driver


def check_version(driver: CudaDriver) -> None:
    """Raise CudaDriverError if the driver is too old for green contexts with streams of their own."""
    there = driver.version()
    if there < MINIMUM_VERSION:
        needed, found = (".".join(map(str, version)) for version in (MINIMUM_VERSION, there))
        raise CudaDriverError(f"green contexts need a driver for CUDA {needed} or newer, this one is for CUDA {found}")


def _sm_resource(resource: Any) -> SmResource:
    sm = resource.sm
    num_sms = int(sm.smCount)
    # Told since CUDA 13; an older driver leaves the field as it was.
    minimum = int(getattr(sm, "minSmPartitionSize", 0))
    return SmResource(num_sms=num_sms, minimum=minimum if 0 < minimum <= num_sms else 0, handle=resource)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
