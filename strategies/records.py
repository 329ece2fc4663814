"""What happened in one round, for history and reports. Plain data: `dataclasses.asdict` gives JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_runtime.contracts import SplitReport

# Outcomes of a client or task beside those of `gpu_runtime.contracts` ("trained", "failed", "cancelled").
PARTIAL = "partial"  # a client some of whose tasks were accepted and some not
REFUSED = "refused"  # a reply that came and failed its checks
LOST = "lost"  # no reply


@dataclass(frozen=True, kw_only=True)
class ClientTaskRecord:
    """One task of one client. `seconds` is when it finished, counted from the start of the client's round.

    `split` is how it was split; None where the client trained the whole model.
    """

    examples: int = 0
    steps: int = 0
    share: float | None = None
    seconds: float = 0.0
    loss: float | None = None
    outcome: str = LOST
    error: str = ""
    split: SplitReport | None = None


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """One client that was given work. `busy_s` is its makespan as reported, 0 when no report was accepted.

    `backend` is what its lanes were made of; `notes` say what did not go as planned there and was overcome.
    """

    busy_s: float = 0.0
    outcome: str = LOST
    error: str = ""
    backend: str = ""
    notes: tuple[str, ...] = ()
    tasks: Mapping[str, ClientTaskRecord] = field(default_factory=dict)

    def idle_fraction(self, makespan_s: float) -> float:
        """Part of a round of `makespan_s` that this client did not work."""
        return 1.0 - self.busy_s / makespan_s if makespan_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One aggregated round.

    `makespan_s` is reported, `plan_s` was expected of the loads sent, `bound_s` is the least any loads of the same
    totals could take by the profiles known before the round; both None where no cost is known. `clients` holds every
    client that was given work, by name. `refused` names in one line each what was not used.
    """

    server_round: int
    makespan_s: float
    plan_s: float | None
    bound_s: float | None
    idle_fraction: float
    clients: Mapping[str, ClientRecord]
    refused: tuple[str, ...]
    clock: str


def idle_fraction(clients: Mapping[str, ClientRecord], makespan_s: float) -> float:
    """1 - sum(busy) / (number of clients * makespan); 0 for a round without work."""
    if not clients or makespan_s <= 0:
        return 0.0
    return 1.0 - sum(client.busy_s for client in clients.values()) / (len(clients) * makespan_s)
