"""How a batch is cut into micro-batches. Plain Python."""

from __future__ import annotations


def micro_batch_sizes(batch: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` micro-batches of `batch` examples: as even as can be, larger ones first, none empty.

    A batch of fewer than `count` examples is cut into single ones.

    Raises:
        ValueError: nothing to cut, or into nothing.
    """
    if batch < 1 or count < 1:
        raise ValueError(f"{batch} examples cannot be cut into {count} micro-batches")
    count = min(batch, count)
    size, larger = divmod(batch, count)
    return (size + 1,) * larger + (size,) * (count - larger)
