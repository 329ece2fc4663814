"""Rounds with split tasks: who is split how, what is sent, and how halves become whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from gpu_runtime.contracts import (
    BlockCost,
    Plan,
    Profile,
    Report,
    SplitAccess,
    SplitReport,
    TaskCost,
    TaskProfile,
    TaskReport,
    from_json,
    to_json,
)
from gpu_runtime.pipeline.halves import ServerHalf
from strategies.base import MultiTaskStrategy
from strategies.options import StrategyOptions
from strategies.registry import build
from strategies.server_stages import ServerStageSource, StageError
from strategies.split_plan import SplitService
from strategies.split_settings import SplitSettings
from tests.in_process_grid import InProcessGrid

ACCESS = SplitAccess(address="127.0.0.1:1", run="1", token="secret")
DEVICE_KEY, SERVER_KEYS = "blue/blocks.first.w", ("blue/blocks.second.w", "blue/blocks.third.w")
KEYS = (DEVICE_KEY, *SERVER_KEYS)
BATCH = 10


def cost(seconds: float, num_blocks: int = 3) -> TaskCost:
    """Of blocks that take the same, with 1000 bytes at each boundary."""
    block = BlockCost(forward_s=seconds / 3, backward_s=2 * seconds / 3, boundary_bytes=1000)
    return TaskCost(
        demand=1.0,
        solo_cost_s=num_blocks * seconds,
        speed_curve=((1.0, 1.0),),
        blocks=(block,) * num_blocks,
    )


@dataclass
class Stages(ServerStageSource):
    """Halves as tests want them; what was opened is noted."""

    opened: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    halves: dict[str, ServerHalf] = field(default_factory=dict)
    fault: str = ""

    def open_round(self, server_round: int, attempt: int, arrays: Mapping[str, Any]) -> None:
        if self.fault:
            raise StageError(self.fault)
        self.opened.append((server_round, attempt, tuple(arrays)))

    def collect(self, server_round: int, client: str, task: str, attempt: int) -> ServerHalf:
        if client not in self.halves:
            raise StageError("has no trained half here")
        return self.halves[client]


@dataclass
class SplitClient:
    """Adds 1 to all it trains; of a split task it sends the device's half and leaves the other with `stages`."""

    profile: Profile
    stages: Stages
    falls_back: bool = False
    device_s: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    received: list[tuple[str, ...]] = field(default_factory=list)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context) -> Message:
        plan = from_json(Plan, str(message.content.config_records["config"]["plan"]))
        self.plans.append(plan)
        sent = message.content.array_records["arrays"]
        self.received.append(tuple(sent))
        (task,) = plan.tasks
        steps = -(-task.num_examples // BATCH)
        is_split = task.split_point is not None and not self.falls_back
        arrays = {key: sent[key].numpy() + 1 for key in sent}
        if is_split:
            server = {key: arrays.pop(key, np.ones(2, np.float32)) for key in SERVER_KEYS[task.split_point - 1 :]}
            half = {key.partition("/")[2]: value for key, value in server.items()}
            self.stages.halves[plan.client] = ServerHalf(arrays=half, num_steps=steps, num_examples=task.num_examples)
        split = SplitReport(
            split_point=task.split_point or 0,
            micro_batches=task.micro_batches,
            encoding=task.encoding,
            device_s=self.device_s,
            **self.rates,
        )
        entry = TaskReport(
            task="blue",
            num_examples=task.num_examples,
            num_steps=steps,
            seconds=1.0,
            mean_loss=1.0,
            split=split if is_split else None,
        )
        report = Report(
            client=plan.client,
            server_round=plan.server_round,
            attempt=plan.attempt,
            seconds=1.0,
            clock="virtual",
            tasks=(replace(entry, **self.changes),),
        )
        content = RecordDict(
            {
                "arrays": ArrayRecord({key: Array(value) for key, value in arrays.items()}),
                "metrics": MetricRecord({"num-examples": task.num_examples}),
                "report": ConfigRecord({"json": to_json(report)}),
            }
        )
        return Message(content, reply_to=message)


@dataclass
class Match:
    """A strategy with the split service, and two clients: `slow` has a fast link, `quick` a fast device."""

    strategy: MultiTaskStrategy
    grid: InProcessGrid
    stages: Stages
    clients: Mapping[str, SplitClient]
    arrays: ArrayRecord

    def play(self, server_round: int) -> Mapping[str, np.ndarray]:
        messages = list(self.strategy.configure_train(server_round, self.arrays, ConfigRecord(), self.grid))
        arrays, _ = self.strategy.aggregate_train(server_round, list(self.grid.send_and_receive(messages)))
        self.arrays = arrays or self.arrays
        return {key: array.numpy() for key, array in self.arrays.items()}

    @property
    def refused(self) -> str:
        return "; ".join(self.strategy.round_record().refused)

    def points(self, index: int = -1) -> dict[str, int | None]:
        return {name: client.plans[index].tasks[0].split_point for name, client in self.clients.items()}


def new_match(
    *,
    name: str = "arch-sync",
    access: SplitAccess = ACCESS,
    server: TaskCost | None = None,
    unsplittable: str = "",
    **settings: Any,
) -> Match:
    stages = Stages()

    def client(name: str, seconds: float, rate: float) -> SplitClient:
        task = TaskProfile(
            task="blue", num_examples=100, batch_size=BATCH, cost=cost(seconds), unsplittable=unsplittable
        )
        profile = Profile(
            client=name,
            device="cpu",
            num_cores=2,
            clock="virtual",
            tasks=(task,),
            uplink_bytes_per_s=rate,
            downlink_bytes_per_s=rate,
        )
        return SplitClient(profile, stages)

    clients = {"slow": client("slow", 0.1, 1e6), "quick": client("quick", 0.02, 1e4)}
    grid = InProcessGrid(list(clients.values()))
    strategy = build(StrategyOptions(name=name), ("blue",))
    strategy.prepare(dict(zip(grid.node_ids, (each.profile for each in clients.values()), strict=True)))
    service = SplitService(
        access=access,
        stages=stages,
        costs={"blue": server or cost(0.0001)},
        block_names={"blue": ("first", "second", "third")},
    )
    strategy.use_split(service, SplitSettings(**{"mode": "auto", **settings}))
    arrays = ArrayRecord({key: Array(np.zeros(2, np.float32)) for key in KEYS})
    return Match(strategy=strategy, grid=grid, stages=stages, clients=clients, arrays=arrays)


@pytest.mark.parametrize("name", ["arch-sync", "fedavg"])
def test_only_those_are_split_whom_it_makes_faster(name: str) -> None:
    """0.1 s a block and example: cut after the first of three. 0.02 s, and 0.1 s on the link: whole."""
    match = new_match(name=name)
    weights = match.play(1)
    assert match.points() == {"slow": 1, "quick": None}
    assert match.clients["slow"].plans[0].split == ACCESS
    assert match.clients["quick"].plans[0].split is None
    assert match.stages.opened == [(1, 0, KEYS)]
    for key in KEYS:
        np.testing.assert_allclose(weights[key], 1.0)
    record = match.strategy.round_record()
    assert not record.refused
    assert record.clients["slow"].tasks["blue"].split is not None
    assert record.clients["quick"].tasks["blue"].split is None


def test_a_split_client_is_given_more_to_do() -> None:
    """The slow device is three times as fast with a third of the model: its load rises accordingly."""
    whole, split = new_match(mode="auto", server=cost(10.0)), new_match(mode="auto")
    whole.play(1)
    split.play(1)
    loads = [match.clients["slow"].plans[0].tasks[0].num_examples for match in (whole, split)]
    assert whole.points()["slow"] is None
    assert loads[1] > 2 * loads[0]


def test_all_are_split_where_the_settings_say_so() -> None:
    match = new_match(mode="on", point=2, micro_batches=5, encoding="fp16")
    match.play(1)
    assert match.points() == {"slow": 2, "quick": 2}
    task = match.clients["quick"].plans[0].tasks[0]
    assert (task.micro_batches, task.encoding) == (5, "fp16")


def test_without_fallback_the_other_half_is_not_sent() -> None:
    match = new_match(mode="on", point=1, access=replace(ACCESS, fallback=False))
    weights = match.play(1)
    assert match.clients["slow"].received == [(DEVICE_KEY,)]
    assert set(weights) == set(KEYS)
    assert not match.refused


def test_what_cannot_be_split_is_trained_whole_and_said() -> None:
    match = new_match(mode="on", unsplittable="it has batch statistics")
    match.play(1)
    assert match.points() == {"slow": None, "quick": None}
    assert "task 'blue' is not split: it has batch statistics" in match.refused


def test_a_service_that_cannot_be_had_costs_nothing_but_speed() -> None:
    match = new_match()
    match.stages.fault = "the edge server does not answer"
    match.play(1)
    assert match.points() == {"slow": None, "quick": None}
    assert "nothing is split this round: the edge server does not answer" in match.refused


def test_a_client_whose_link_fails_is_left_whole_for_longer_each_time() -> None:
    match = new_match()
    match.clients["slow"].falls_back = True
    points = []
    for server_round in range(1, 9):
        weights = match.play(server_round)
        points.append(match.points()["slow"])
        np.testing.assert_allclose(weights[DEVICE_KEY], server_round)
    assert points == [1, None, 1, None, None, 1, None, None]
    match.clients["slow"].falls_back = False
    for server_round in (9, 10, 11, 12):
        match.play(server_round)
    assert match.points()["slow"] == 1


def test_measured_rates_decide_the_next_round() -> None:
    """The link turns out a thousand times slower than its profile says: training whole is faster then."""
    match = new_match()
    match.clients["slow"].rates = {"uplink_bytes_per_s": 1e3, "downlink_bytes_per_s": 1e3}
    match.play(1)
    match.play(2)
    assert match.points(0)["slow"] == 1
    assert match.points(1)["slow"] is None


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-300, 1e-12, 1e300])
def test_reports_of_nonsense_end_no_run(value: float) -> None:
    match = new_match(mode="on")
    match.clients["slow"].rates = dict.fromkeys(("uplink_bytes_per_s", "downlink_bytes_per_s", "latency_s"), value)
    match.clients["slow"].device_s = value
    before = match.strategy.book.link_of("slow")
    for server_round in (1, 2, 3):
        match.play(server_round)
        assert set(match.strategy.round_record().clients) == {"slow", "quick"}
    assert match.strategy.book.link_of("slow").uplink_bytes_per_s == before.uplink_bytes_per_s


