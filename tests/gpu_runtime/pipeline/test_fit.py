"""Lines through timings: by hand, exact where they are exact, never negative."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.pipeline.fit import fit_affine
from gpu_runtime.pipeline.makespan import Affine

SECONDS = st.floats(0.0, 100.0)


@pytest.mark.parametrize(
    ("samples", "call_s", "example_s"),
    [
        ([(1, 3.0), (4, 6.0)], 2.0, 1.0),
        ([(4, 6.0)], 0.0, 1.5),
        # One disturbed timing of three.
        ([(1, 3.0), (1, 50.0), (1, 3.0), (4, 6.0)], 2.0, 1.0),
        # No dearer, and cheaper, with more examples.
        ([(1, 2.0), (4, 2.0)], 2.0, 0.0),
        ([(1, 3.0), (4, 2.0)], 2.0 + 4 / 13, 0.0),
        # Dearer than in proportion: between 1 and 2 s an example, by weights 1 and 1/4 of squares 1 and 4.
        ([(1, 1.0), (4, 8.0)], 0.0, 1.2),
        ([(1, 0.0), (4, 0.0)], 0.0, 0.0),
    ],
)
def test_lines_by_hand(samples: list[tuple[int, float]], call_s: float, example_s: float) -> None:
    found = fit_affine(samples)
    assert (found.call_s, found.example_s) == pytest.approx((call_s, example_s))


@given(SECONDS, SECONDS, st.sets(st.integers(1, 500), min_size=2, max_size=4))
def test_exact_lines_are_found(call_s: float, example_s: float, sizes: set[int]) -> None:
    line = Affine(call_s=call_s, example_s=example_s)
    found = fit_affine((size, line.at(size)) for size in sizes)
    for size in sizes:
        assert found.at(size) == pytest.approx(line.at(size), rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.integers(1, 500), SECONDS), min_size=1, max_size=8))
def test_no_part_is_negative_and_no_fit_is_far_off(samples: list[tuple[int, float]]) -> None:
    found = fit_affine(samples)  # an Affine refuses negative and endless seconds itself
    sizes, seconds = zip(*samples, strict=True)
    assert found.at(min(sizes)) <= 2 * max(seconds) + 1e-9
    assert found.at(max(sizes)) <= max(sizes) * max(seconds) + 1e-9


@pytest.mark.parametrize(
    ("samples", "name"),
    [([], "samples"), ([(0, 1.0)], "num_examples"), ([(1, -1.0)], "seconds"), ([(1, float("nan"))], "seconds")],
)
def test_nonsense_is_named(samples: list[tuple[int, float]], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        fit_affine(samples)
