"""Finding tasks: suites, names, users' own classes, and one clear line for each fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_runtime.contracts import DataSpec
from tasks.errors import TaskError
from tasks.registry import BUILT_IN, SUITES, build, resolve, task_name, task_refs

USER_MODULE = """
import torch
from torch import nn

from tasks.base import BlockModel, Task, TaskData, TensorExamples


class Own(Task):
    name = "own"
    primary_metric = "accuracy"

    def build_model(self):
        return BlockModel({"a": nn.Linear(3, 4), "b": nn.ReLU(), "c": nn.Linear(4, 2)})

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self):
        from tasks.metrics import ClassAccuracy

        return ClassAccuracy(2)

    def load(self):
        examples = TensorExamples(inputs=torch.randn(8, 3), targets=torch.arange(8) % 2)
        return TaskData(train=examples, test=examples, partition_labels=examples.targets.numpy())

    def synthetic_batch(self, batch_size, generator):
        return torch.randn(batch_size, 3, generator=generator), torch.zeros(batch_size, dtype=torch.long)


class Unnamed(Own):
    name = "Not A Name"


class NoMetric(Own):
    primary_metric = ""


class Twin(Own):
    pass


class Abstract(Task):
    name = "abstract"
    primary_metric = "accuracy"


class Skipping(BlockModel):
    def forward(self, inputs):
        return self.blocks(inputs) * 2


class OwnForward(Own):
    def build_model(self):
        return Skipping({"a": nn.Linear(3, 2)})


class PlainModule(Own):
    def build_model(self):
        return nn.Linear(3, 2)


class NoBlocks(Own):
    def build_model(self):
        return BlockModel({})


class Outside(Own):
    def build_model(self):
        model = BlockModel({"a": nn.Linear(3, 2)})
        model.extra = nn.Linear(1, 1)
        return model


class Raising(Own):
    def build_model(self):
        raise RuntimeError("no such\\nlayer")


class BadConstructor(Own):
    def __init__(self, data):
        raise KeyError("colour")


not_a_class = 3


class Other:
    pass
"""


@pytest.fixture(autouse=True)
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's package `their_tasks` on the path, with the faults the tests below name."""
    (tmp_path / "their_tasks.py").write_text(USER_MODULE)
    (tmp_path / "their_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_tasks", raising=False)


def test_suites_name_built_in_tasks() -> None:
    assert SUITES["driving"] == ("digits", "detection", "segmentation")
    assert all(name in BUILT_IN for suite in SUITES.values() for name in suite)


def test_config_check_loads_no_torch() -> None:
    code = (
        "import sys; from tasks import registry; registry.task_refs('driving', ''); registry.task_refs('', 'digits');"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_task_refs() -> None:
    assert task_refs("tiny") == SUITES["tiny"]
    assert task_refs("tiny", " digits , their_tasks:Own") == ("digits", "their_tasks:Own")
    assert task_name("their_tasks:Own") == "own"


@pytest.mark.parametrize(
    ("suite", "tasks", "message"),
    [
        ("drivin", "", "unknown suite 'drivin'; did you mean 'driving'?"),
        ("zzz", "", "unknown suite 'zzz'; known: driving, mixed, tiny"),
        ("", "digits,segmentaton", "unknown task 'segmentaton'; did you mean 'segmentation'?"),
        ("", "digits,,watch", "has an empty entry between its commas"),
        ("", "digits,digits", "task 'digits' is named 2 times; a run holds each task name once"),
        ("", "their_tasks:Own,their_tasks:Twin", "task 'own' is named 2 times"),
    ],
)
def test_faults_in_the_list_of_tasks(suite: str, tasks: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        task_refs(suite, tasks)
    assert message in str(caught.value)


def test_a_users_own_task_is_built_and_trains() -> None:
    task = build("their_tasks:Own", DataSpec())
    inputs, targets = task.train_examples().batch([0, 1])
    assert task.loss(task.build_model()(inputs), targets).isfinite()


def test_checking_a_users_model_leaves_the_random_state() -> None:
    torch.manual_seed(1)
    build("their_tasks:Own", DataSpec())
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("nope.at.all:Own", "cannot import module 'nope.at.all' (ModuleNotFoundError: No module named 'nope')"),
        ("their_broken:Own", "cannot import module 'their_broken' (ModuleNotFoundError"),
        ("their_tasks:Owm", "module 'their_tasks' has no 'Owm'; did you mean 'Own'?"),
        ("their_tasks:", "is not of the form 'package.module:Class'"),
        ("their tasks:Own", "is not of the form 'package.module:Class'"),
        ("their_tasks:Other", "is not a subclass of tasks.base.Task"),
        ("their_tasks:not_a_class", "is not a subclass of tasks.base.Task"),
        ("their_tasks:Abstract", "does not implement build_model, load, loss, metrics, synthetic_batch"),
        ("their_tasks:Unnamed", "its name 'Not A Name' must match [a-z][a-z0-9-]*"),
        ("their_tasks:NoMetric", "primary_metric must name a key of metrics().compute(), not ''"),
    ],
)
def test_faults_in_a_users_class(ref: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        resolve(ref)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("their_tasks:OwnForward", "Skipping overrides forward; a BlockModel runs its blocks in order"),
        ("their_tasks:PlainModule", "build_model must return a tasks.base.BlockModel, not Linear"),
        ("their_tasks:NoBlocks", "its model has no blocks"),
        ("their_tasks:Outside", "parameter 'extra.weight' lies outside the model's blocks"),
        ("their_tasks:Raising", "build_model raised RuntimeError: no such layer"),
        ("their_tasks:BadConstructor", "its constructor raised KeyError: 'colour'"),
    ],
)
def test_faults_in_a_users_model(ref: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        build(ref, DataSpec())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
