"""Answers to the server's messages. Records in, records out; all work is done by `gpu_runtime.runtime`."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cache

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from client_app.node import held_tasks, holdings, node_name
from gpu_runtime.contracts import Plan, Profile, SplitAccess, TaskPlan, from_json, to_json
from gpu_runtime.runtime import EmbeddedRuntime, EvaluationError, Runtime
from gpu_runtime.settings import SettingsError, SharingSettings, parse
from gpu_runtime.source import source_hash
from tasks.settings import DataSettings, TrainingSettings

log = logging.getLogger("paceline.client")


@cache
def _runtime(sharing: SharingSettings) -> Runtime:
    """One runtime for all messages of this process. In a simulation the process serves many clients and runs."""
    return EmbeddedRuntime(sharing=sharing)


def _settings(context: Context) -> tuple[DataSettings, SharingSettings, TrainingSettings]:
    faults: list[str] = []
    data, sharing, training = parse(context.run_config, [DataSettings, SharingSettings, TrainingSettings], faults)
    if faults:
        raise SettingsError(faults)
    return data, sharing, training


def identity(message: Message, context: Context) -> Message:
    """Partition (-1 where the node config has none), number of partitions (0 likewise) and name."""
    config = context.node_config
    record = ConfigRecord(
        {
            "partition-id": int(config.get("partition-id", -1)),
            "num-partitions": int(config.get("num-partitions", 0)),
            "name": node_name(context),
        }
    )
    return Message(RecordDict({"identity": record}), reply_to=message)


def profile(message: Message, context: Context) -> Message:
    """The node's Profile; costs are measured unless the message says `measure = false`.

    Where it says how to reach a split service (`split`), the link to it is measured too.
    """
    data, sharing, _ = _settings(context)
    node = holdings(message, context, data)
    config = _config(message)
    found = _runtime(sharing).profile(
        node.client,
        held_tasks(node, context, data),
        measure=bool(config.get("measure", True)),
        access=from_json(SplitAccess, str(config["split"])) if "split" in config else None,
        emulation=node.emulation,
    )
    found = replace(found, source_hash=source_hash())
    return Message(RecordDict({"profile": ConfigRecord({"json": to_json(found)})}), reply_to=message)


def train(message: Message, context: Context) -> Message:
    """Train by the plan of the message, or, without one, on what the node holds for `local-epochs`."""
    data, sharing, training = _settings(context)
    node = holdings(message, context, data)
    held = held_tasks(node, context, data)
    runtime = _runtime(sharing)
    config = _config(message)
    if "plan" in config:
        plan = from_json(Plan, str(config["plan"]))
    else:
        inventory = runtime.profile(node.client, held, measure=False)
        plan = _own_plan(inventory, config, data.seed, sharing, training)
    result = runtime.train(plan, _arrays(message), held, node.emulation)
    num_examples = sum(task.num_examples for task in result.report.tasks if task.outcome == "trained")
    content = RecordDict(
        {
            "arrays": ArrayRecord({key: Array(value) for key, value in result.arrays.items()}),
            "metrics": MetricRecord({"num-examples": num_examples}),
            "report": ConfigRecord({"json": to_json(result.report)}),
        }
    )
    return Message(content, reply_to=message)


def evaluate(message: Message, context: Context) -> Message:
    """Loss and metrics of each task on the node's own training examples."""
    data, sharing, _ = _settings(context)
    node = holdings(message, context, data)
    held = held_tasks(node, context, data)
    metrics: dict[str, int | float | list[int] | list[float]] = {}
    num_examples = 0
    try:
        results = _runtime(sharing).evaluate(_arrays(message), held, split="train")
    except EvaluationError as error:
        log.error("%s", error)
        results = error.results
    for task, values in results.items():
        num_examples += int(values["num-examples"])
        for name, value in values.items():
            metrics[f"{task}/{name}"] = int(value) if name == "num-examples" else float(value)
    metrics["num-examples"] = num_examples
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def _config(message: Message) -> ConfigRecord:
    record = message.content.get("config")
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _arrays(message: Message) -> dict[str, np.ndarray]:
    record = message.content.get("arrays")
    if not isinstance(record, ArrayRecord):
        raise ValueError("the message has no ArrayRecord 'arrays'")
    return {key: array.numpy() for key, array in record.items()}


def _own_plan(
    inventory: Profile, config: ConfigRecord, seed: int, sharing: SharingSettings, training: TrainingSettings
) -> Plan:
    """What a node trains when the server sends no plan, as a stock Flower strategy does."""
    tasks = tuple(
        TaskPlan(
            task=task.task,
            num_examples=math.ceil(task.num_examples * training.local_epochs),
            proximal_mu=float(str(config.get("proximal-mu", 0.0))),
        )
        for task in inventory.tasks
        if task.num_examples
    )
    return Plan(
        client=inventory.client,
        server_round=int(str(config.get("server-round", 0))),
        seed=seed,
        tasks=tasks,
        sharing_mode=sharing.mode,
        deterministic=training.deterministic,
    )
