"""Finds tasks by name (`digits`) or by reference into a user's package (`my_pkg.my_task:MyTask`).

Imports no torch until a task class is asked for, so that checking a config costs nothing.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from tasks.errors import NAME_PATTERN, TaskError, nearest

if TYPE_CHECKING:
    from gpu_runtime.contracts import DataSpec
    from tasks.base import Task

SUITES: dict[str, tuple[str, ...]] = {
    "driving": ("digits", "detection", "segmentation"),
    "mixed": ("watch", "breast-cancer", "digits"),
    "tiny": ("tiny-digits", "tiny-faces", "tiny-scenes"),
}

BUILT_IN: dict[str, str] = {
    "digits": "tasks.driving:Digits",
    "detection": "tasks.driving:Detection",
    "segmentation": "tasks.driving:Segmentation",
    "watch": "tasks.mixed:Watch",
    "breast-cancer": "tasks.mixed:BreastCancer",
    "tiny-digits": "tasks.tiny:TinyDigits",
    "tiny-faces": "tasks.tiny:TinyFaces",
    "tiny-scenes": "tasks.tiny:TinyScenes",
    "fashion-mnist": "tasks.vision:FashionMnist",
    "cifar10": "tasks.vision:Cifar10",
}

_models_checked: set[type[Task]] = set()

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def task_refs(suite: str, tasks: str = "") -> tuple[str, ...]:
    """References of the tasks of a run: those of `tasks` (comma separated) or, if that is empty, of the suite.

    Raises:
        TaskError: unknown suite or task, a malformed or duplicate reference, or two tasks of the same name.
    """
    if tasks.strip():
        refs = tuple(ref.strip() for ref in tasks.split(","))
    elif suite in SUITES:
        refs = SUITES[suite]
    else:
        raise TaskError(f"unknown suite {suite!r}; {nearest(suite, SUITES)}")
    if "" in refs:
        raise TaskError(f"tasks {tasks!r} has an empty entry between its commas")
    counts = Counter(task_name(ref) for ref in refs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise TaskError(f"task {twice[0]!r} is named {counts[twice[0]]} times; a run holds each task name once")
    return refs


def task_name(ref: str) -> str:
    """Name of the task behind a reference; imports nothing for built-in tasks. Raises TaskError as `resolve` does."""
    return ref if ref in BUILT_IN else resolve(ref).name


def resolve(ref: str) -> type[Task]:
    """Class behind a reference: a built-in name or `package.module:Class`.

    Raises:
        TaskError: unknown name, module or class; not a Task; a bad or missing `name` or `primary_metric`.
    """
    target = BUILT_IN.get(ref, ref)
    if ":" not in target:
        raise TaskError(f"unknown task {ref!r}; {nearest(ref, BUILT_IN)} (your own: 'package.module:Class')")
    if not _REFERENCE.fullmatch(target):
        raise TaskError(f"task {ref!r} is not of the form 'package.module:Class'")
    module_name, class_name = target.split(":")
    return _checked(ref, _attribute(ref, module_name, class_name))


def build(ref: str, data: DataSpec) -> Task:
    """The task behind a reference, with its data.

    Raises:
        TaskError: as `resolve` does, if the constructor fails, or if a user's model cannot be cut (`check_model`).
    """
    kind = resolve(ref)
    try:
        task = kind(data)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {ref!r}: its constructor raised {type(error).__name__}: {_one_line(error)}") from error
    if ref not in BUILT_IN and kind not in _models_checked:
        check_model(task)
        _models_checked.add(kind)
    return task


def check_model(task: Task) -> None:
    """Build the task's model once and check that it can be cut anywhere. Leaves torch's random state as it was.

    Raises:
        TaskError: the model cannot be built, has no blocks, or does not run exactly its blocks in order.
    """
    import torch

    from gpu_runtime.randomness import seeded_draws
    from tasks.base import BlockModel

    try:
        with seeded_draws(0, torch.device("cpu")):
            model = task.build_model()
    except Exception as error:
        raise TaskError(f"task {task.name!r}: build_model raised {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(model, BlockModel):
        raise TaskError(
            f"task {task.name!r}: build_model must return a tasks.base.BlockModel, not {type(model).__name__}"
        )
    if type(model).forward is not BlockModel.forward:
        raise TaskError(
            f"task {task.name!r}: {type(model).__name__} overrides forward; a BlockModel runs its blocks in order, so "
            "move that code into a block"
        )
    if len(model.blocks) == 0:
        raise TaskError(f"task {task.name!r}: its model has no blocks")
    outside = [key for key in model.state_dict() if not key.startswith("blocks.")]
    if outside:
        raise TaskError(f"task {task.name!r}: parameter {outside[0]!r} lies outside the model's blocks")


def _attribute(ref: str, module_name: str, class_name: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TaskError(
            f"task {ref!r}: cannot import module {module_name!r} ({type(error).__name__}: {_one_line(error)}); "
            "install it, or put the folder above it on PYTHONPATH"
        ) from error
    try:
        return getattr(module, class_name)
    except AttributeError:
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise TaskError(
            f"task {ref!r}: module {module_name!r} has no {class_name!r}; {nearest(class_name, classes)}"
        ) from None


def _checked(ref: str, found: Any) -> type[Task]:
    from tasks.base import Task

    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise TaskError(f"task {ref!r} is not a subclass of tasks.base.Task")
    if found.__abstractmethods__:
        raise TaskError(f"task {ref!r} does not implement {', '.join(sorted(found.__abstractmethods__))}")
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise TaskError(f"task {ref!r}: its name {name!r} must match {NAME_PATTERN.pattern}")
    metric = getattr(found, "primary_metric", None)
    if not isinstance(metric, str) or not metric:
        raise TaskError(f"task {ref!r}: primary_metric must name a key of metrics().compute(), not {metric!r}")
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
