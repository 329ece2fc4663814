"""Encodings are measured without leaving a trace in torch's random state."""

import math

import torch

from gpu_runtime.contracts import ENCODINGS
from gpu_runtime.pipeline.encoding_costs import measure_encodings


def test_every_encoding_has_a_cost() -> None:
    before = torch.get_rng_state()
    costs = measure_encodings()
    assert tuple(cost.encoding for cost in costs) == ENCODINGS
    assert all(0 <= seconds < math.inf for cost in costs for seconds in (cost.encode_s, cost.decode_s))
    assert torch.equal(torch.get_rng_state(), before)
