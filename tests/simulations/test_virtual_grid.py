"""The virtual grid around a small fake of Flower's grid whose replies arrive in any order."""

import itertools
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from gpu_runtime.contracts import (
    FAILED,
    MEASURED,
    VIRTUAL,
    NodeHoldings,
    Plan,
    Profile,
    Report,
    Span,
    TaskCost,
    TaskPlan,
    TaskProfile,
    TaskReport,
    from_json,
    to_json,
)
from simulations.fleet import Fleet, FleetError, parse_fleet
from simulations.task_costs import RecordedCosts
from simulations.virtual_grid import VirtualGrid

TASKS = ("digits", "detection")
MEASURED_COST = TaskCost(demand=0.5, solo_cost_s=0.125, speed_curve=((1.0, 1.0),))
COSTS = RecordedCosts(
    device="cpu",
    num_cores=2,
    torch="2",
    provenance="made up",
    tasks={task: TaskCost(demand=1.0, solo_cost_s=0.01, speed_curve=((1.0, 1.0),)) for task in TASKS},
)
FLEET = """
cost-error = {cost_error}
dropout = {dropout}
drift = {drift}
[[client]]
name = "fast"
speed = 4.0
fixed-s = 0.5
uplink-mbit-per-s = 8.0
[[client]]
name = "medium"
[[client]]
name = "slow"
speed = 0.5
skip-tasks = [2]
"""

Answer = Callable[[int, Message], RecordDict | Error]


class FakeGrid(Grid):
    """Answers at once by `answer(partition, message)`; hands replies out `per_pull` at a time, in shuffled order."""

    def __init__(self, answer: Answer, partitions: int = 3, shuffle: int = 0, per_pull: int = 1) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.random = random.Random(shuffle)
        self.answer = answer
        self.per_pull = per_pull
        nodes = self.random.sample(range(10, 10**9), partitions)
        self.partition_of = {node: partition for partition, node in enumerate(nodes)}
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self.ids = itertools.count(1)
        self.gone: set[int] = set()
        self.num_partitions = partitions
        self.lies: dict[int, dict[str, int]] = {}

    @property
    def run(self) -> Any:
        return None

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return self.random.sample(list(self.partition_of), len(self.partition_of))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self.ids))
            if message.metadata.dst_node_id in self.gone:
                continue
            self.sent.append(message)
            partition = self.partition_of[message.metadata.dst_node_id]
            if message.metadata.message_type == "query.identity":
                record = ConfigRecord(
                    {"partition-id": partition, "num-partitions": self.num_partitions, "name": str(partition)}
                )
                record.update(self.lies.get(partition, {}))
                answer: RecordDict | Error | None = RecordDict({"identity": record})
            else:
                answer = self.answer(partition, message)
            if answer is not None:
                self.replies.append(Message(answer, reply_to=message))  # type: ignore[call-overload]
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        ready = [reply for reply in self.replies if reply.metadata.reply_to_message_id in wanted]
        chosen = self.random.sample(ready, min(self.per_pull, len(ready)))
        self.replies = [reply for reply in self.replies if not any(reply is one for one in chosen)]
        return chosen

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def fleet(cost_error: float = 0.0, dropout: float = 0.0, drift: float = 0.0) -> Fleet:
    return parse_fleet("test", FLEET.format(cost_error=cost_error, dropout=dropout, drift=drift))


