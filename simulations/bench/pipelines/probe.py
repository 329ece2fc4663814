"""What the channel measures of an emulated link at the start of a session: what everything is predicted from."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from gpu_runtime.contracts import Emulation
from gpu_runtime.pipeline.channel import GrpcChannel
from gpu_runtime.pipeline.cut_costs import Link
from gpu_runtime.pipeline.link import EmulatedLink
from gpu_runtime.pipeline.session import SessionKey, SessionSpec
from simulations.bench.pipelines.costs import Tiny
from simulations.bench.pipelines.service import RUN, Service, start_arrays


def probed_link(service: Service, emulation: Emulation) -> Link:
    """Rates and latency as probed; where the probe says nothing, as emulated. A tenth of a second.

    Raises:
        SplitError: the service cannot be reached.
    """
    tiny = Tiny("tiny", batch_size=2)
    service.serve(tiny, start_arrays(tiny))
    key = SessionKey(run=RUN, server_round=service.server_round, attempt=0, client="probe", task=tiny.name)
    spec = SessionSpec(key=key, split_point=1, micro_batches=1, encoding="fp32", num_examples=2, batch_size=2, seed=0)
    access, link = service.access, EmulatedLink(replace(emulation, slowdown=1.0))
    with closing(GrpcChannel(access.address, access.token, link=link)) as channel:
        channel.open(spec)
        probed = channel.statistics
    return Link(
        uplink_bytes_per_s=probed.uplink_bytes_per_s or emulation.uplink_bytes_per_s,
        downlink_bytes_per_s=probed.downlink_bytes_per_s or emulation.downlink_bytes_per_s,
        latency_s=emulation.latency_s if probed.latency_s is None else probed.latency_s,
        message_s=emulation.message_s,
    )
