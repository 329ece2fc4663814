"""Channels to the split services of plans, each client's over its own emulated link."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any, cast

from gpu_runtime.contracts import Emulation, SplitAccess
from gpu_runtime.pipeline.session import Channel, LinkError

# A process of a simulation may stand for many clients, one after the other.
MAX_LINKS = 256


class GrpcChannels:
    """Makes channels. A client's channels in one run share its emulated link, whose time goes on from round to round.

    gRPC is imported when it is needed: whole models train without it.
    """

    def __init__(self) -> None:
        self._links: OrderedDict[tuple[str, str, Emulation], Any] = OrderedDict()

    def channel(self, client: str, access: SplitAccess, emulation: Emulation | None, *, probe: bool = False) -> Channel:
        """A new channel for one session. With `probe` it measures its link first; without, its messages do.

        Raises:
            LinkError: this machine has no gRPC.
        """
        try:
            module = importlib.import_module("gpu_runtime.pipeline.channel")
        except ImportError as error:
            reason = f"the split service at {access.address} cannot be reached: gRPC is missing here ({error})"
            raise LinkError(reason) from None
        return cast(
            Channel,
            module.GrpcChannel(
                access.address,
                access.token,
                certificate=access.certificate,
                deadlines=module.Deadlines(
                    connect_s=access.resume_s, message_s=access.message_deadline_s, resume_s=access.resume_s
                ),
                probe=probe,
                link=None if emulation is None else self._link(client, access.run, emulation),
            ),
        )

    def _link(self, client: str, run: str, emulation: Emulation) -> Any:
        key = (client, run, emulation)
        if key not in self._links:
            self._links[key] = importlib.import_module("gpu_runtime.pipeline.link").EmulatedLink(emulation)
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)
        self._links.move_to_end(key)
        return self._links[key]
