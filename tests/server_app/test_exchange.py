"""Waiting for nodes and replies: every wait ends, and error replies carry the node that was asked."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from server_app.exchange import NoClientsError, WorkersDiedError, exchange, wait_for_nodes
from strategies.error_reply import WORKER_DIED
from tests.in_process_grid import InProcessGrid


def echo(message: Message, context: Context) -> Message:
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def messages_for(grid: InProcessGrid) -> list[Message]:
    arrays = ArrayRecord([np.zeros(10, dtype=np.float32)])
    return [
        Message(RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})}), node, "train")
        for node in grid.node_ids
    ]


def test_all_replies_end_the_wait() -> None:
    grid = InProcessGrid(echo, 3, shuffle=True)
    answers = exchange(grid, messages_for(grid), timeout_s=60)
    assert sorted(reply.metadata.src_node_id for reply in answers.replies) == sorted(grid.node_ids)
    assert answers.missing == ()
    assert answers.bytes_down == answers.bytes_up >= 3 * 40


def test_a_silent_node_is_missing_after_the_deadline() -> None:
    grid = InProcessGrid(echo, 3)
    grid.fail_at(1, 1, "silent")
    answers = exchange(grid, messages_for(grid), timeout_s=0.3)
    assert answers.missing == (grid.node_ids[1],)
    assert len(answers.replies) == 2


def test_an_error_of_flowers_own_is_given_its_node() -> None:
    grid = InProcessGrid(echo, 3)
    grid.fail_at(1, 2, "unavailable")
    answers = exchange(grid, messages_for(grid), timeout_s=60)
    (error,) = (reply for reply in answers.replies if reply.has_error())
    assert error.metadata.src_node_id == grid.node_ids[2]


def test_no_messages_no_wait() -> None:
    assert exchange(InProcessGrid(echo, 1), [], timeout_s=60).replies == ()


def test_too_few_nodes_is_an_error_with_a_remedy() -> None:
    with pytest.raises(NoClientsError, match=r"2 of at least 3 clients joined within 0\.2 s; start more SuperNodes"):
        wait_for_nodes(InProcessGrid(echo, 2), 3, timeout_s=0.2)


def dead(message: Message, context: Context) -> Message:
    reason = "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.'>"
    return Message(Error(0, reason), reply_to=message)


def broken(message: Message, context: Context) -> Message:
    return Message(Error(2, "boom"), reply_to=message)


def test_a_round_whose_workers_have_all_died_ends_the_run_with_that_cause() -> None:
    grid = InProcessGrid([dead, dead, broken])
    with pytest.raises(WorkersDiedError) as caught:
        exchange(grid, messages_for(grid), timeout_s=60)
    assert str(caught.value).startswith(WORKER_DIED)


@pytest.mark.parametrize("nodes", [[dead, echo], [broken, broken]])
def test_a_round_that_somebody_answers_or_nobody_died_in_goes_on(nodes: list[Any]) -> None:
    grid = InProcessGrid(nodes)
    assert len(exchange(grid, messages_for(grid), timeout_s=60).replies) == 2


def test_evaluation_may_be_missed() -> None:
    grid = InProcessGrid(dead, 2)
    messages = [Message(RecordDict(), node, "evaluate") for node in grid.node_ids]
    assert len(exchange(grid, messages, timeout_s=60).replies) == 2
