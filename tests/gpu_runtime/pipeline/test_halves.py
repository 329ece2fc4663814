"""Keys of halves: every key in one half, and whole models only out of halves that fit."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.pipeline.halves import HalvesError, device_keys, join_halves, server_keys
from gpu_runtime.pipeline.makespan import micro_batch_sizes

KEYS = ("blocks.conv1.0.weight", "blocks.conv1.0.bias", "blocks.conv10.weight", "blocks.head.weight")
NAMES = ("conv1", "relu", "conv10", "head")


def test_keys_go_with_their_block() -> None:
    assert device_keys(KEYS, NAMES, 1) == KEYS[:2]
    assert device_keys(KEYS, NAMES, 2) == KEYS[:2]
    assert device_keys(KEYS, NAMES, 3) == KEYS[:3]
    assert server_keys(KEYS, NAMES, 3) == KEYS[3:]


@settings(deadline=None)
@given(
    blocks=st.lists(st.tuples(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(0, 3)), min_size=2, max_size=6)
)
def test_the_halves_of_every_cut_join_to_the_whole(blocks: list[tuple[str, int]]) -> None:
    names = list(dict(blocks))
    state = {
        f"blocks.{name}.{index}": f"{name}{index}" for name, count in dict(blocks).items() for index in range(count)
    }
    for split_point in range(1, len(names)):
        device, server = (
            {key: state[key] for key in keys(state, names, split_point)} for keys in (device_keys, server_keys)
        )
        assert join_halves(device, server, list(state)) == state
        assert join_halves(server, device, list(state)) == state


@pytest.mark.parametrize("split_point", [-1, 0, 4])
def test_cuts_that_leave_a_side_empty_are_refused(split_point: int) -> None:
    with pytest.raises(HalvesError, match=f"a model of 4 blocks cannot be cut at {split_point}"):
        device_keys(KEYS, NAMES, split_point)


def test_keys_outside_the_blocks_are_refused() -> None:
    with pytest.raises(HalvesError, match=r"'scale' lies in none of the blocks conv1, relu, conv10, head"):
        server_keys((*KEYS, "scale"), NAMES, 1)


@pytest.mark.parametrize(
    ("device", "server", "text"),
    [
        (KEYS[:2], KEYS[1:], "both halves hold 'blocks.conv1.0.bias'"),
        (KEYS[:2], KEYS[3:], "the halves lack 'blocks.conv10.weight'"),
        ((*KEYS[:2], "x"), KEYS[2:], "the halves hold 'x', which the model does not have"),
        ((), (), "the halves lack 'blocks.conv1.0.bias', 'blocks.conv1.0.weight', 'blocks.conv10.weight' and 1 more"),
    ],
)
def test_halves_that_do_not_fit_are_refused(device: tuple[str, ...], server: tuple[str, ...], text: str) -> None:
    with pytest.raises(HalvesError, match=text):
        join_halves(dict.fromkeys(device, 0), dict.fromkeys(server, 0), KEYS)


def test_halves_load_no_torch() -> None:
    code = "import sys, gpu_runtime.pipeline.halves; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@settings(deadline=None)
@given(batch=st.integers(1, 300), count=st.integers(1, 40))
def test_micro_batches_are_even_and_lose_nothing(batch: int, count: int) -> None:
    sizes = micro_batch_sizes(batch, count)
    assert sum(sizes) == batch
    assert len(sizes) == min(batch, count)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_nothing_cannot_be_cut() -> None:
    assert micro_batch_sizes(7, 3) == (3, 2, 2)
    for batch, count in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="cannot cut a batch of"):
            micro_batch_sizes(batch, count)
