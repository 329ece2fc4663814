"""What a client's runtime keeps for split training: ways to the services, what its link can do, what cannot be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gpu_runtime.apart import apart
from gpu_runtime.contracts import Emulation, EncodingCost, Profile, SplitAccess
from gpu_runtime.pipeline.encoding_costs import measure_encodings
from gpu_runtime.pipeline.grpc_channels import GrpcChannels
from gpu_runtime.pipeline.probe import measure_link
from gpu_runtime.pipeline.session import Channel, SplitError
from gpu_runtime.pipeline.stages import changing_state, unsplittable
from gpu_runtime.randomness import seeded_draws
from gpu_runtime.workload import Workload

ChannelFactory = Callable[[SplitAccess, Emulation | None], Channel]


class DeviceEnd:
    """Kept from round to round.

    Args:
        channel_factory: makes the channel to the split service of a plan, over an emulated link if there is one; None
            for gRPC.
    """

    def __init__(self, channel_factory: ChannelFactory | None = None) -> None:
        self._channel_factory = channel_factory
        self._channels = GrpcChannels()
        self._unsplittable: dict[str, str] = {}
        self._encodings: tuple[EncodingCost, ...] | None = None

    def channel(self, client: str, access: SplitAccess, emulation: Emulation | None, *, probe: bool = False) -> Channel:
        """A new channel; with `probe` it measures its link first."""
        if self._channel_factory is not None:
            return self._channel_factory(access, emulation)
        return self._channels.channel(client, access, emulation, probe=probe)

    def with_link(
        self, profile: Profile, access: SplitAccess, emulation: Emulation | None, device: torch.device
    ) -> Profile:
        """`profile` with what the link to the split service can do. Nothing can be split where there is none."""
        if self._encodings is None:
            self._encodings = apart(lambda: measure_encodings(device))
        try:
            channel = self.channel(profile.client, access, emulation, probe=True)
            link = measure_link(channel, access.run, profile.client)
        except SplitError as error:
            tasks = tuple(replace(task, unsplittable=task.unsplittable or str(error)) for task in profile.tasks)
            return replace(profile, tasks=tasks)
        return replace(
            profile,
            uplink_bytes_per_s=link.uplink_bytes_per_s,
            downlink_bytes_per_s=link.downlink_bytes_per_s,
            latency_s=link.latency_s,
            message_s=link.message_s,
            encodings=self._encodings,
        )

    def why_unsplittable(self, workload: Workload) -> str:
        """Why the workload's model cannot be cut, empty where it can. Models are not built for this twice."""
        if workload.name not in self._unsplittable:
            with seeded_draws(0, torch.device("cpu")):
                model = workload.build_model()
            reason = unsplittable(model.train())
            if not reason:
                inputs, _ = workload.synthetic_batch(2, torch.Generator().manual_seed(0))
                reason = changing_state(model, inputs)
            self._unsplittable[workload.name] = reason
        return self._unsplittable[workload.name]

    def clear(self) -> None:
        """Forget what is known of workloads."""
        self._unsplittable.clear()
