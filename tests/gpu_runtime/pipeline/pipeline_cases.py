"""Random and hand-made costs of split training for the tests of its formulas."""

import random

from hypothesis import strategies as st

from gpu_runtime.contracts import BlockCost, EncodingCost
from gpu_runtime.pipeline.cut_costs import Link, SplitTask
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


def block(seconds: float, boundary_bytes: int, call_s: float = 0.0) -> BlockCost:
    """Forward and backward take as long."""
    return BlockCost(
        forward_s=seconds,
        backward_s=seconds,
        boundary_bytes=boundary_bytes,
        forward_call_s=call_s,
        backward_call_s=call_s,
    )


def random_split(draw: random.Random, *, max_blocks: int = 5, max_batch: int = 24) -> SplitTask:
    """A task on a device a few to a hundred times as slow as the server."""
    num_blocks, batch_size = draw.randint(2, max_blocks), draw.randint(1, max_batch)
    calls = draw.choice([0.0, 0.01])
    blocks = tuple(
        block(10 ** draw.uniform(-3, -1), 4 * draw.randint(1, 5000), calls * draw.random()) for _ in range(num_blocks)
    )
    factor = 1 / draw.choice([2, 30, 100])
    server = tuple(block(each.forward_s * factor, each.boundary_bytes, each.forward_call_s * factor) for each in blocks)
    return SplitTask(
        task="t",
        batch_size=batch_size,
        blocks=blocks,
        server_blocks=server,
        unsplit_step_s=batch_size * sum(each.forward_s + each.backward_s for each in blocks),
        target_bytes=draw.choice([0, 8]),
        update_s=draw.choice([0.0, 0.01]),
        server_update_s=draw.choice([0.0, 0.01, 1.0]),
        device_encodings=(EncodingCost(encoding="int8", encode_s=draw.choice([0.0, 1e-6]), decode_s=1e-7),),
    )


def random_link(draw: random.Random) -> Link:
    return Link(
        uplink_bytes_per_s=draw.choice([None, 10 ** draw.uniform(4, 7)]),
        downlink_bytes_per_s=draw.choice([None, 10 ** draw.uniform(4, 7)]),
        latency_s=draw.choice([0.0, 0.02]),
        message_s=draw.choice([0.0, 0.001, 0.05]),
    )