def test_a_client_whose_steps_would_take_for_ever_trains_whole() -> None:
    match = new_match(mode="on")
    slow = match.clients["slow"].profile
    (task,) = slow.tasks
    assert task.cost is not None
    blocks = tuple(replace(block, boundary_bytes=10**12) for block in task.cost.blocks)
    slow = replace(slow, uplink_bytes_per_s=1.0, tasks=(replace(task, cost=replace(task.cost, blocks=blocks)),))
    match.strategy.book.enter([slow, match.clients["quick"].profile])
    match.play(1)
    assert match.points()["slow"] is None
    assert match.points()["quick"] is not None
    assert "task 'blue' of client 'slow' is not split: a step would take 1e+13 s" in match.refused


def test_work_of_the_device_corrects_its_cost() -> None:
    match = new_match(mode="on", point=1)
    slow = match.clients["slow"]
    match.play(1)
    expected_s = 0.1 * slow.plans[0].tasks[0].num_examples
    before = match.strategy.book.cost_of("slow", "blue")
    for server_round in (2, 3, 4):
        slow.device_s = 1.5 * 0.1 * slow.plans[-1].tasks[0].num_examples
        match.play(server_round)
    after = match.strategy.book.cost_of("slow", "blue")
    assert expected_s > 0
    assert before is not None
    assert after is not None
    assert 1.2 < after.solo_cost_s / before.solo_cost_s < 1.6


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"split": SplitReport(split_point=2, micro_batches=1, encoding="fp32")}, "split its model at 2, not at 1"),
        ({"num_examples": 20, "num_steps": 2}, "its half was trained for 2 steps, the split service's for 4"),
        ({"num_examples": 31, "num_steps": 4}, "its half was trained for 31 examples, the split service's for 3"),
    ],
)
def test_halves_that_do_not_belong_together_are_refused(changes: Mapping[str, Any], complaint: str) -> None:
    match = new_match()
    match.clients["slow"].changes = changes
    weights = match.play(1)
    assert complaint in match.refused
    np.testing.assert_allclose(weights[DEVICE_KEY], 1.0)  # of the other client


