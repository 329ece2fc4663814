"""Pipelined split training against classic FL, SplitFed, PiPar's rule and a grid, over emulated links.

The device is emulated (one thread, slowed down), the service is real and in this process, between them is gRPC on
loopback. The method is described in docs/benchmarks.md; the parts are in `pipelines/`.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from gpu_runtime.apart import narrow
from gpu_runtime.bench.budget import Budget
from gpu_runtime.bench.channel_throughput import channel_throughput
from gpu_runtime.bench.rounds import Gate
from gpu_runtime.contracts import Emulation
from gpu_runtime.device import CPU, discover
from gpu_runtime.pipeline.cut_costs import Link, SplitTask
from simulations.bench.pipelines.accuracy import accuracy_rows
from simulations.bench.pipelines.clients import measure_clients
from simulations.bench.pipelines.costs import BaseCosts, base_costs, split_task
from simulations.bench.pipelines.memory import keep_freed_memory
from simulations.bench.pipelines.models import MODELS, ImageWorkload
from simulations.bench.pipelines.probe import probed_link
from simulations.bench.pipelines.results import headline_of, row_of, targets_of, validation_of
from simulations.bench.pipelines.rounds import Amount, RealTime
from simulations.bench.pipelines.service import Service, start_arrays
from simulations.bench.pipelines.table import table
from simulations.bench.pipelines.variants import FL, OURS, Compared, compared
from simulations.links import PRESETS, load_link

__all__ = ["add_arguments", "run", "table"]

Say = Callable[[str], None]
LINKS = ("4g", "4g-plus", "wifi", "lan")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        total_s: seconds that the whole benchmark may take.
        amount: rounds and iterations of a setting in real time.
        num_grid: points of the grid, the best by prediction, that are measured.
        costs_s: seconds for measuring the blocks of a model on each side, more where two passes take longer.
        clients: settings that are measured with several clients too.
        num_clients: how many.
        channel_s: seconds for each direction of the channel.
    """

    total_s: float
    amount: Amount
    num_grid: int
    costs_s: float
    clients: tuple[str, ...]
    num_clients: int = 4
    channel_s: float = 1.0


