"""cuda-bindings behind the driver interface, with a fake module in its place; every call is checked."""

from __future__ import annotations

import builtins
import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime import cuda_driver
from gpu_runtime.cuda_driver import CudaBindings, CudaDriverError


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914


def sm_resource(num_sms: int, minimum: int = 8) -> SimpleNamespace:
    return SimpleNamespace(sm=SimpleNamespace(smCount=num_sms, minSmPartitionSize=minimum))


class FakeBindings(SimpleNamespace):
    """As much of cuda.bindings.driver as is used; each function returns its CUresult first, as there."""

    def __init__(self, **functions: Any) -> None:
        self.log: list[tuple[Any, ...]] = []

        def function(name: str, *values: Any) -> Any:
            def call(*arguments: Any) -> tuple[Any, ...]:
                self.log.append((name, *arguments))
                return (Result.CUDA_SUCCESS, *values)

            return call

        groups = [sm_resource(8), sm_resource(8), sm_resource(0), sm_resource(0)]
        answers: dict[str, tuple[Any, ...]] = {
            "cuInit": (),
            "cuDriverGetVersion": (12080,),
            "cuDeviceGet": ("device",),
            "cuDeviceGetDevResource": (sm_resource(132),),
            "cuDevSmResourceSplitByCount": (groups, 2, sm_resource(116)),
            "cuDevResourceGenerateDesc": ("description",),
            "cuGreenCtxCreate": (7,),
            "cuGreenCtxGetDevResource": (sm_resource(16),),
            "cuGreenCtxStreamCreate": (9,),
            "cuStreamDestroy": (),
            "cuGreenCtxDestroy": (),
        }
        super().__init__(
            CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm"),
            CUgreenCtxCreate_flags=SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1),
            CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
            CUgreenCtx=lambda handle: ("context", handle),
            CUstream=lambda handle: ("stream", handle),
            **({name: function(name, *values) for name, values in answers.items()} | functions),
        )


def test_the_calls_from_device_to_stream_and_back() -> None:
    cu = FakeBindings()
    driver = CudaBindings(cu)
    assert driver.version() == (12, 8)
    whole = driver.device_sms(3)
    assert (whole.num_sms, whole.minimum) == (132, 8)
    groups = driver.split(whole, 4, 8)
    assert [group.num_sms for group in groups] == [8, 8]
    context = driver.create_context(3, groups)
    assert driver.context_sms(context) == 16
    stream = driver.create_stream(context, -2)
    assert (context, stream) == (7, 9)
    driver.destroy_stream(stream)
    driver.destroy_context(context)
    assert [call for call in cu.log if call[0].startswith(("cuDevSm", "cuDevRes", "cuGreen", "cuStream"))] == [
        ("cuDevSmResourceSplitByCount", 4, whole.handle, 0, 8),
        ("cuDevResourceGenerateDesc", [group.handle for group in groups], 2),
        ("cuGreenCtxCreate", "description", "device", 1),
        ("cuGreenCtxGetDevResource", ("context", 7), "sm"),
        ("cuGreenCtxStreamCreate", ("context", 7), 1, -2),
        ("cuStreamDestroy", ("stream", 9)),
        ("cuGreenCtxDestroy", ("context", 7)),
    ]
    assert ("cuDeviceGet", 3) in cu.log


@pytest.mark.parametrize("sm", [SimpleNamespace(smCount=132), SimpleNamespace(smCount=132, minSmPartitionSize=9999)])
def test_a_driver_that_does_not_tell_its_minimum(sm: Any) -> None:
    cu = FakeBindings(cuDeviceGetDevResource=lambda *_: (Result.CUDA_SUCCESS, SimpleNamespace(sm=sm)))
    assert CudaBindings(cu).device_sms(0).minimum == 0


def test_an_error_names_the_call_and_the_cuda_error() -> None:
    refused = Result.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
    driver = CudaBindings(FakeBindings(cuDevSmResourceSplitByCount=lambda *_: (refused, None, None, None)))
    with pytest.raises(CudaDriverError) as caught:
        driver.split(driver.device_sms(0), 16, 8)
    assert str(caught.value) == "cuDevSmResourceSplitByCount failed: CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"


def test_an_error_without_a_name() -> None:
    driver = CudaBindings(FakeBindings(cuGreenCtxDestroy=lambda *_: (999,)))
    with pytest.raises(CudaDriverError, match=r"^cuGreenCtxDestroy failed: CUDA error 999$"):
        driver.destroy_context(7)


def test_a_function_that_bindings_or_driver_lack() -> None:
    cu = FakeBindings()
    del cu.cuGreenCtxStreamCreate
    with pytest.raises(CudaDriverError, match="cuGreenCtxStreamCreate is not in the installed cuda-bindings"):
        CudaBindings(cu).create_stream(7, 0)

    def missing(*_: Any) -> Any:
        raise RuntimeError('Function "cuGreenCtxCreate" not found\nsecond line')

    with pytest.raises(CudaDriverError) as caught:
        CudaBindings(FakeBindings(cuGreenCtxCreate=missing)).create_context(0, [])
    assert str(caught.value) == 'cuGreenCtxCreate cannot be called: RuntimeError: Function "cuGreenCtxCreate" not found'


# ------------------------------------------------------------------------------------------------------------- load


def test_bindings_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_cuda(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "cuda":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_cuda)
    with pytest.raises(CudaDriverError, match="cuda-bindings is needed and cannot be imported: No module named"):
        cuda_driver.load()


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        (12020, "green contexts need a driver for CUDA 12.5 or newer, this one is for CUDA 12.2"),
        (12040, "green contexts need a driver for CUDA 12.5 or newer, this one is for CUDA 12.4"),
    ],
)
def test_driver_too_old(monkeypatch: pytest.MonkeyPatch, version: int, complaint: str) -> None:
    cu = FakeBindings(cuDriverGetVersion=lambda: (Result.CUDA_SUCCESS, version))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=cu)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=cu))
    with pytest.raises(CudaDriverError) as caught:
        cuda_driver.load()
    assert str(caught.value) == complaint


def test_driver_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    cu = FakeBindings(cuDriverGetVersion=lambda: (Result.CUDA_SUCCESS, 12050))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=cu)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=cu))
    assert cuda_driver.load().version() == (12, 5)


def test_the_installed_bindings_have_every_name_that_is_used() -> None:
    cu = pytest.importorskip("cuda.bindings.driver")
    fake = FakeBindings()
    for name in (each for each in vars(fake) if each.lower().startswith("cu")):
        assert hasattr(cu, name), name
        for member in vars(getattr(fake, name)) if isinstance(getattr(fake, name), SimpleNamespace) else ():
            assert hasattr(getattr(cu, name), member), (name, member)
    assert int(cu.CUgreenCtx(5)) == int(cu.CUstream(5)) == 5
    assert cu.CUdevResource().sm.smCount == 0
    assert int(cu.CUresult.CUDA_SUCCESS) == 0
