"""Recorded task costs: what training each task costs on the machine that virtual devices are compared with.

The files in `simulations/costs` are written by `python -m simulations.record_costs` and checked in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_runtime.contracts import BlockCost, ContractError, TaskCost, from_mapping
from gpu_runtime.settings import nearest

COSTS_DIR = Path(__file__).parent / "costs"


class CostsError(ValueError):
    """Recorded costs that cannot be read; the text names the file and the fault."""


@dataclass(frozen=True, kw_only=True)
class RecordedCosts:
    """Task costs by task name, and the machine they were recorded on. `provenance` says how."""

    device: str
    num_cores: int
    torch: str
    provenance: str
    tasks: Mapping[str, TaskCost]


def load_costs(name: str, directory: Path = COSTS_DIR) -> RecordedCosts:
    """The recorded costs called `name`.

    Raises:
        CostsError: no such file, or one that does not follow the format.
    """
    path = directory / f"{name}.json"
    if not path.is_file():
        known = sorted(file.stem for file in directory.glob("*.json"))
        raise CostsError(f"no recorded costs {name!r}{nearest(name, known)}; there are: {', '.join(known) or 'none'}")
    try:
        body: Any = json.loads(path.read_text(encoding="utf-8"))
        tasks = {task: from_mapping(TaskCost, cost) for task, cost in body["tasks"].items()}
        for task, cost in tasks.items():
            if not cost.solo_cost_s > 0 or not 0 <= cost.demand <= 1:
                raise ContractError(f"task {task!r} needs solo_cost_s above 0 and demand in 0..1")
        return RecordedCosts(
            device=str(body["device"]),
            num_cores=int(body["num_cores"]),
            torch=str(body["torch"]),
            provenance=str(body["provenance"]),
            tasks=tasks,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CostsError(f"recorded costs {name!r}: {type(error).__name__}: {error}") from None


def scaled(cost: TaskCost, factor: float) -> TaskCost:
    """The cost on a device that needs `factor` times the seconds for the same work."""
    blocks = tuple(
        BlockCost(
            forward_s=block.forward_s * factor,
            backward_s=block.backward_s * factor,
            boundary_bytes=block.boundary_bytes,
            forward_call_s=block.forward_call_s * factor,
            backward_call_s=block.backward_call_s * factor,
        )
        for block in cost.blocks
    )
    return replace(cost, solo_cost_s=cost.solo_cost_s * factor, blocks=blocks, update_s=cost.update_s * factor)
