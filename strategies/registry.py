"""Strategies by name: `arch-sync`, every stock Flower strategy that fits array messages, or the user's own class.

Checking a registered name imports no strategy.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpu_runtime.contracts import one_line
from strategies.options import StrategyError, StrategyOptions, cannot_be_made

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from strategies.base import MultiTaskStrategy

ARCH_SYNC = "arch-sync"
# Stock strategies: `strategies.stock` knows how each is built. Left out: xgb bagging and cyclic (trees, not arrays) and
# the differential-privacy wrappers (they wrap another strategy and want one model a message).
STOCK = (
    "fedavg",
    "fedavgm",
    "fedadagrad",
    "fedadam",
    "fedyogi",
    "fedprox",
    "fedmedian",
    "fedtrimmedavg",
    "krum",
    "multikrum",
    "bulyan",
    "qfedavg",
)
STRATEGIES = (ARCH_SYNC, *STOCK)

_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_name(name: str) -> None:
    """Raises StrategyError unless `name` is registered, or the `package.module:Class` of a strategy."""
    if name in STRATEGIES:
        return
    if _CLASS_PATH.fullmatch(name):
        _strategy_class(name)
        return
    close = difflib.get_close_matches(name.lower(), STRATEGIES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise StrategyError(
        f"strategy.name {name!r} is unknown{hint}; use one of {', '.join(STRATEGIES)}, or package.module:Class"
    )


def build(options: StrategyOptions, tasks: Sequence[str]) -> MultiTaskStrategy:
    """The strategy named in `options` for the tasks of a run, given by their names.

    A class of the user's own is either a `MultiTaskStrategy`, called with (options, tasks), or any Flower `Strategy`,
    of which one instance per task is made without arguments (a `FedAvg` subclass gets the node minimums it needs).

    Raises:
        StrategyError: an option out of range, an unknown name, or a class that cannot be imported or is no strategy.
    """
    faults = options.faults()
    if faults:
        raise StrategyError("; ".join(faults))
    if options.name == ARCH_SYNC:
        from strategies.arch_sync import ArchSync

        return ArchSync(options, tasks)
    from strategies.base import MultiTaskStrategy
    from strategies.per_task import PerTask
    from strategies.stock import STOCK_RECIPES, own_recipe

    if options.name in STOCK:
        return PerTask(options, tasks, STOCK_RECIPES[options.name])
    found = _strategy_class(options.name)
    if issubclass(found, MultiTaskStrategy):
        try:
            return found(options, tasks)
        except StrategyError:
            raise
        except Exception as error:  # the user's constructor may fail in any way
            raise StrategyError(cannot_be_made(options.name, error)) from error
    return PerTask(options, tasks, own_recipe(options.name, found))


def _strategy_class(path: str) -> type[Strategy]:
    from flwr.serverapp.strategy import Strategy

    found = _imported(path)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise StrategyError(f"strategy.name {path!r} is no class derived from flwr.serverapp.strategy.Strategy")
    if found.__abstractmethods__:
        raise StrategyError(f"strategy.name {path!r} does not implement {', '.join(sorted(found.__abstractmethods__))}")
    return found


def _imported(path: str) -> object:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may fail in any way
        raise StrategyError(f"strategy.name {path!r}: cannot import {module_name}: {one_line(error)}") from error
    found = getattr(module, class_name, None)
    if found is None:
        close = difflib.get_close_matches(class_name, dir(module), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise StrategyError(f"strategy.name {path!r}: {module_name} has no {class_name}{hint}")
    return found
