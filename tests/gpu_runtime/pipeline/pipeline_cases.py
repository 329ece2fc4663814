"""Random and hand-made costs of split training for the tests of its formulas."""

import random

from hypothesis import strategies as st

from gpu_runtime.pipeline.makespan import Affine, CutCost

STAGES = ("device_forward", "uplink", "server", "downlink", "device_backward")
ALONE = ("latency_up_s", "latency_down_s", "update_s", "server_update_s")

# Zeros, ties and seconds of very different size.
SECONDS = st.sampled_from([0.0, 0.001, 0.5, 1.0, 2.0]) | st.floats(0.0, 10.0)
AFFINES = st.builds(Affine, call_s=SECONDS, example_s=SECONDS)
CUTS = st.builds(
    CutCost,
    split_point=st.just(1),
    **dict.fromkeys(STAGES, AFFINES),
    **dict.fromkeys(ALONE, SECONDS),
)


def random_cut(draw: random.Random, *, server_update: bool = True) -> CutCost:
    def seconds() -> float:
        return draw.choice([0.0, 1.0, draw.random(), 10 ** draw.uniform(-3, 1)])

    return CutCost(
        split_point=1,
        **{name: Affine(call_s=seconds(), example_s=seconds()) for name in STAGES},
        latency_up_s=seconds(),
        latency_down_s=seconds(),
        update_s=seconds(),
        server_update_s=seconds() if server_update else 0.0,
    )


def even_cut(example_s: float = 1.0, **changed: Affine | float) -> CutCost:
    """All five stages take `example_s` an example and nothing else."""
    stages = {name: changed.pop(name, Affine(example_s=example_s)) for name in STAGES}
    return CutCost(split_point=1, **stages, **changed)  # type: ignore[arg-type]
