"""Loading once per process, cutting parts, and refusing examples that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from gpu_runtime.contracts import DataSpec, Partition
from tasks import data
from tasks.base import BlockModel, TaskData, TaskError, TensorExamples
from tasks.classification import Classification
from tasks.data import loaded


class Numbers(Classification):
    """Twenty numbered examples; counts how often it is loaded."""

    name: ClassVar[str] = "numbers"
    num_classes: ClassVar[int] = 2
    input_shape: ClassVar[tuple[int, ...]] = (1,)
    loads: ClassVar[int] = 0
    made: ClassVar[dict[str, Any]] = {}

    def build_model(self) -> BlockModel:
        return BlockModel({"head": torch.nn.Linear(1, 2)})

    def load(self) -> TaskData:
        type(self).loads += 1
        numbers = torch.arange(20)
        examples = TensorExamples(inputs=numbers[:, None].float(), targets=numbers % 2)
        return TaskData(**{"train": examples, "test": examples, "partition_labels": np.arange(20) % 2, **self.made})


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No examples of an earlier test in the cache."""
    Numbers.loads, Numbers.made = 0, {}
    yield
    for cache in (data._loaded, data._indices, data._parts):
        for key in [key for key in cache._values if key[0] is Numbers]:
            del cache._values[key]


def test_clients_of_one_process_share_what_they_load() -> None:
    parts = [Partition(index=index, count=4) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(lambda part: Numbers(DataSpec(partition=part)).train_examples(), parts))
    assert Numbers.loads == 1
    numbers = torch.cat([examples.inputs for examples in held]).flatten()
    assert sorted(numbers.tolist()) == list(range(20))


def test_another_partitioner_does_not_load_again_but_another_seed_does() -> None:
    loaded(Numbers(DataSpec()))
    loaded(Numbers(DataSpec(partitioner="dirichlet", alpha=0.1)))
    assert Numbers.loads == 1
    loaded(Numbers(DataSpec(seed=1)))
    assert Numbers.loads == 2


def test_targets_stay_with_their_inputs() -> None:
    examples = Numbers(DataSpec(partition=Partition(index=1, count=3))).train_examples()
    assert torch.equal(examples.targets, examples.inputs.flatten().long() % 2)


def test_a_part_of_share_zero_is_empty_but_usable() -> None:
    examples = Numbers(DataSpec(partition=Partition(index=1, count=2, shares=(1.0, 0.0)))).train_examples()
    assert len(examples) == 0
    inputs, targets = examples.batch([])
    assert (inputs.shape, targets.shape) == ((0, 1), (0,))


@pytest.mark.parametrize("index", [-1, 3])
def test_a_part_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(TaskError, match=rf"task 'numbers': there is no part {index} of 3"):
        Numbers(DataSpec(partition=Partition(index=index, count=3))).train_examples()


def test_what_cannot_be_dealt_names_the_task() -> None:
    with pytest.raises(TaskError, match="task 'numbers': cannot deal 20 examples out to 30 partitions"):
        Numbers(DataSpec(partition=Partition(count=30))).train_examples()


def test_an_unknown_partitioner_is_refused_for_a_single_client_too() -> None:
    with pytest.raises(TaskError, match="task 'numbers': unknown partitioner 'idd'; did you mean 'iid'"):
        Numbers(DataSpec(partitioner="idd")).train_examples()


EMPTY = TensorExamples(inputs=torch.empty(0, 1), targets=torch.empty(0, dtype=torch.long))
UNEVEN = TensorExamples(inputs=torch.zeros(3, 1), targets=torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"train": EMPTY}, "task 'numbers': no train examples"),
        ({"test": EMPTY}, "task 'numbers': no test examples"),
        ({"test": UNEVEN}, "task 'numbers': test inputs and targets differ in length"),
        ({"partition_labels": np.arange(3)}, "task 'numbers': 3 partition_labels for 20 training examples"),
        ({"natural_ids": np.arange(4)}, "task 'numbers': 4 natural_ids for 20 training examples"),
    ],
)
def test_examples_that_do_not_fit_together_are_refused(made: dict[str, Any], message: str) -> None:
    Numbers.made = made
    with pytest.raises(TaskError, match=message):
        loaded(Numbers(DataSpec()))


def test_a_failed_load_is_tried_again() -> None:
    Numbers.made = {"test": EMPTY}
    with pytest.raises(TaskError):
        loaded(Numbers(DataSpec()))
    Numbers.made = {}
    assert len(loaded(Numbers(DataSpec())).test) == 20
