"""The split service's side: what it refuses, what it keeps for whom, and that faults change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from local_channel import LocalChannel
from runtime_fakes import NanAtStep, Normed, Pictures, RaisesAtStep
from split_fakes import Split, arrays_of, distance, key_of, run, service, split_arrays, split_training

from gpu_runtime.device import Device
from gpu_runtime.pipeline.crossing import flatten
from gpu_runtime.pipeline.encoding import EncodedTensor, decode, encode
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.session import (
    Activation,
    ProtocolError,
    RefusedError,
    SessionEnd,
    SessionSpec,
    SplitError,
    StageSession,
)
from gpu_runtime.pipeline.stage_device import StageDevice


def spec_of(task: str = "split", attempt: int = 0, **options: Any) -> SessionSpec:
    defaults: dict[str, Any] = {
        "split_point": 2,
        "micro_batches": 3,
        "encoding": "raw",
        "num_examples": 10,
        "batch_size": 7,
        "seed": 1,
    }
    return SessionSpec(key=key_of(task, attempt), **{**defaults, **options})


def activation(step: int, index: int, count: int, num: int, batch: int, **options: Any) -> Activation:
    """A micro-batch as it leaves the second block of `Split`."""
    generator = torch.Generator().manual_seed(10 * step + index)
    value = torch.randn(num, 4, 4, 4, generator=generator, dtype=torch.float64).requires_grad_()
    structure, tensors = flatten(value)
    target_structure, targets = flatten(torch.arange(num) % 3)
    return dataclasses.replace(
        Activation(
            step=step,
            index=index,
            count=count,
            num_examples=num,
            batch_examples=batch,
            tensors=tuple(encode(each, "raw") for each in tensors),
            structure=structure,
            targets=tuple(encode(each, "raw") for each in targets),
            target_structure=target_structure,
        ),
        **options,
    )


# Two steps: batches of 7 (as 3 + 2 + 2) and 3 (as 3).
COURSE = [activation(0, 0, 3, 3, 7), activation(0, 1, 3, 2, 7), activation(0, 2, 3, 2, 7), activation(1, 0, 1, 3, 3)]
END = SessionEnd(num_steps=2, num_examples=10)


def trained(stages: ServerStages, *, until: int = 4) -> StageSession:
    session = stages.open(spec_of())
    for each in COURSE[:until]:
        session.train(each)
    return session


def test_a_session_from_end_to_end() -> None:
    with service(Split()) as stages:
        session = stages.open(spec_of())
        gradients = [session.train(each) for each in COURSE]
        assert [(each.step, each.index) for each in gradients] == [(0, 0), (0, 1), (0, 2), (1, 0)]
        for each in gradients:
            (encoded,) = each.tensors
            assert encoded is not None
            assert decode(encoded).shape == (COURSE[gradients.index(each)].num_examples, 4, 4, 4)
        assert all(each.server_s > 0 for each in gradients)
        assert session.finish(END) == END
        assert session.finish(END) == END
        session.abandon()
        half = stages.collect(key_of("split"))
        assert (half.num_steps, half.num_examples) == (2, 10)
        assert list(half.arrays) == ["blocks.2.2.weight", "blocks.2.2.bias", "blocks.3.1.weight", "blocks.3.1.bias"]
        with pytest.raises(SplitError, match="a/split of round 3 has no trained half here"):
            stages.collect(key_of("split"))


def test_gradients_are_those_of_the_batch() -> None:
    """Micro-batches of one batch: their gradients are the whole batch's, in parts; the loss is each one's own."""
    with service(Split()) as stages:
        whole = stages.open(spec_of(num_examples=5, batch_size=5))
        parts = [activation(0, 0, 2, 3, 5), activation(0, 1, 2, 2, 5)]
        joined = activation(0, 0, 1, 5, 5)
        tensors = [torch.cat([decode(part.tensors[0]) for part in parts])]
        labels = torch.cat([decode(part.targets[0]) for part in parts])
        joined = dataclasses.replace(joined, tensors=(encode(tensors[0], "raw"),), targets=(encode(labels, "raw"),))
        one = whole.train(joined)
        split = stages.open(spec_of(num_examples=5, batch_size=5))
        two = [split.train(part) for part in parts]
        encoded = [gradient.tensors[0] for gradient in (one, *two)]
        expected, *got = (decode(each) for each in encoded if each is not None)
        torch.testing.assert_close(torch.cat(got), expected, rtol=1e-12, atol=1e-15)
        assert one.loss == pytest.approx(two[0].loss * 0.6 + two[1].loss * 0.4)


FIRST = COURSE[0]
FAULTS: list[tuple[Activation, str]] = [
    (FIRST, "micro-batch 0 of step 0 came where 1 of step 0 is due"),
    (COURSE[2], "micro-batch 2 of step 0 came where 1 of step 0 is due"),
    (COURSE[3], "micro-batch 0 of step 1 came where 1 of step 0 is due"),
    (activation(0, 1, 2, 2, 7), "step 0 has 2 micro-batches"),
    (activation(0, 1, 4, 2, 7), "step 0 has 4 micro-batches; 3 is the most"),
    (activation(0, 1, 3, 2, 6), "a batch of 6 examples came where 7 are due"),
    (activation(0, 1, 3, 4, 7), "micro-batch 1 of 3 has 4 examples, 4 are left"),
    (activation(0, 1, 3, 2, 7, num_examples=0), "micro-batch 1 of 3 has 0 examples"),
    (activation(0, 1, 3, 2, 7, num_examples=1), r"shape \[2\] came with 1 examples|shape \[2, 4, 4, 4\]"),
    (activation(0, 1, 3, 2, 7, targets=FIRST.targets), r"a tensor of shape \[3\] came with 2 examples"),
    (activation(0, 1, 3, 2, 7, tensors=()), "0 tensors crossed, the structure names 1"),
    (activation(0, 1, 3, 2, 7, structure="?"), "is not JSON"),
    (activation(0, 1, 3, 2, 7, structure='{"list":[{"tensor":"g"}]}'), "micro-batch 1 of step 0 is not built as"),
    (
        activation(0, 1, 3, 2, 7, tensors=(encode(torch.zeros(2, 5, 4, 4, dtype=torch.float64), "raw"),)),
        "cannot train on step 1, micro-batch 2: RuntimeError: mat1 and mat2",
    ),
    (
        activation(0, 1, 3, 2, 7, targets=(encode(torch.tensor([0, 9]), "raw"),)),
        "cannot train on step 1, micro-batch 2: IndexError: Target 9 is out of bounds",
    ),
    (
        activation(0, 1, 3, 2, 7, tensors=(EncodedTensor(encoding="raw", dtype="?", shape=(2,), data=b"1"),)),
        "cannot",
    ),
]


@pytest.mark.parametrize(("fault", "text"), FAULTS)
def test_faulty_micro_batches_end_their_session_and_no_other(fault: Activation, text: str) -> None:
    with service(Split(), Pictures("other")) as stages:
        other = stages.open(spec_of("other", split_point=1))
        session = trained(stages, until=1)
        with pytest.raises(SplitError, match=text):
            session.train(fault)
        with pytest.raises(SplitError, match="the session has ended"):
            session.train(COURSE[1])
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(key_of("split"))
        assert trained(stages).finish(END) == END
        assert isinstance(other, StageSession)
        other.abandon()


@pytest.mark.parametrize(
    ("until", "end"),
    [
        (4, SessionEnd(num_steps=1, num_examples=10)),
        (4, SessionEnd(num_steps=2, num_examples=9)),
        (2, SessionEnd(num_steps=0, num_examples=0)),
        (0, SessionEnd(num_steps=0, num_examples=0)),
    ],
)
def test_halves_that_disagree_are_not_kept(until: int, end: SessionEnd) -> None:
    with service(Split()) as stages:
        session = trained(stages, until=until)
        with pytest.raises(ProtocolError, match="the device has trained"):
            session.finish(end)
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(key_of("split"))


def test_a_session_cut_short_keeps_the_steps_it_has() -> None:
    with service(Split()) as stages:
        end = SessionEnd(num_steps=1, num_examples=7)
        assert trained(stages, until=3).finish(end) == end
        assert stages.collect(key_of("split")).num_examples == 7


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (spec_of("none"), "task 'none' is not split in round 3"),
        (spec_of(attempt=1), "round 3 is at attempt 0, not 1"),
        (spec_of(split_point=4), "a model of 4 blocks cannot be cut at 4"),
        (spec_of(split_point=0), "a model of 4 blocks cannot be cut at 0"),
        (spec_of("normed", split_point=1), "the model cannot be cut: 'blocks.0.1' normalises by batch statistics"),
        (spec_of(micro_batches=0), "micro_batches must be at least 1"),
        (spec_of(batch_size=0), "batch_size must be at least 1"),
        (spec_of(num_examples=-1), "num_examples must be at least 1"),
        (spec_of(learning_rate=float("nan")), "learning_rate must be finite and not negative"),
        (spec_of(proximal_mu=-1.0), "proximal_mu must be finite and not negative"),
        (spec_of(encoding="zip"), "unknown encoding 'zip'; there are fp32, fp16, int8"),
        (
            dataclasses.replace(spec_of(), key=dataclasses.replace(key_of("split"), run="x")),
            "round 3 of run 'x' is not",
        ),
    ],
)
def test_sessions_that_cannot_be_are_refused(spec: SessionSpec, text: str) -> None:
    with service(Split(), Normed("normed")) as stages, pytest.raises(RefusedError, match=text):
        stages.open(spec)


def test_a_new_session_of_the_same_key_takes_the_place_of_the_old_one() -> None:
    with service(Split()) as stages:
        old = trained(stages, until=2)
        new = trained(stages)
        with pytest.raises(SplitError, match="the session has ended"):
            old.train(COURSE[2])
        new.finish(END)
        newest = trained(stages, until=1)
        with pytest.raises(SplitError, match="is still training"):
            stages.collect(key_of("split"))
        newest.abandon()
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(key_of("split"))


def test_releasing_a_round_drops_its_sessions_and_halves() -> None:
    with service(Split()) as stages:
        trained(stages).finish(END)
        session = trained(stages)
        stages.release("run", 3)
        stages.release("run", 3)
        with pytest.raises(SplitError):
            session.finish(END)
        with pytest.raises(RefusedError, match="round 3 of run 'run' is not open here"):
            stages.open(spec_of())
        stages.open_round("run", 3, 1, {"split": Split()}, {"split": arrays_of(Split())})
        with pytest.raises(RefusedError, match="round 3 is at attempt 1, not 0"):
            stages.open(spec_of())
        stages.open(spec_of(attempt=1)).abandon()


def test_a_task_comes_beside_those_of_the_same_attempt() -> None:
    other = Split("other")
    with service(Split()) as stages:
        trained(stages).finish(END)
        stages.open_round("run", 3, 0, {"other": other}, {"other": arrays_of(other)})
        stages.open(spec_of("other")).abandon()
        assert stages.collect(key_of("split")).num_steps == 2


def test_a_task_that_is_set_again_starts_anew() -> None:
    with service(Split()) as stages:
        trained(stages).finish(END)
        stages.open_round("run", 3, 0, {"split": Split()}, {"split": arrays_of(Split(), seed=2)})
        with pytest.raises(SplitError, match="has no trained half"):
            stages.collect(key_of("split"))
        session = trained(stages)
        stages.open_round("run", 3, 0, {"split": Split()}, {"split": arrays_of(Split())})
        with pytest.raises(SplitError):
            session.finish(END)


def test_a_full_service_refuses() -> None:
    device = StageDevice(Device(name="test", kind="cpu", num_cores=1))
    one, two, three = Split("one"), Split("two"), Split("three")
    stages = ServerStages(device, max_sessions=2, max_halves=3, max_rounds=1)
    try:
        arrays = {each.name: arrays_of(each) for each in (one, two, three)}
        stages.open_round("run", 3, 0, {each.name: each for each in (one, two, three)}, arrays)
        first, second = stages.open(spec_of("one")), stages.open(spec_of("two"))
        with pytest.raises(RefusedError, match="the split service is full: 2 sessions, 0 halves waiting"):
            stages.open(spec_of("three"))
        first.abandon()
        stages.open(spec_of("three"))
        second.abandon()
        with pytest.raises(SplitError, match="1 rounds are open"):
            stages.open_round("run", 4, 0, {}, {})
        stages.open_round("run", 3, 1, {}, {})
    finally:
        stages.close()
        device.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [(NanAtStep, "loss is not finite at step 3"), (RaisesAtStep, "on step 3, micro-batch 1: RuntimeError: injected")],
)
def test_losses_that_go_wrong_are_named(kind: Callable[[str], Pictures], text: str) -> None:
    workload = kind("faulty")
    with service(workload) as stages:
        training = split_training(workload, LocalChannel(stages), micro_batches=1, num_examples=60)
        with pytest.raises(SplitError, match=text):
            run(training)
        training.abandon()


def test_an_optimiser_that_fails_fails_the_next_call() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no step")

    workload = Split(make=lambda parameters, rate: Failing(parameters, lr=rate))
    with service(workload) as stages:
        session = trained(stages, until=3)
        with pytest.raises(SplitError, match="the server stage's optimiser failed: RuntimeError: no step"):
            session.train(COURSE[3])


def test_start_weights_are_not_written_to() -> None:
    workload = Split()
    arrays = arrays_of(workload)
    before = {key: array.copy() for key, array in arrays.items()}
    device = StageDevice(Device(name="test", kind="cpu", num_cores=1))
    stages = ServerStages(device)
    try:
        stages.open_round("run", 3, 0, {"split": workload}, {"split": arrays})
        run(split_training(workload, LocalChannel(stages), split_point=2, arrays=arrays))
        half = stages.collect(key_of("split"))
    finally:
        stages.close()
        device.close()
    assert all(np.array_equal(arrays[key], before[key]) for key in before)
    assert distance(dict(half.arrays), {key: before[key] for key in half.arrays}) > 1e-3


def test_start_weights_may_be_the_server_half_alone() -> None:
    workload = Split()
    arrays = arrays_of(workload)
    device = StageDevice(Device(name="test", kind="cpu", num_cores=1))
    stages = ServerStages(device)
    try:
        half = {key: array for key, array in arrays.items() if key.startswith(("blocks.2", "blocks.3"))}
        stages.open_round("run", 3, 0, {"split": workload}, {"split": half})
        training = split_training(
            workload,
            LocalChannel(stages),
            split_point=2,
            arrays={key: array for key, array in arrays.items() if key not in half},
        )
        run(training)
        joined = {**training.arrays, **stages.collect(key_of("split")).arrays}
    finally:
        stages.close()
        device.close()
    assert distance(joined, split_arrays(workload, split_point=2)) == 0
