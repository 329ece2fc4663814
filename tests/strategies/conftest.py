"""Keeps the suite fast."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Flower's qfedavg and bulyan collect garbage for every reply; leave what is imported out of that."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
