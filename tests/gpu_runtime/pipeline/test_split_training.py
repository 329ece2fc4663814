"""The device's side: what it reports, and what becomes of a task whose split fails."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from local_channel import LocalChannel, failing_at
from runtime_fakes import Empty, Normed
from split_fakes import (
    ACCESS,
    CPU,
    Split,
    distance,
    key_of,
    run,
    service,
    split_training,
    whole_arrays,
    whole_training,
)

from gpu_runtime.contracts import Emulation, SplitReport
from gpu_runtime.pipeline.device_clock import DeviceClock
from gpu_runtime.pipeline.encoding import encode
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    LinkError,
    LinkStatistics,
    ProtocolError,
    RefusedError,
    SplitError,
)
from gpu_runtime.work import TrainingError

FALLBACK = dataclasses.replace(ACCESS, fallback=True)


def test_the_report_counts_what_happened() -> None:
    workload = Split()
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), split_point=2, micro_batches=3, num_examples=20)
        run(training)
    report = training.report
    assert isinstance(report, SplitReport)
    assert (report.split_point, report.micro_batches, report.encoding) == (2, 3, "raw")
    assert (report.bytes_up, report.bytes_down) == (900, 450)  # 3 + 3 + 3 micro-batches of 100 and 50
    assert report.device_s > 0
    assert report.server_s > 0
    assert 0 <= report.wait_s < 1
    assert training.notes == ()
    assert training.micro_batch is None
    assert set(training.arrays) == {"blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight", "blocks.0.1.bias",
                                    "blocks.1.weight", "blocks.1.bias"}  # fmt: skip


FAILURES = [
    ("open", 1, LinkError("the split service at 127.0.0.1:1 cannot be reached: refused")),
    ("open", 1, RefusedError("the split service is full")),
    ("send", 1, LinkError("cut")),
    ("send", 4, LinkError("cut")),
    ("receive", 5, LinkError("no answer in 60 s")),
    ("receive", 6, ProtocolError("garbage")),
    ("finish", 1, LinkError("cut at the end")),
]


@pytest.mark.parametrize(("call", "number", "error"), FAILURES)
def test_a_split_that_fails_falls_back_to_the_very_result_of_whole_training(
    call: str, number: int, error: SplitError
) -> None:
    workload = Split()
    whole = whole_training(workload)
    run(whole)
    with service(workload) as stages:
        channel = LocalChannel(stages, fault=failing_at(call, number, error))
        training = split_training(workload, channel, access=FALLBACK, split_point=2)
        run(training)
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(key_of("split"))
    assert distance(training.arrays, whole.arrays) == 0
    assert training.notes == (f"trained whole: {error}",)
    assert training.report is None
    assert training.losses == whole.losses
    assert (training.steps_done, training.examples_done) == (whole.steps_done, whole.examples_done)


@pytest.mark.parametrize(("call", "number", "error"), FAILURES)
def test_without_fallback_the_task_fails_with_the_reason(call: str, number: int, error: SplitError) -> None:
    workload = Split()
    with service(workload) as stages:
        channel = LocalChannel(stages, fault=failing_at(call, number, error))
        training = split_training(workload, channel, split_point=2)
        with pytest.raises(type(error), match=str(error)):
            run(training)
        training.abandon()


@pytest.mark.parametrize("split_point", [0, 4, 9])
def test_cuts_that_cannot_be_fall_back_without_a_word_to_the_service(split_point: int) -> None:
    workload = Split()
    with service(workload) as stages:
        channel = LocalChannel(stages)
        training = split_training(workload, channel, access=FALLBACK, split_point=split_point)
        run(training)
    assert channel.num_opened == 0
    assert training.notes == (f"trained whole: a model of 4 blocks cannot be cut at {split_point}",)
    assert distance(training.arrays, whole_arrays(workload)) == 0


def test_a_model_with_batch_statistics_trains_whole() -> None:
    workload = Normed("normed")
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), access=FALLBACK)
        run(training)
    assert "use GroupNorm or frozen statistics" in training.notes[0]
    assert distance(training.arrays, whole_arrays(workload)) == 0


def test_training_cut_short_agrees_on_what_was_done() -> None:
    workload = Split()
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), split_point=2, num_examples=20)
        training.advance(2, lambda: False)
        training.finish()
        half = stages.collect(key_of("split"))
    assert (half.num_steps, half.num_examples) == (2, 14) == (training.steps_done, training.examples_done)


def test_a_last_word_that_is_lost_after_a_deadline_fails_the_task() -> None:
    workload = Split()
    with service(workload) as stages:
        channel = LocalChannel(stages, fault=failing_at("finish", 1, LinkError("cut")))
        training = split_training(workload, channel, access=FALLBACK, num_examples=20)
        training.step()
        with pytest.raises(LinkError, match="cut"):
            training.finish()
        training.abandon()


def test_abandoning_leaves_nothing_at_the_service() -> None:
    workload = Split()
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages))
        training.step()
        training.abandon()
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(key_of("split"))


class Answering(Channel):
    """Answers each micro-batch with `answer`."""

    def __init__(self, answer: Gradient) -> None:
        self._answer = answer

    def open(self, spec: Any) -> None:
        pass

    def send(self, activation: Activation) -> None:
        pass

    def receive(self) -> Gradient:
        return self._answer

    def finish(self, end: Any) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def statistics(self) -> LinkStatistics:
        return LinkStatistics()


GOOD = Gradient(
    step=0, index=0, loss=1.0, server_s=0.0, tensors=(encode(torch.zeros(7, 4, 8, 8, dtype=torch.float64), "raw"),)
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"index": 1}, "gradient of micro-batch 1 of step 0 came where 0 is due"),
        ({"step": 1}, "gradient of micro-batch 0 of step 1 came where 0 is due"),
        ({"tensors": ()}, "came where 0 is due"),
        ({"tensors": (encode(torch.zeros(7, 4), "raw"),)}, r"shape \[7, 4\] for an activation of shape \[7, 4, 8, 8\]"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    training = split_training(Split(), Answering(dataclasses.replace(GOOD, **change)), micro_batches=1)
    with pytest.raises(ProtocolError, match=text):
        training.step()
    assert training.steps_done == 0


def test_a_loss_that_is_not_finite_fails_the_task_also_with_fallback() -> None:
    answer = dataclasses.replace(GOOD, loss=float("inf"))
    training = split_training(Split(), Answering(answer), micro_batches=1, access=FALLBACK)
    with pytest.raises(TrainingError, match="loss is not finite at step 1"):
        training.step()


def test_interrupting_ends_a_session_without_fallback() -> None:
    workload = Split()
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), access=FALLBACK)
        training.step()
        training.interrupt()
        with pytest.raises(LinkError, match="the channel is closed"):
            training.step()
        training.abandon()


def test_faulty_plans_are_refused() -> None:
    for workload, options, text in (
        (Split(), {"num_examples": 0}, "plan asks for 0 examples"),
        (Split(), {"micro_batches": 0}, "with 0 micro-batches"),
        (Split(), {"split_point": None}, "plan splits at block None"),
        (Empty("empty"), {}, "holds no training examples"),
    ):
        with pytest.raises(TrainingError, match=text):
            split_training(workload, Answering(GOOD), **options)  # type: ignore[arg-type]


def test_more_micro_batches_than_examples_are_single_ones() -> None:
    workload = Split()
    with service(workload) as stages:
        channel = LocalChannel(stages)
        training = split_training(workload, channel, micro_batches=50, num_examples=10)
        run(training)
    assert channel.num_sent == 10
    assert training.report is not None
    assert training.report.micro_batches == 7


def test_a_slow_device_takes_a_multiple_of_its_own_time() -> None:
    def spin(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    clock = DeviceClock(CPU, 5.0)
    started = time.perf_counter()
    for _ in range(4):
        with clock.working():
            spin(0.005)
    assert time.perf_counter() - started >= 0.099
    assert clock.busy_s >= 0.099
    with pytest.raises(ValueError, match="1 or more"):
        DeviceClock(CPU, 0.5)


def test_a_slow_device_changes_no_result() -> None:
    workload = Split()
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), emulation=Emulation(slowdown=3.0), split_point=2)
        run(training)
        stages.collect(key_of("split"))
    with service(workload) as stages:
        again = split_training(workload, LocalChannel(stages), split_point=2)
        run(again)
    assert distance(training.arrays, again.arrays) == 0
