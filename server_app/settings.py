"""All settings of a run, parsed once from Flower's flat config, with every fault reported together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_runtime.contracts import MEASURED, VIRTUAL
from gpu_runtime.settings import Scalar, SettingsError, SharingSettings, keys_of, nearest, parse, setting, unknown_keys
from strategies.options import StrategyOptions
from strategies.split_settings import SplitSettings
from tasks.errors import NAME_PATTERN, TaskError
from tasks.registry import task_name, task_refs
from tasks.settings import DataSettings, TrainingSettings

__all__ = ["Settings", "SettingsError"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run as a whole: how long, with whom, where to."""

    rounds: int = setting("rounds", 5, "rounds to train", minimum=1, maximum=100_000)
    out_dir: str = setting("out-dir", "", "absolute folder for outputs; empty: paceline-runs in the home folder")
    min_clients: int = setting("min-clients", 1, "clients that must have joined before round 1", minimum=1)
    join_timeout_s: float = setting("join-timeout-s", 120.0, "seconds to wait for them", above=0.0, maximum=86_400.0)
    profile_timeout_s: float = setting(
        "profile-timeout-s", 300.0, "seconds to wait for the clients' profiles", above=0.0, maximum=86_400.0
    )
    round_timeout_s: float = setting(
        "round-timeout-s", 3600.0, "seconds to wait for the replies of a round", above=0.0, maximum=86_400.0
    )
    task_options: str = setting(
        "task-options", "", "comma-separated '<task>.learning-rate=0.01' and '<task>.batch-size=64'"
    )
    trace: bool = setting("trace", True, "record which step ran where, in trace.json")


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The simulated fleet; a deployment on real machines sets `fleet.name` to the empty string."""

    name: str = setting("fleet.name", "garage", "a fleet's name, the path of its TOML file, or empty for real machines")
    clock: str = setting("fleet.clock", VIRTUAL, "seconds of a simulated fleet", choices=(VIRTUAL, MEASURED))


SECTIONS = (RunSettings, FleetSettings, DataSettings, TrainingSettings, SharingSettings, StrategyOptions, SplitSettings)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run was told. `task_refs` are the tasks in order."""

    run: RunSettings
    fleet: FleetSettings
    data: DataSettings
    training: TrainingSettings
    sharing: SharingSettings
    strategy: StrategyOptions
    split: SplitSettings
    task_refs: tuple[str, ...]

    @classmethod
    def from_run_config(cls, flat: Mapping[str, Scalar]) -> Settings:
        """Parse Flower's flattened run config.

        Raises:
            SettingsError: with one line for every fault found.
        """
        faults = unknown_keys(flat, SECTIONS)
        run, fleet, data, training, sharing, strategy, split = parse(flat, SECTIONS, faults)
        refs: tuple[str, ...] = ()
        try:
            refs = task_refs(data.suite, data.tasks)
        except TaskError as error:
            faults.append(str(error))
        if run.out_dir and not Path(run.out_dir).is_absolute():
            faults.append(
                f"out-dir must be an absolute path, since Flower's processes run elsewhere; not {run.out_dir!r}"
            )
        rates, sizes = _task_options(run.task_options, faults)
        names = [task_name(ref) for ref in refs]
        for task in [] if not refs else dict.fromkeys([*rates, *sizes]):
            if task not in names:
                faults.append(f"task-options: the run has no task {task!r}{nearest(task, names)}")
        faults += [*strategy.faults(), *split.faults()]
        if faults:
            raise SettingsError(list(dict.fromkeys(faults)))
        strategy = replace(
            strategy,
            seed=data.seed,
            sharing_mode=sharing.mode,
            deterministic=training.deterministic,
            trace=run.trace,
            learning_rates=rates,
            batch_sizes=sizes,
        )
        return cls(
            run=run,
            fleet=fleet,
            data=data,
            training=training,
            sharing=sharing,
            strategy=strategy,
            split=split,
            task_refs=refs,
        )

    def flat(self) -> dict[str, Scalar]:
        """The settings as `key = value`, defaults included."""
        found: dict[str, Scalar] = {}
        for section in (self.run, self.fleet, self.data, self.training, self.sharing, self.strategy, self.split):
            for key, field in keys_of(type(section)).items():
                found[key] = getattr(section, field.name)
        return found


def _task_options(text: str, faults: list[str]) -> tuple[dict[str, float], dict[str, int]]:
    """`digits.learning-rate=0.01, detection.batch-size=64` as two maps by task name."""
    rates: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        left, _, value = part.partition("=")
        task, _, option = left.strip().rpartition(".")
        try:
            if not NAME_PATTERN.fullmatch(task):
                raise ValueError
            if option == "learning-rate" and 0 < (rate := float(value)) < 1e6:
                rates[task] = rate
            elif option == "batch-size" and (size := int(value)) > 0:
                sizes[task] = size
            else:
                raise ValueError
        except ValueError:
            faults.append(
                f"task-options: {part!r} is not '<task>.learning-rate=<number above 0>' "
                "or '<task>.batch-size=<whole number above 0>'"
            )
    return rates, sizes


def describe() -> list[tuple[str, Any, str]]:
    """Key, default and help of every setting, in order: what the config reference and pyproject.toml must show."""
    rows: dict[str, tuple[str, Any, str]] = {}
    for section in SECTIONS:
        for key, field in keys_of(section).items():
            rows.setdefault(key, (key, field.default, field.metadata["help"]))
    return list(rows.values())
