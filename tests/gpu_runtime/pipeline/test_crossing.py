"""What crosses the cut comes out as it went in, and nothing else gets through."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.pipeline.crossing import MAX_DEPTH, MAX_TENSORS, flatten, gradients_wanted, unflatten
from gpu_runtime.pipeline.session import ProtocolError, SplitError

LEAVES = st.one_of(
    st.integers(1, 9).map(lambda size: torch.full((size,), float(size))),
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@settings(deadline=None)
@given(value=VALUES)
def test_there_and_back(value: Any) -> None:
    assert same(value, unflatten(*flatten(value)))


def test_the_text_says_what_needs_a_gradient_and_how_it_is_laid_out() -> None:
    wide = torch.zeros(2, 3, 4, 4)
    last = wide.to(memory_format=torch.channels_last)
    structure, tensors = flatten((wide.clone().requires_grad_(), {"skip": last, "n": 3}))
    assert structure == '{"tuple":[{"tensor":"g"},{"dict":{"skip":{"tensor":"c"},"n":{"value":3}}}]}'
    assert gradients_wanted(structure) == (True, False)
    back = unflatten(structure, [tensor.detach().contiguous() for tensor in tensors])
    assert back[0].is_contiguous()
    assert back[1]["skip"].is_contiguous(memory_format=torch.channels_last)


def test_what_stands_in_two_places_crosses_once() -> None:
    """A block that works in place on one of them changes the other, on both sides of the cut."""
    once, other = torch.zeros(2), torch.zeros(2)
    structure, tensors = flatten((once, [other, once]))
    assert len(tensors) == 2
    back = unflatten(structure, [torch.ones(2), torch.ones(2)])
    assert back[0] is back[1][1]
    assert back[0] is not back[1][0]
    assert gradients_wanted(structure) == (False, False)


class Pair(NamedTuple):
    first: torch.Tensor


@pytest.mark.parametrize("value", [Pair(torch.zeros(1)), {1: torch.zeros(1)}, object(), float("nan"), {torch.zeros(1)}])
def test_other_things_do_not_cross(value: Any) -> None:
    with pytest.raises(SplitError, match=f"a {type(value).__name__} cannot cross the cut"):
        flatten(value)


def test_what_crosses_is_bounded() -> None:
    deep: Any = torch.zeros(1)
    for _ in range(MAX_DEPTH + 1):
        deep = (deep,)
    with pytest.raises(SplitError, match="nests deeper than 16"):
        flatten(deep)
    with pytest.raises(SplitError, match="too many"):
        flatten([torch.zeros(1) for _ in range(MAX_TENSORS + 1)])


def _deep(levels: int) -> str:
    return '{"tuple":[' * levels + '{"tensor":""}' + "]}" * levels


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ("", "is not JSON"),
        ("[" * 10_000, "is not JSON"),
        (" " * 20_000, "has 20000 characters"),
        ("[]", "is not an object of one key"),
        ('{"tensor":"","value":1}', "is not an object of one key"),
        ('{"tensor":"x"}', "of no known kind: 'tensor'"),
        ('{"tuple":{}}', "of no known kind: 'tuple'"),
        ('{"value":[1]}', "of no known kind: 'value'"),
        ('{"value":NaN}', "of no known kind: 'value'"),
        ('{"__class__":"os.system"}', "of no known kind: '__class__'"),
        ('{"tuple":[{"tensor":""},{"tensor":""}]}', "names more than its 1 tensors"),
        ('{"value":1}', "names fewer than its 1 tensors"),
        ('{"again":0}', "of no known kind: 'again'"),
        ('{"tuple":[{"tensor":""},{"again":1}]}', "of no known kind: 'again'"),
        ('{"tuple":[{"tensor":""},{"again":-1}]}', "of no known kind: 'again'"),
        (_deep(17), "nests deeper than 16"),
    ],
)
def test_structures_are_checked(structure: str, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        unflatten(structure, [torch.zeros(1)])


@settings(deadline=None)
@given(
    noise=st.recursive(
        st.one_of(st.none(), st.integers(), st.text()), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_text_does_more_than_be_refused(noise: Any) -> None:
    try:
        unflatten(json.dumps(noise), [])
    except ProtocolError:
        return
    assert set(noise) <= {"value", "tuple", "list", "dict"}