def test_a_half_that_nobody_has_is_refused() -> None:
    match = new_match()
    slow = match.clients["slow"]
    slow.stages = Stages()  # another service than the strategy's
    match.play(1)
    assert "client 'slow', task 'blue': the split service has no other half: has no trained half here" in match.refused


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("blocks.second.w", np.full(2, np.nan, np.float32), "holds 2 values that are not finite"),
        ("blocks.second.w", np.ones(3, np.float32), r"has shape (3,) instead of (2,)"),
        ("blocks.first.w", np.ones(2, np.float32), "came from the client and from the split service"),
    ],
)
def test_the_services_half_is_checked_like_the_clients(name: str, value: np.ndarray, complaint: str) -> None:
    match = new_match()

    class Bent(Stages):
        def collect(self, server_round: int, client: str, task: str, attempt: int) -> ServerHalf:
            half = match.stages.halves[client]
            return replace(half, arrays={**half.arrays, name: value})

    assert match.strategy._split is not None
    match.strategy._split.service = replace(match.strategy._split.service, stages=Bent())
    match.play(1)
    assert complaint in match.refused


def test_half_a_model_where_a_whole_one_was_asked_is_refused() -> None:
    match = new_match()
    match.clients["quick"].changes = {"split": SplitReport(split_point=1, micro_batches=1, encoding="fp32")}
    match.play(1)
    assert "client 'quick', task 'blue': reports half of a model where a whole one was asked" in match.refused
