"""The grid these tests stand on: real ClientApps, state per node, errors as Flower makes them."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from tests.in_process_grid import NODE_UNAVAILABLE, SERVER_NODE, InProcessGrid

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Counts its calls; raises on the second."""
    calls = context.state.config_records.setdefault("calls", ConfigRecord({"number": 0}))
    calls["number"] = int(calls["number"]) + 1
    if calls["number"] == 2:
        raise ValueError("second call")
    return Message(RecordDict({"calls": calls, "node": ConfigRecord(dict(context.node_config))}), reply_to=message)


def ask(grid: InProcessGrid) -> list[Message]:
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in grid.node_ids]
    return list(grid.send_and_receive(messages))


def test_client_apps_answer_and_keep_state_and_raise_error_replies() -> None:
    grid = InProcessGrid(app, num_nodes=3, seed=1)
    first, second, third = ask(grid), ask(grid), ask(grid)
    assert [reply.content.config_records["node"]["partition-id"] for reply in first] == [0, 1, 2]
    assert [reply.metadata.src_node_id for reply in first] == grid.node_ids
    assert all(reply.has_error() and "second call" in str(reply.error.reason) for reply in second)
    assert [reply.content.config_records["calls"]["number"] for reply in third] == [3, 3, 3]


def test_a_node_that_left_is_answered_for_by_flower() -> None:
    grid = InProcessGrid(app, num_nodes=2)
    grid.remove(1)
    assert list(grid.get_node_ids()) == grid.node_ids[:1]
    _, gone = ask(grid)
    assert gone.error.code == NODE_UNAVAILABLE
    assert gone.metadata.src_node_id == SERVER_NODE
    assert gone.metadata.reply_to_message_id == grid.sent[1].metadata.message_id


def test_replies_are_shuffled_by_seed() -> None:
    orders = set()
    for seed in range(8):
        grid = InProcessGrid(app, num_nodes=4, seed=seed, shuffle=True)
        orders.add(tuple(reply.content.config_records["node"]["partition-id"] for reply in ask(grid)))
    assert len(orders) > 3
