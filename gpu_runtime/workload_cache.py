"""Workloads of held tasks, made by a factory and kept: one process may serve many clients."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import cast

from gpu_runtime.contracts import HeldTask
from gpu_runtime.work import one_line
from gpu_runtime.workload import Workload, WorkloadFactory

# Each client has its own part of the data, and so its own workload.
MAX_WORKLOADS = 256


class FactoryError(ValueError):
    """A workload factory that cannot be found; the text says why."""


class WorkloadCache:
    """Workloads by what is held. Equal holdings share one: a workload keeps no state between calls.

    Args:
        factory: makes a workload from a task reference and its data; or where to find such a function,
            "package.module:function".

    Raises:
        FactoryError: the factory cannot be found.
    """

    def __init__(self, factory: WorkloadFactory | str) -> None:
        self._factory = resolve_factory(factory) if isinstance(factory, str) else factory
        self._kept: OrderedDict[HeldTask, Workload] = OrderedDict()

    def get(self, held: HeldTask) -> Workload:
        """The workload of a held task. Raises whatever the factory raises."""
        if held not in self._kept:
            self._kept[held] = self._factory(held.ref, held.data)
            if len(self._kept) > MAX_WORKLOADS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(held)
        return self._kept[held]

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()


def resolve_factory(reference: str) -> WorkloadFactory:
    """The function at "package.module:function". Raises FactoryError."""
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise FactoryError(f"factory {reference!r} is not of the form 'package.module:function'")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise FactoryError(f"factory {reference!r} cannot be loaded: {one_line(error)}") from None
    if not callable(factory):
        raise FactoryError(f"factory {reference!r} is not callable")
    return cast(WorkloadFactory, factory)
