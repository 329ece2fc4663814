"""Asks nodes for their profiles, for a strategy that is driven by Flower's own `start`."""

from __future__ import annotations

import logging

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gpu_runtime.contracts import ContractError, Profile, one_line
from strategies.options import StrategyError
from strategies.profile_checks import read_profile, without_namesakes

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
    found: dict[int, Profile] = {}
    left_out: list[str] = []
    for reply in grid.send_and_receive(messages, timeout=timeout_s):
        node = reply.metadata.src_node_id
        if reply.has_error():
            left_out.append(f"node {node} takes no part: no profile: error {reply.error.code}")
            continue
        try:
            found[node] = read_profile(reply)
        except ContractError as error:
            left_out.append(one_line(f"node {node} takes no part: {error}"))
    profiles, notes = without_namesakes(found)
    left_out += notes
    for note in left_out:
        log.warning("%s", note)
    if not profiles:
        raise StrategyError(
            "; ".join([f"none of {len(messages)} nodes gave a usable profile within {timeout_s:g} s", *left_out[:3]])
        )
    return profiles