def client_app(partition: int, message: Message) -> RecordDict | Error:
    """What a well-behaved client answers; measured seconds are nonsense on purpose."""
    content = message.content.config_records
    node = from_json(NodeHoldings, str(content["holdings"]["json"]))
    refs = [holding.ref for holding in node.holdings]
    if message.metadata.message_type == "query.profile":
        cost = MEASURED_COST if content["config"]["measure"] else None
        profile = Profile(
            client=node.client,
            device="cpu",
            num_cores=2,
            clock=MEASURED,
            tasks=tuple(TaskProfile(task=ref, num_examples=100, batch_size=10, cost=cost) for ref in refs),
            memory_bytes=7,
        )
        return RecordDict({"profile": ConfigRecord({"json": to_json(profile)})})
    plan = from_json(Plan, str(content["config"]["plan"]))
    report = Report(
        client=node.client,
        server_round=plan.server_round,
        seconds=99.0,
        clock=MEASURED,
        tasks=tuple(
            TaskReport(task=task.task, num_examples=task.num_examples, num_steps=task.num_examples // 10, seconds=99.0)
            for task in plan.tasks
        ),
        spans=(Span(task="digits", lane="0", start_s=0.0, end_s=1.0),),
    )
    arrays = ArrayRecord({"digits/w": Array(np.zeros(250_000, np.float32))})
    return RecordDict(
        {
            "arrays": arrays,
            "metrics": MetricRecord({"num-examples": 1}),
            "report": ConfigRecord({"json": to_json(report), "extra": 1}),
        }
    )


def train_messages(grid: VirtualGrid, examples: int = 100, server_round: int = 1) -> list[Message]:
    messages = []
    for position, node in enumerate(grid.get_node_ids()):
        tasks = TASKS[:1] if position == 2 else TASKS
        plan = Plan(
            client="?",
            server_round=server_round,
            seed=1,
            tasks=tuple(TaskPlan(task=task, num_examples=examples, batch_size=10) for task in tasks),
        )
        config = ConfigRecord({"server-round": server_round, "plan": to_json(plan)})
        arrays = ArrayRecord({"digits/w": Array(np.zeros(4, np.float32))})
        messages.append(Message(RecordDict({"arrays": arrays, "config": config}), node, "train"))
    return messages


def virtual(answer: Answer = client_app, *, shuffle: int = 0, per_pull: int = 1, **more: Any) -> VirtualGrid:
    options = {"fleet": fleet(), "costs": COSTS, **more}
    return VirtualGrid(FakeGrid(answer, shuffle=shuffle, per_pull=per_pull), task_refs=TASKS, **options)


def collect(grid: VirtualGrid, messages: list[Message]) -> list[Message]:
    return grid.send_and_receive(messages, timeout=20)


def report_of(reply: Message) -> Report:
    return from_json(Report, str(reply.content.config_records["report"]["json"]))


def profiles_of(grid: VirtualGrid, measure: bool = True) -> list[Profile]:
    config = ConfigRecord({"measure": measure})
    messages = [Message(RecordDict({"config": config}), node, "query.profile") for node in grid.get_node_ids()]
    replies = collect(grid, messages)
    found = [from_json(Profile, str(reply.content.config_records["profile"]["json"])) for reply in replies]
    return sorted(found, key=lambda profile: profile.client)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulations.virtual_grid.POLL_S", 0.0)


# ------------------------------------------------------------------------------------------------------ who is who


def test_nodes_come_in_order_of_partition_whatever_their_ids() -> None:
    for shuffle in range(5):
        grid = virtual(shuffle=shuffle)
        fake: FakeGrid = grid._grid  # type: ignore[assignment]
        assert [fake.partition_of[node] for node in grid.get_node_ids()] == [0, 1, 2]
        grid.get_node_ids()
        assert sum(message.metadata.message_type == "query.identity" for message in fake.sent) == 3


def test_a_run_where_no_node_can_answer_ends_with_the_cause() -> None:
    grid = virtual()
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    original = fake.push_messages

    def broken(messages: Iterable[Message]) -> list[str]:
        ids = original(messages)
        fake.replies = [Message(Error(1, "cannot import\nclient_app"), reply_to=message) for message in fake.sent]
        return ids

    fake.push_messages = broken  # type: ignore[method-assign]
    with pytest.raises(FleetError, match="no node could say who it is: cannot import client_app"):
        grid.get_node_ids()


def test_a_node_that_says_nothing_is_not_waited_for_for_ever() -> None:
    grid = virtual(identity_timeout_s=0.0)
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    fake.per_pull = 0
    assert grid.get_node_ids() == []
    assert len(grid.notes) == 3
    assert all("has not said who it is within 0 s" in note for note in grid.notes)
    fake.per_pull = 3
    assert len(grid.get_node_ids()) == 3


def test_a_node_that_comes_after_the_fleet_was_dealt_out_takes_no_part(caplog: pytest.LogCaptureFixture) -> None:
    grid = virtual()
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    nodes = grid.get_node_ids()
    profiles_of(grid)
    fake.partition_of[5] = 3
    assert grid.get_node_ids() == nodes
    (note,) = grid.notes
    assert note == "node 5 takes no part: partition 3 of 3 came after the fleet was dealt out to 3 clients"
    assert note in caplog.text


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        ({"partition-id": 5_000_000}, "'2' says partition-id 5000000 of num-partitions 3"),
        ({"partition-id": 5_000_000, "num-partitions": 10_000_000}, "partition-id 5000000 and num-partitions 10000000"),
        ({"num-partitions": -3}, "num-partitions -3"),
        ({"num-partitions": 0}, "num-partitions 0"),
        ({"num-partitions": 90_000}, "it says num-partitions 90000, most nodes 3"),
        ({"partition-id": -1}, "a fleet needs simulated nodes"),
    ],
)
def test_a_node_with_an_absurd_partition_is_left_out_by_name(lie: dict[str, int], fault: str) -> None:
    for shuffle in range(4):
        grid = virtual(shuffle=shuffle)
        fake: FakeGrid = grid._grid  # type: ignore[assignment]
        fake.lies[2] = lie
        assert [fake.partition_of[node] for node in grid.get_node_ids()] == [0, 1]
        profiles_of(grid)
        (note,) = grid.notes
        (liar,) = (node for node, partition in fake.partition_of.items() if partition == 2)
        assert note.startswith(f"node {liar} takes no part: ")
        assert fault in note
        assert len(grid._clients) == 3


