"""Who is compared in one setting, and what each chooses from the measured costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu_runtime.contracts import ENCODINGS
from gpu_runtime.pipeline.baselines import pipar_choice, splitfed_choice
from gpu_runtime.pipeline.cut_costs import Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.planner import Choice, choose, split_choice, whole_choice

FL, SPLITFED, PIPAR, GRID, OURS, OURS_ANY = "fl", "splitfed", "pipar", "grid", "ours", "ours-any"
GRID_COUNTS = (1, 2, 4, 8, 16, 32)

# Cut, micro-batches, encoding: variants that choose the same are the same, and are measured once.
Key = tuple[int | None, int, str]
WHOLE: Key = (None, 1, "fp32")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the variants of one setting have chosen. `grid` holds every point, the fastest by prediction first."""

    choices: Mapping[str, Choice]
    grid: tuple[Choice, ...]

    def to_measure(self, num_grid: int) -> dict[Key, Choice]:
        """Distinct choices of all variants and the first `num_grid` points of the grid."""
        return {key_of(choice): choice for choice in (*self.choices.values(), *self.grid[:num_grid])}


def key_of(choice: Choice) -> Key:
    return choice.split_point, choice.micro_batches, choice.encoding


def compared(split: SplitTask, link: Link) -> Compared:
    """All variants' choices; ours may also train whole, where nothing is faster."""
    return Compared(
        choices={
            FL: whole_choice(split),
            SPLITFED: splitfed_choice(split, link),
            PIPAR: pipar_choice(split, link),
            OURS: choose(split, link),
            OURS_ANY: choose(split, link, SplitOptions(encodings=ENCODINGS)),
        },
        grid=grid_choices(split, link),
    )


def grid_choices(split: SplitTask, link: Link, counts: Iterable[int] = GRID_COUNTS) -> tuple[Choice, ...]:
    """Every cut with every number of micro-batches, lossless, the fastest by prediction first."""
    found = [
        split_choice(split, cut, count)
        for cut in cuts(split, link, SplitOptions())
        for count in counts
        if count <= split.batch_size
    ]
    return tuple(sorted(found, key=lambda choice: choice.step_s))