QUICK = Size(
    total_s=150.0,
    amount=Amount(rounds=5, iterations=2, run_s=0.5),
    num_grid=1,
    costs_s=0.5,
    clients=(),
    channel_s=0.5,
)
FULL = Size(
    total_s=2500.0,
    amount=Amount(rounds=5, iterations=5, run_s=3.0),
    num_grid=3,
    costs_s=2.0,
    clients=("resnet18/4g", "mobilenet-v3-large/4g"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model over one link, as far as it is known before it is measured."""

    name: str
    model: str
    link: str
    emulation: Emulation
    probed: Link
    split: SplitTask

    def compared(self) -> Compared:
        return compared(self.split, self.probed)

    def seconds(self, amount: Amount, num_grid: int) -> float:
        """About what measuring it in real time takes."""
        choices = self.compared().to_measure(num_grid).values()
        return sum(amount.seconds_of(choice, self.emulation.slowdown) for choice in choices)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told beside the common options."""
    parser.add_argument("--models", default="", help=f"comma-separated; default: {','.join(MODELS)}")
    parser.add_argument("--links", default="", help=f"comma-separated, of {','.join(PRESETS)}; default: all but 3g")
    parser.add_argument("--slowdown", type=float, default=30.0, help="how much slower the device is than a core here")
    parser.add_argument("--batch-size", type=int, default=32, help="examples of an iteration")
    parser.add_argument("--server-cores", type=int, default=0, help="cores of the service; default: all there are")
    parser.add_argument("--clients", type=int, metavar="K", default=0, help="K devices on one service too; full: 4")
    parser.add_argument(
        "--accuracy",
        action="store_true",
        help="final accuracy of lossy encodings against fp32 too: a quarter of an hour more",
    )
    parser.add_argument("--budget", type=float, default=0.0, metavar="SECONDS", help="instead of the size's own")


def run(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """The benchmark's JSON object. Raises ValueError on options that cannot be followed."""
    models, links = _names(options.models, tuple(MODELS), MODELS), _names(options.links, LINKS, PRESETS)
    for name, least in (("slowdown", 1), ("batch_size", 1), ("server_cores", 0), ("clients", 0), ("budget", 0)):
        if not getattr(options, name) >= least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(options, name)}")
    size = QUICK if options.quick else FULL
    if options.clients:
        featured = size.clients or (f"{models[-1]}/{links[-1]}",)
        size = replace(size, num_clients=options.clients, clients=featured)
    if options.budget:
        size = replace(size, total_s=options.budget)
    return measure(
        models,
        links,
        size=size,
        slowdown=options.slowdown,
        batch_size=options.batch_size,
        server_cores=options.server_cores,
        accuracy=options.accuracy,
        say=say,
    )


def measure(
    models: Sequence[str],
    links: Sequence[str],
    *,
    size: Size,
    slowdown: float,
    batch_size: int = 32,
    server_cores: int = 0,
    accuracy: bool = False,
    gate: Gate | None = None,
    emulations: Mapping[str, Emulation] | None = None,
    seed: int = 0,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        models, links: names; each pair is a setting.
        size: `QUICK`, `FULL` or another.
        slowdown: of the emulated device.
        batch_size: examples of an iteration.
        server_cores: of the service; 0 for all.
        accuracy: compare final accuracies too.
        gate: when a run counts as disturbed.
        emulations: links by name instead of the presets.
        seed: of the order of variants.
        say: called with a line of progress now and then.

    Raises:
        SplitError: a session failed.
    """
    gate, draw, budget = gate or Gate(max_repeats=2, patience_fraction=0.2), random.Random(seed), Budget(size.total_s)
    host = discover(server_cores, CPU)
    kept = keep_freed_memory()
    throughput = channel_throughput(seconds=size.channel_s)
    channel = {direction: getattr(throughput, f"{direction}_bytes_per_s") / 1e6 for direction in ("up", "down", "both")}
    say(f"channel: {channel['up']:.0f} MB/s up, {channel['down']:.0f} down; {budget.left_s:.0f} s left")
    with narrow(), closing(Service(host.num_cores)) as service:
        bench = _Bench(service, size, gate, slowdown, batch_size, draw)
        settings = bench.settings(models, {name: _emulation(name, emulations, slowdown) for name in links}, say)
        in_real_time = _affordable(settings, size, budget)
        rows = [bench.row(setting, real=setting.name in in_real_time, say=say, budget=budget) for setting in settings]
        clients, not_measured = bench.clients(settings, rows, budget, say)
    with narrow():
        lost = accuracy_rows(say) if accuracy else []
    return {
        "name": "pipeline",
        "device": host.name,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "settings": {
            "models": list(models),
            "links": {setting.link: asdict(setting.emulation) for setting in settings},
            "probed": {setting.link: asdict(setting.probed) for setting in settings},
            "slowdown": slowdown,
            "batch_size": batch_size,
            "server_cores": host.num_cores,
            "keeps_freed_memory": kept,
            "seed": seed,
            "size": asdict(size),
            "gate": asdict(gate),
            "spent_s": budget.spent_s,
        },
        "rows": rows,
        "not_measured": not_measured,
        "clients": clients,
        "validation": validation_of(rows),
        "channel": channel,
        "accuracy": lost,
        "headline": headline_of(rows, clients, channel),
        "targets": targets_of(rows, clients, channel, lost),
    }


class _Bench:
    """Everything about one service."""

    def __init__(
        self, service: Service, size: Size, gate: Gate, slowdown: float, batch_size: int, draw: random.Random
    ) -> None:
        self._service, self._size, self._gate = service, size, gate
        self._slowdown, self._batch_size = slowdown, batch_size
        self._real_time = RealTime(service, gate=gate, draw=draw)
        self._base: BaseCosts = base_costs(service)
        self._arrays: dict[str, dict[str, np.ndarray]] = {}

    def settings(self, models: Sequence[str], links: Mapping[str, Emulation], say: Say) -> list[Setting]:
        """All settings, with costs measured once for each model: to see what can be measured in real time."""
        probed = {name: probed_link(self._service, emulation) for name, emulation in links.items()}
        found = []
        for model in models:
            split = self._costs(model)
            say(f"{model}: an iteration of classic FL takes {split.unsplit_step_s:.2f} s on the device")
            for link, emulation in links.items():
                name = f"{model}/{link}"
                found.append(
                    Setting(name=name, model=model, link=link, emulation=emulation, probed=probed[link], split=split)
                )
        return found

    def row(self, setting: Setting, *, real: bool, budget: Budget, say: Say) -> dict[str, Any]:
        """One setting; in real time its costs are measured anew, right before."""
        workload, arrays = self._workload(setting.model), self._start(setting.model)
        samples = None
        if real:
            setting = replace(setting, split=self._costs(setting.model))
        found = setting.compared()
        if real:
            self._service.serve(workload, arrays)
            choices = found.to_measure(self._size.num_grid)
            samples = self._real_time.measure(workload, arrays, choices, setting.emulation, self._size.amount)
        model_bytes = sum(array.nbytes for array in arrays.values())
        row = row_of(
            setting.model,
            setting.link,
            setting.emulation,
            setting.probed,
            self._batch_size,
            model_bytes,
            found,
            samples,
        )
        ours = row["variants"][OURS]
        say(
            f"{setting.name} ({row['clock']}): ours {ours['iteration_s']:.2f} s, predicted {ours['predicted_s']:.2f}, "
            f"{1 / ours['over_fl']['median']:.1f} times as fast as fl; {budget.left_s:.0f} s left"
        )
        return row

    def clients(
        self, settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]], budget: Budget, say: Say
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Rows with several clients, and why others are missing."""
        found: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        rows_by_name = {row["setting"]: row for row in rows}
        for setting in settings:
            if setting.name not in self._size.clients:
                continue
            num_clients, name = self._size.num_clients, f"{setting.name}x{self._size.num_clients}"
            workload, arrays = self._workload(setting.model), self._start(setting.model)
            split = self._costs(setting.model, server_cores=1)
            row = rows_by_name[setting.name]
            slowest_s = row["variants"]["splitfed"]["iteration_s"]
            iterations = max(3, min(20, int(20.0 / slowest_s)))
            expected_s = 2 * (iterations + 1) * (slowest_s + num_clients * 0.1)
            if budget.left_s < expected_s:
                missing[name] = f"no time left: {budget.left_s:.0f} s, and about {expected_s:.0f} s are needed"
                continue
            self._service.serve(workload, arrays)
            try:
                each = measure_clients(
                    self._service,
                    workload,
                    arrays,
                    split,
                    setting.probed,
                    setting.emulation,
                    setting=setting.name,
                    num_clients=num_clients,
                    iterations=iterations,
                    fl_s=row["variants"][FL]["iteration_s"],
                    max_foreign_cores=self._gate.max_foreign_cores,
                )
            except ValueError as error:
                missing[name] = str(error)
                continue
            found.append(each)
            say(f"{name}: {each['iteration_s']:.2f} s, server idle {each['server_idle_over_floor']:.2f} of the floor")
        return found, missing

    def _workload(self, model: str) -> ImageWorkload:
        return ImageWorkload(model, self._batch_size)

    def _start(self, model: str) -> dict[str, np.ndarray]:
        if model not in self._arrays:
            self._arrays[model] = start_arrays(self._workload(model))
        return self._arrays[model]

    def _costs(self, model: str, server_cores: int = 0) -> SplitTask:
        return split_task(
            self._workload(model),
            self._service,
            self._base,
            slowdown=self._slowdown,
            budget_s=self._size.costs_s,
            server_cores=server_cores,
        )


def _affordable(settings: Sequence[Setting], size: Size, budget: Budget) -> set[str]:
    """Settings for which there is time, the cheapest first; a fifth is kept for repeats and for several clients."""
    left_s = 0.8 * budget.left_s
    chosen = set()
    for setting in sorted(settings, key=lambda each: each.seconds(size.amount, size.num_grid)):
        need_s = setting.seconds(size.amount, size.num_grid) + 4 * size.costs_s + 0.5
        if need_s > left_s:
            break
        left_s -= need_s
        chosen.add(setting.name)
    return chosen


def _emulation(name: str, emulations: Mapping[str, Emulation] | None, slowdown: float) -> Emulation:
    return replace(load_link(name) if emulations is None else emulations[name], slowdown=slowdown)


def _names(text: str, default: tuple[str, ...], known: Mapping[str, Any]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or default
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown names {unknown}; there are {', '.join(known)}")
    return names
