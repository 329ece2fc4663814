"""Which SMs each task gets: the device is cut once into equal units, and partitions are runs of units. Plain Python.

One cut and not one for each task: what separate splits of a device return lies on the same SMs, so that two tasks of
half the device would share one half and leave the other idle. Units of one split are disjoint, and the driver takes
several of them for one green context. Used by lanes/green.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpu_runtime.allocator import packed, whole_shares


@dataclass(frozen=True, kw_only=True)
class SmUnits:
    """A device of `num_sms` SMs cut into `num_units` units of `unit_sms`; the driver may leave some SMs in none."""

    num_sms: int
    num_units: int
    unit_sms: int

    @property
    def rest_sms(self) -> int:
        return self.num_sms - self.num_units * self.unit_sms


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The SMs of one or more tasks: `units`, or the whole device if None. They asked for `asked_sms`."""

    tasks: tuple[str, ...]
    asked_sms: int
    units: tuple[int, ...] | None

    def got_sms(self, device: SmUnits) -> int:
        return device.num_sms if self.units is None else len(self.units) * device.unit_sms


def overlapping(shares: Mapping[str, float], device: SmUnits) -> list[Partition]:
    """A partition for each task with the SMs of its share, to the nearest unit; shares may add up to more than 1.

    The runs are laid one after another around the ring of units: as long as shares add up to no more than 1 they do not
    touch, and beyond that every SM serves as many tasks as any other, give or take one.
    """
    partitions, start = [], 0
    for task, share in shares.items():
        asked = max(1, round(share * device.num_sms))
        if asked >= device.num_sms:
            partitions.append(Partition(tasks=(task,), asked_sms=device.num_sms, units=None))
            continue
        count = min(device.num_units, max(1, int(asked / device.unit_sms + 0.5)))
        units = tuple((start + offset) % device.num_units for offset in range(count))
        partitions.append(Partition(tasks=(task,), asked_sms=asked, units=units))
        start = (start + count) % device.num_units
    return partitions


def disjoint(shares: Mapping[str, float], work_s: Mapping[str, float], device: SmUnits) -> list[Partition]:
    """Partitions with no unit in common that take up all units, in proportion to `shares`.

    Where there are more tasks than units, tasks are packed by their work into one partition for each unit.
    """
    groups = [[task] for task in shares] if len(shares) <= device.num_units else packed(work_s, device.num_units)
    if len(groups) == 1:
        return [Partition(tasks=tuple(groups[0]), asked_sms=device.num_sms, units=None)]
    wanted = {str(index): sum(shares[task] for task in group) for index, group in enumerate(groups)}
    counts, total = whole_shares(wanted, device.num_units), sum(wanted.values())
    partitions, start = [], 0
    for index, group in enumerate(groups):
        count = counts[str(index)]
        asked = max(1, round(wanted[str(index)] / total * device.num_sms))
        partitions.append(Partition(tasks=tuple(group), asked_sms=asked, units=tuple(range(start, start + count))))
        start += count
    return partitions


def grown(own: Collection[int], count: int, num_users: Mapping[int, int]) -> tuple[int, ...]:
    """`own` units and as many others as make `count`: those that the fewest others use.

    Args:
        own: units of a task now.
        count: units that it should have.
        num_users: for each unit of the device, how many tasks use it.
    """
    others = sorted(num_users.keys() - set(own), key=lambda unit: (num_users[unit], unit))
    return (*own, *others[: max(0, count - len(own))])


def dealt(
    num_free: int, num_units: Mapping[str, int], left_s: Mapping[str, float], most: Mapping[str, int]
) -> dict[str, int]:
    """How many more units each part should get, so that the longest is shortened most.

    Args:
        num_free: units that nobody uses.
        num_units: units of each part now.
        left_s: seconds that each part has still to go with its units; taken to fall as units are added.
        most: units that a part may have; what no part may have stays free.
    """
    extra = dict.fromkeys(num_units, 0)
    for _ in range(num_free):
        growing = [part for part in num_units if num_units[part] + extra[part] < most[part]]
        if not growing:
            break
        longest = max(growing, key=lambda part: left_s[part] * num_units[part] / (num_units[part] + extra[part]))
        extra[longest] += 1
    return extra
