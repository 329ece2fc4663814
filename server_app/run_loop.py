"""A run from the first client to the last round: join and profile; then train, aggregate, evaluate and record."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gpu_runtime.contracts import ContractError, Profile, Report, SplitAccess, from_json, one_line, to_json
from gpu_runtime.source import source_hash
from server_app.checkpoint import save_weights
from server_app.evaluation import BestWeights, Evaluator
from server_app.exchange import Exchange, NoClientsError, exchange, wait_for_nodes
from server_app.history import RunHistory
from server_app.settings import Settings
from strategies.base import MAX_REASONS, MultiTaskStrategy, RoundRecord, StrategyError
from strategies.error_reply import error_line
from strategies.profile_checks import read_profile, without_namesakes
from tasks.errors import TaskError

log = logging.getLogger("flwr.paceline")


def run(
    grid: Grid, settings: Settings, strategy: MultiTaskStrategy, evaluator: Evaluator, history: RunHistory
) -> ArrayRecord:
    """Train for `settings.run.rounds` rounds and return the last weights.

    Raises:
        NoClientsError: nobody joined, nobody answered the profile query, or nobody holds an example.
        RuntimeError: a round in which not a single client trained.
        TaskError: a task that cannot be evaluated before round 1, or no task that can be after it.
    """
    evaluator.load()
    nodes = wait_for_nodes(grid, settings.run.min_clients, settings.run.join_timeout_s)
    history.event("joined", clients=len(nodes))
    access = strategy.split_access
    profiles, left_out = query_profiles(grid, nodes, settings.run.profile_timeout_s, history, access)
    history.event("profiled", clients=sorted(profile.client for profile in profiles.values()))
    try:
        strategy.prepare(profiles)
    except StrategyError as error:
        raise StrategyError("; ".join([str(error), *left_out[:MAX_REASONS]])) from error

    arrays = _record(evaluator.initial_arrays(settings.data.seed))
    best = BestWeights(evaluator.tasks)
    for server_round in range(1, settings.run.rounds + 1):
        history.event("round", round=server_round, rounds=settings.run.rounds)
        arrays = _one_round(server_round, arrays, grid, settings, strategy, evaluator, best, history)
    return arrays


def query_profiles(
    grid: Grid, nodes: Iterable[int], timeout_s: float, history: RunHistory, access: SplitAccess | None = None
) -> tuple[dict[int, Profile], list[str]]:
    """Ask all nodes for their profile, and to measure their link to the split service where there is one (`access`).

    Those without a usable one are left out.

    Returns:
        Profiles by node id, and a line on each node left out, which the history has too.

    Raises:
        NoClientsError: not one usable profile.
    """
    split = {"split": to_json(access)} if access is not None else {}
    messages = [
        Message(RecordDict({"config": ConfigRecord({"measure": True, **split})}), node, "query.profile")
        for node in nodes
    ]
    answers = exchange(grid, messages, timeout_s)
    found: dict[int, Profile] = {}
    left_out: list[str] = []
    for reply in answers.replies:
        node = reply.metadata.src_node_id
        try:
            if reply.has_error():
                raise ContractError(f"no profile: {error_line(reply)}")
            found[node] = read_profile(reply)
        except ContractError as error:
            left_out.append(one_line(f"node {node} takes no part: {error}"))
    left_out += [f"node {node} takes no part: no profile within {timeout_s:g} s" for node in answers.missing]
    profiles, notes = without_namesakes(found)
    left_out += notes
    for note in left_out:
        history.note(note)
    if not profiles:
        raise NoClientsError("no client sent a usable profile: " + "; ".join(left_out[:MAX_REASONS]))
    for profile in profiles.values():
        for fault in profile.errors:
            history.note(one_line(f"client {profile.client}: {fault}"))
        if profile.source_hash and profile.source_hash != source_hash():
            history.note(
                f"client {profile.client} runs another version of the program than the server; "
                "start the SuperLink from a neutral directory or update the node"
            )
    return profiles, left_out


def _one_round(
    server_round: int,
    arrays: ArrayRecord,
    grid: Grid,
    settings: Settings,
    strategy: MultiTaskStrategy,
    evaluator: Evaluator,
    best: BestWeights,
    history: RunHistory,
) -> ArrayRecord:
    messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))
    for client in strategy.at_their_limit():
        history.note(
            f"client {client} may be idle: it can be given no more than strategy.max-load "
            f"({settings.strategy.max_load:g}) times the examples it holds"
        )
    answers = exchange(grid, messages, settings.run.round_timeout_s)
    _count(history, answers)
    trained, _ = strategy.aggregate_train(server_round, answers.replies)
    record = strategy.round_record()
    if trained is None:
        _warn(record)
        raise RuntimeError(f"round {server_round}: no client trained anything: " + "; ".join(record.refused[:3]))
    arrays = trained
    weights = to_numpy(arrays)
    scores = evaluator.scores(weights)
    faults = tuple(f"task {task!r}: no score: {score.error}" for task, score in scores.items() if score.error)
    if server_round == 1 and len(faults) == len(scores):
        raise TaskError("; ".join(faults))
    record = replace(record, refused=(*record.refused, *faults))
    best.update(server_round, weights, scores)
    folder = history.folder / "checkpoint"
    save_weights(folder, "last", weights, {"round": server_round})
    save_weights(folder, "best", best.arrays, {"rounds": best.rounds, "metrics": best.values})
    client_metrics = _client_evaluation(server_round, arrays, grid, settings, strategy, history)
    record = replace(record, refused=(*record.refused, *strategy.evaluation_notes))
    _warn(record)
    history.add_round(record, scores, _reports(answers.replies), client_metrics)
    return arrays


def _warn(record: RoundRecord) -> None:
    for text in record.refused:
        log.warning("round %d: %s", record.server_round, text)


def _client_evaluation(
    server_round: int,
    arrays: ArrayRecord,
    grid: Grid,
    settings: Settings,
    strategy: MultiTaskStrategy,
    history: RunHistory,
) -> dict[str, float]:
    """Means over the clients of `<task>/<metric>` on their own examples; empty unless the strategy asks for it."""
    messages = list(strategy.configure_evaluate(server_round, arrays, ConfigRecord(), grid))
    if not messages:
        return {}
    answers = exchange(grid, messages, settings.run.round_timeout_s)
    _count(history, answers)
    metrics = strategy.aggregate_evaluate(server_round, answers.replies)
    return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}


def to_numpy(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Arrays by key."""
    return {key: array.numpy() for key, array in arrays.items()}


def _record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({key: Array(value) for key, value in arrays.items()})


def _count(history: RunHistory, answers: Exchange) -> None:
    history.bytes_down += answers.bytes_down
    history.bytes_up += answers.bytes_up


def _reports(replies: Iterable[Message]) -> list[Report]:
    """The readable reports of a round; the strategy has already named the others."""
    found = []
    for reply in replies:
        try:
            found.append(from_json(Report, str(reply.content.config_records["report"]["json"])))
        except (ContractError, KeyError, ValueError):
            continue
    return found