def test_of_two_nodes_with_one_partition_the_second_is_left_out() -> None:
    grid = virtual()
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    fake.lies[2] = {"partition-id": 1}
    assert len(grid.get_node_ids()) == 2
    assert "says partition-id 1, which another node has" in grid.notes[0]


# -------------------------------------------------------------------------------------------------------- stamping


def test_stamping_changes_no_message_even_where_messages_share_content() -> None:
    grid = virtual()
    nodes = grid.get_node_ids()
    arrays = ArrayRecord({"digits/w": Array(np.zeros(4, np.float32))})
    plan = Plan(client="?", server_round=1, seed=1, tasks=())
    shared = RecordDict({"arrays": arrays, "config": ConfigRecord({"plan": to_json(plan), "server-round": 1})})
    messages = [Message(shared, node, "train") for node in nodes]
    grid.push_messages(messages)
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    stamped = fake.sent[-3:]
    assert "holdings" not in shared
    names = [
        from_json(NodeHoldings, str(one.content.config_records["holdings"]["json"])).client
        for one in sorted(stamped, key=lambda one: fake.partition_of[one.metadata.dst_node_id])
    ]
    assert names == ["fast", "medium", "slow"]
    assert all(one.content["arrays"] is arrays for one in stamped)


def test_holdings_tell_tasks_and_parts() -> None:
    grid = virtual()
    profiles_of(grid)
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    found = {
        node.client: {holding.ref: holding.partition for holding in node.holdings}
        for node in (
            from_json(NodeHoldings, str(one.content.config_records["holdings"]["json"])) for one in fake.sent[-3:]
        )
    }
    assert set(found["slow"]) == {"digits"}
    assert (found["slow"]["digits"].index, found["slow"]["digits"].count) == (2, 3)
    assert found["medium"]["detection"].count == 2


# -------------------------------------------------------------------------------------------------------- profiles


def test_profiles_are_the_recorded_costs_over_the_speed() -> None:
    fast, medium, slow = profiles_of(virtual())
    assert fast.clock == VIRTUAL
    assert [task.task for task in slow.tasks] == ["digits"]
    assert [profile.tasks[0].cost.solo_cost_s for profile in (fast, medium, slow) if profile.tasks[0].cost] == [
        0.0025,
        0.01,
        0.02,
    ]
    assert (fast.fixed_s, fast.uplink_bytes_per_s, fast.downlink_bytes_per_s) == (0.5, 1e6, None)
    assert (fast.tasks[0].num_examples, fast.tasks[0].batch_size, fast.memory_bytes) == (100, 10, 7)


def test_hidden_errors_show_in_reports_and_not_in_profiles() -> None:
    exact, wrong = virtual(), virtual(fleet=fleet(cost_error=0.5))
    assert profiles_of(exact) == profiles_of(wrong)
    seconds = [[report_of(reply).seconds for reply in collect(grid, train_messages(grid))] for grid in (exact, wrong)]
    assert seconds[0] != pytest.approx(seconds[1])


