"""Asks nodes for their profiles, for a strategy that is driven by Flower's own `start`."""

from __future__ import annotations

import logging

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gpu_runtime.contracts import ContractError, Profile, from_json
from strategies.options import StrategyError

log = logging.getLogger("paceline.strategies")

TIMEOUT_S = 300.0


def query_profiles(grid: Grid, timeout_s: float = TIMEOUT_S) -> dict[int, Profile]:
    """Profiles of all connected nodes by node id; nodes without a usable answer are left out with a warning.

    Raises:
        StrategyError: no node gave a profile.
    """
    messages = [
        Message(RecordDict({"config": ConfigRecord({"measure": True})}), dst_node_id=node, message_type="query.profile")
        for node in sorted(grid.get_node_ids())
    ]
    profiles: dict[int, Profile] = {}
    for reply in grid.send_and_receive(messages, timeout=timeout_s):
        node = reply.metadata.src_node_id
        if reply.has_error():
            log.warning("node %d takes no part: no profile: error %d", node, reply.error.code)
            continue
        try:
            profiles[node] = from_json(Profile, str(reply.content.config_records["profile"]["json"]))
        except (ContractError, KeyError) as error:
            log.warning("node %d takes no part: no profile: %s", node, error)
    if not profiles:
        raise StrategyError(f"none of {len(messages)} nodes gave a profile within {timeout_s:g} s")
    return profiles
