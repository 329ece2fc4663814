"""Every random choice of a client's training, as a pure function of the run's seed: seeds, example order, dropout."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

# Modules draw from torch's default generators, which all threads of a process share: whoever draws holds this lock.
_default_generators = threading.Lock()


def seed_of(seed: int, server_round: int, client: str, task: str, purpose: str) -> int:
    """A seed below 2**63 that differs whenever any of the arguments does."""
    text = "\x1f".join((str(seed), str(server_round), client, task, purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sample_batches(num_held: int, num_wanted: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Indices of `num_wanted` examples out of `num_held`, in batches; the last batch may be smaller.

    Examples come in shuffled epochs, one after the other: each is used floor or ceil of `num_wanted / num_held` times.
    """
    generator = torch.Generator().manual_seed(seed)
    pending = torch.empty(0, dtype=torch.long)
    left = num_wanted
    while left > 0:
        while len(pending) < min(batch_size, left):
            pending = torch.cat((pending, torch.randperm(num_held, generator=generator)))
        size = min(batch_size, left)
        yield pending[:size]
        pending = pending[size:]
        left -= size


@contextlib.contextmanager
def seeded_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's default generators start from `seed` and belong to this thread; then as they were."""
    devices = [device] if device.type == "cuda" else []
    with _default_generators, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def generator_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """State of the default generators that a step on `device` may draw from."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)
