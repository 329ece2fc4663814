"""What a round could have taken at best: loads planned with the true costs of a fleet's virtual devices.

For benchmarks alone: strategies see profiles and reports, never true costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simulations.virtual_clock import transfer_s
from simulations.virtual_device import VirtualDevice
from strategies.load_assignment import ClientLoad, LinearProgramAssigner, LoadAssigner, LoadProblem, TaskLoad


@dataclass(frozen=True, kw_only=True)
class TrueBound:
    """The least makespan a round's totals allow by the true costs, and how idle clients are with the loads reaching it.

    `bound_s` is the optimum of the linear programme, `optimum_s` that of its loads in whole examples.
    """

    bound_s: float
    optimum_s: float
    idle_fraction: float


def true_load(
    device: VirtualDevice, held: Mapping[str, int], server_round: int, *, num_bytes_down: int = 0, num_bytes_up: int = 0
) -> ClientLoad:
    """The client as load assignment would see it, did it know what only the virtual clock knows.

    Args:
        device: the client's.
        held: examples held of each task.
        server_round: drift depends on it.
        num_bytes_down, num_bytes_up: of the messages of the round.
    """
    kind = device.client.kind
    costs = {task: device.true_cost(task, server_round) for task in held}
    return ClientLoad(
        client=device.client.name,
        tasks={
            task: TaskLoad(num_held=held[task], demand=cost.demand, solo_cost_s=cost.solo_cost_s)
            for task, cost in costs.items()
        },
        capacity=kind.capacity,
        fixed_s=kind.fixed_s,
        link_s=transfer_s(num_bytes_down, kind.downlink_bytes_per_s, kind.latency_s)
        + transfer_s(num_bytes_up, kind.uplink_bytes_per_s, kind.latency_s),
    )


def true_bound(
    clients: tuple[ClientLoad, ...],
    totals: Mapping[str, int],
    *,
    min_load: float,
    max_load: float,
    sharing_mode: str,
    assigner: LoadAssigner | None = None,
) -> TrueBound:
    """The bound of a round that trained `totals`, with the same floors and ceilings; tasks that stay whole only.

    Raises:
        StrategyError: the bounds do not allow the totals.
    """
    problem = LoadProblem(
        clients=clients, totals=totals, min_load=min_load, max_load=max_load, sharing_mode=sharing_mode
    )
    best = (assigner or LinearProgramAssigner()).assign(problem)
    busy_s = [
        client.finish_s(best.loads[client.client], sharing_mode) for client in clients if client.client in best.loads
    ]
    idle = 1.0 - sum(busy_s) / (len(busy_s) * best.plan_s) if best.plan_s > 0 else 0.0
    return TrueBound(bound_s=best.bound_s, optimum_s=best.plan_s, idle_fraction=idle)