def test_a_task_without_recorded_cost_is_measured_and_divided_by_the_speed(caplog: pytest.LogCaptureFixture) -> None:
    costs = replace(COSTS, tasks={"digits": COSTS.tasks["digits"]})
    grid = virtual(costs=costs)
    fast, medium, _ = profiles_of(grid)
    by_name = {task.task: task.cost for task in fast.tasks}
    assert by_name["digits"] == replace(COSTS.tasks["digits"], solo_cost_s=0.0025)
    assert by_name["detection"] == replace(MEASURED_COST, solo_cost_s=0.03125)
    assert medium.tasks[1].cost == MEASURED_COST
    assert len(grid.notes) == 1
    assert caplog.text.count("no recorded cost of task 'detection'") == 1


# --------------------------------------------------------------------------------------------------------- reports


def test_reports_carry_virtual_seconds_and_keep_the_rest() -> None:
    grid = virtual()
    replies = collect(grid, train_messages(grid))
    found = {report_of(reply).client: report_of(reply) for reply in replies}
    # fast: two tasks of 100 examples at 2.5 ms and demand 1, 0.5 s fixed, 1 MB up at 1 MB/s.
    assert found["fast"].seconds == pytest.approx(0.5 + 0.5 + 1.0, rel=1e-3)
    assert [task.seconds for task in found["fast"].tasks] == pytest.approx([1.0, 1.0])
    assert found["medium"].seconds == pytest.approx(2.0)
    assert found["slow"].seconds == pytest.approx(2.0)
    assert all(report.clock == VIRTUAL and report.spans[0].end_s == 1.0 for report in found.values())
    assert all(reply.content.config_records["report"]["extra"] == 1 for reply in replies)


def test_a_failed_task_is_charged_the_steps_it_made() -> None:
    def half(partition: int, message: Message) -> RecordDict | Error:
        answer = client_app(partition, message)
        assert isinstance(answer, RecordDict)
        report = from_json(Report, str(answer.config_records["report"]["json"]))
        tasks = tuple(replace(task, outcome=FAILED, num_examples=0, num_steps=5) for task in report.tasks)
        answer["report"] = ConfigRecord({"json": to_json(replace(report, tasks=tasks))})
        return answer

    grid = virtual(half)
    seconds = {report_of(reply).client: report_of(reply).seconds for reply in collect(grid, train_messages(grid))}
    assert seconds["slow"] == pytest.approx(1.0)


def test_drift_is_a_walk_over_rounds() -> None:
    grid = virtual(fleet=fleet(drift=0.1))
    slow = {}
    for server_round in (1, 2, 3, 2):
        replies = collect(grid, train_messages(grid, server_round=server_round))
        seconds = {report_of(reply).client: report_of(reply).seconds for reply in replies}
        assert slow.setdefault(server_round, seconds["slow"]) == seconds["slow"]
    assert len(set(slow.values())) == 3


# ----------------------------------------------------------------------------------------------------------- order


def outcome(shuffle: int, per_pull: int, **more: Any) -> list[tuple[str, float]]:
    grid = virtual(shuffle=shuffle, per_pull=per_pull, fleet=fleet(cost_error=0.3, drift=0.1), **more)
    return [(report_of(reply).client, report_of(reply).seconds) for reply in collect(grid, train_messages(grid))]


def test_replies_come_in_virtual_order_and_repeat_whatever_the_arrival() -> None:
    first = outcome(0, 1)
    assert [seconds for _, seconds in first] == sorted(seconds for _, seconds in first)
    for shuffle in range(1, 8):
        assert outcome(shuffle, 1 + shuffle % 3) == first


def test_another_seed_is_another_fleet() -> None:
    assert outcome(0, 1, seed=1) != outcome(0, 1, seed=2)


def test_nothing_is_delivered_before_all_replies_of_a_batch_are_in() -> None:
    grid = virtual(per_pull=1)
    ids = grid.push_messages(train_messages(grid))
    assert grid.pull_messages(ids) == []
    assert grid.pull_messages(ids[:1]) == []
    assert len(grid.pull_messages(ids)) == 3
    assert grid.pull_messages(ids) == []


