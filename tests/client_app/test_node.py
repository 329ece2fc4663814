"""What a node holds: a fleet's word first, then the node's own config."""

from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_app.node import held_tasks, holdings
from gpu_runtime.contracts import ContractError, Holding, NodeHoldings, Partition, to_json
from gpu_runtime.settings import SettingsError
from tasks.errors import TaskError
from tasks.settings import DataSettings
from tests.in_process_grid import set_task_identity

DATA = DataSettings(suite="driving")


def asked(record: ConfigRecord | None = None, **node_config: Any) -> tuple[Message, Context]:
    set_task_identity()
    content = RecordDict({"holdings": record} if record is not None else {})
    config = {key.replace("_", "-"): value for key, value in node_config.items()}
    context = Context(run_id=1, node_id=77, node_config=config, state=RecordDict(), run_config={})
    return Message(content, 77, "train"), context


def test_a_bare_node_holds_every_task_and_all_of_its_data() -> None:
    node = holdings(*asked(), DATA)
    assert node.client == "77"
    assert node.holdings == tuple(
        Holding(ref=ref, partition=Partition()) for ref in ("digits", "detection", "segmentation")
    )


def test_node_config_names_the_node_its_tasks_and_its_part() -> None:
    node = holdings(*asked(name="site-a", tasks="segmentation, digits", partition_id=1, num_partitions=3), DATA)
    assert node.client == "site-a"
    assert [holding.ref for holding in node.holdings] == ["segmentation", "digits"]
    assert node.holdings[0].partition == Partition(index=1, count=3)


def test_the_data_directory_of_the_node_goes_before_that_of_the_run() -> None:
    message, context = asked(data_dir="on-this-node")
    held = held_tasks(holdings(message, context, DATA), context, DATA)
    assert {task.data.directory for task in held} == {"on-this-node"}


def test_a_fleets_word_goes_before_the_node_config() -> None:
    told = NodeHoldings(client="laptop", holdings=(Holding(ref="digits", partition=Partition(index=2, count=4)),))
    assert holdings(*asked(ConfigRecord({"json": to_json(told)}), name="x", tasks="segmentation"), DATA) == told


@pytest.mark.parametrize(
    "config", [{"partition_id": 3, "num_partitions": 3}, {"partition_id": "0"}, {"partition_id": -1}]
)
def test_a_partition_that_does_not_exist_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="partition-id must be a whole number"):
        holdings(*asked(**config), DATA)


def test_an_unknown_task_in_the_node_config_is_refused() -> None:
    with pytest.raises(TaskError, match="digits"):
        holdings(*asked(tasks="digit"), DATA)


def test_broken_holdings_are_refused() -> None:
    with pytest.raises(ContractError, match="not JSON"):
        holdings(*asked(ConfigRecord({"json": "{"})), DATA)
