"""Which tasks a run trains and how their data is dealt out: the `data.*` part of the config."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runtime.contracts import MAX_INTEGER, DataSpec, Partition
from gpu_runtime.settings import setting

PARTITIONERS = (
    "iid",
    "dirichlet",
    "natural-id",
    "natural-id-or-iid",
    "natural-id-or-dirichlet",
    "pathological",
    "shard",
    "linear",
    "square",
    "exponential",
)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The same on server and clients of a run; a real node's own config overrides `directory`."""

    suite: str = setting("suite", "driving", "named list of tasks")
    tasks: str = setting("tasks", "", "comma-separated tasks instead of a suite: names or 'package.module:Class'")
    seed: int = setting("seed", 1, "seed of everything random", minimum=0, maximum=MAX_INTEGER)
    directory: str = setting("data.directory", "", "where data on disk lies; empty: data inside installed packages")
    download: bool = setting("data.download", False, "let torchvision's loaders download what is missing")
    partitioner: str = setting("data.partitioner", "iid", "how data is dealt out to clients", choices=PARTITIONERS)
    alpha: float = setting("data.alpha", 0.5, "concentration of the dirichlet partitioner", above=0.0)
    classes_per_partition: int = setting(
        "data.classes-per-partition", 2, "classes a client of the pathological and shard partitioners holds", minimum=1
    )

    def spec(self, partition: Partition) -> DataSpec:
        """Data of one task on one client."""
        return DataSpec(
            directory=self.directory,
            download=self.download,
            partitioner=self.partitioner,
            alpha=self.alpha,
            classes_per_partition=self.classes_per_partition,
            seed=self.seed,
            partition=partition,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a client trains, beyond what its plan says."""

    deterministic: bool = setting(
        "deterministic", False, "one thread per lane, so that weights repeat bit for bit on the CPU"
    )
    local_epochs: float = setting(
        "local-epochs", 1.0, "passes over a client's data when a message brings no plan", above=0.0, maximum=100.0
    )