def test_replies_not_asked_for_wait() -> None:
    grid = virtual(per_pull=3)
    ids = grid.push_messages(train_messages(grid))
    (second,) = grid.pull_messages(ids[1:2])
    assert second.metadata.reply_to_message_id == ids[1]
    assert {reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)} == {ids[0], ids[2]}


# --------------------------------------------------------------------------------------------------------- failures


def silent(partition: int, message: Message) -> Any:
    return None if partition == 1 else client_app(partition, message)


def test_an_error_passes_through_in_its_place_with_the_right_sender() -> None:
    def failing(partition: int, message: Message) -> RecordDict | Error:
        return Error(2, "boom") if partition == 1 else client_app(partition, message)

    grid = virtual(failing)
    nodes = grid.get_node_ids()
    replies = collect(grid, train_messages(grid, examples=1000))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert (replies[1].error.code, replies[1].error.reason) == (2, "boom")
    assert replies[1].metadata.src_node_id == nodes[1]


def test_a_client_that_never_answers_is_given_up_and_the_others_are_delivered() -> None:
    grid = virtual(silent, per_pull=3, hold_s=0.0)
    ids = grid.push_messages(train_messages(grid))
    replies = grid.pull_messages(ids)
    assert sorted(reply.has_error() for reply in replies) == [False, False, True]
    (error,) = [reply.error for reply in replies if reply.has_error()]
    assert "client 'medium': no reply within" in str(error.reason)


def test_a_timeout_delivers_what_is_in() -> None:
    grid = virtual(silent, per_pull=3)
    replies = grid.send_and_receive(train_messages(grid), timeout=0.0)
    assert [report_of(reply).client for reply in replies] == ["slow", "fast"]


def test_a_node_that_is_gone_is_answered_with_an_error() -> None:
    grid = virtual()
    fake: FakeGrid = grid._grid  # type: ignore[assignment]
    messages = train_messages(grid)
    fake.gone = {messages[0].metadata.dst_node_id}
    replies = collect(grid, messages)
    assert len(replies) == 3
    (error,) = [reply.error for reply in replies if reply.has_error()]
    assert error.reason == "client 'fast': its node is gone"


def test_an_unreadable_report_is_left_to_the_strategy() -> None:
    def garbled(partition: int, message: Message) -> RecordDict | Error:
        answer = client_app(partition, message)
        if partition == 0 and isinstance(answer, RecordDict):
            answer["report"] = ConfigRecord({"json": "{"})
        return answer

    grid = virtual(garbled)
    replies = collect(grid, train_messages(grid))
    texts = [str(reply.content.config_records["report"]["json"]) for reply in replies]
    assert texts.count("{") == 1


@pytest.mark.parametrize("clock", [VIRTUAL, MEASURED])
def test_dropout_loses_the_same_replies_whatever_the_arrival(clock: str) -> None:
    lost = []
    for shuffle in range(3):
        grid = virtual(shuffle=shuffle, fleet=fleet(dropout=0.5), clock=clock)
        rounds = []
        for server_round in range(1, 9):
            replies = collect(grid, train_messages(grid, server_round=server_round))
            assert len(replies) == 3
            errors = sorted(str(reply.error.reason) for reply in replies if reply.has_error())
            assert all("simulated dropout" in reason for reason in errors)
            rounds.append(errors)
        lost.append(rounds)
    assert lost[0] == lost[1] == lost[2]
    assert 0 < sum(map(len, lost[0])) < 24


def test_the_measured_clock_leaves_profiles_and_reports_alone() -> None:
    grid = virtual(clock=MEASURED)
    assert {profile.clock for profile in profiles_of(grid)} == {MEASURED}
    assert profiles_of(grid)[0].tasks[0].cost == MEASURED_COST
    reports = [report_of(reply) for reply in collect(grid, train_messages(grid))]
    assert {(report.clock, report.seconds) for report in reports} == {(MEASURED, 99.0)}


def test_reports_are_valid_json_of_the_contract() -> None:
    grid = virtual(fleet=fleet(cost_error=0.15))
    for reply in collect(grid, train_messages(grid)):
        assert json.loads(str(reply.content.config_records["report"]["json"]))["kind"] == "Report"
