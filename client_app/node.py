"""What this node is and holds: from the message of a simulated fleet, or from the node's own config."""

from __future__ import annotations

from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message

from gpu_runtime.contracts import HeldTask, Holding, NodeHoldings, Partition, from_json
from gpu_runtime.settings import SettingsError
from tasks.registry import task_refs
from tasks.settings import DataSettings


def node_name(context: Context) -> str:
    """`name` of the node config, else its partition-id, else its node id."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def holdings(message: Message, context: Context, data: DataSettings) -> NodeHoldings:
    """The tasks of this node and its part of their data.

    A fleet's word in the message comes first. A node without one reads `tasks` (comma-separated, default all tasks
    of the run), `partition-id` and `num-partitions` (default: the data here is all its own) from its node config.

    Raises:
        SettingsError: the node config names a partition that does not exist.
    """
    record = message.content.get("holdings")
    if isinstance(record, ConfigRecord):
        return from_json(NodeHoldings, str(record["json"]))
    config = context.node_config
    index, count = config.get("partition-id", 0), config.get("num-partitions", 1)
    if type(index) is not int or type(count) is not int or not 0 <= index < count:
        raise SettingsError(
            [
                "node config: partition-id must be a whole number from 0 to num-partitions - 1, "
                f"got {index!r} of {count!r}"
            ]
        )
    refs = task_refs(data.suite, str(config.get("tasks", data.tasks)))
    partition = Partition(index=index, count=count)
    return NodeHoldings(
        client=node_name(context), holdings=tuple(Holding(ref=ref, partition=partition) for ref in refs)
    )


def held_tasks(node: NodeHoldings, context: Context, data: DataSettings) -> list[HeldTask]:
    """References and data of the tasks of this node; `data-dir` of the node config overrides the run's directory."""
    if "data-dir" in context.node_config:
        data = replace(data, directory=str(context.node_config["data-dir"]))
    return [HeldTask(ref=holding.ref, data=data.spec(holding.partition)) for holding in node.holdings]
