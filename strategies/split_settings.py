"""Settings of split training: whether models are cut, where, and how the two halves talk. Imports no flwr."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpu_runtime.contracts import ENCODINGS
from gpu_runtime.settings import setting

OFF, ON, AUTO = "off", "on", "auto"
MODES = (OFF, ON, AUTO)
# What may cross the cut: one encoding, or any of them, whichever is fastest.
ANY = "any"
MAX_DEADLINE_S = 86_400.0
# Of clip and of noise: their product is far within float32.
MAX_PRIVACY = 1e9


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """Split training of a run. A point or number of micro-batches of 0 is chosen by the planner, each round anew.

    `address` names a split service that stands alone, "host:port"; empty: the ServerApp hosts one. Its secret tokens
    never stand in a config: the variables PACELINE_SPLIT_TOKEN and PACELINE_SPLIT_ADMIN_TOKEN hold them.
    """

    mode: str = setting(
        "split.mode",
        OFF,
        "off: clients train whole models | on: all are split | auto: where it is faster",
        choices=MODES,
    )
    point: int = setting(
        "split.point", 0, "blocks of a model that stay on the device; 0: chosen", minimum=0, maximum=10_000
    )
    micro_batches: int = setting(
        "split.micro-batches", 0, "micro-batches of a step; 0: chosen", minimum=0, maximum=10_000
    )
    encoding: str = setting(
        "split.encoding",
        "fp32",
        "what crosses the cut: fp32 (exact) | fp16 | int8 | any: the fastest of them",
        choices=(*ENCODINGS, ANY),
    )
    min_depth: int = setting(
        "split.min-depth", 1, "privacy: least blocks that stay on the device", minimum=1, maximum=10_000
    )
    activation_clip: float = setting(
        "split.activation-clip",
        0.0,
        "privacy: largest L2 norm of an example's activations; 0: none",
        minimum=0.0,
        maximum=MAX_PRIVACY,
    )
    activation_noise: float = setting(
        "split.activation-noise",
        0.0,
        "privacy: Gaussian noise on them, in multiples of the clip",
        minimum=0.0,
        maximum=MAX_PRIVACY,
    )
    fallback: bool = setting(
        "split.fallback", True, "send whole models, so that a client without a link to the service trains whole"
    )
    address: str = setting("split.address", "", "host:port of an edge server's service; empty: the ServerApp hosts one")
    listen: str = setting("split.listen", "127.0.0.1", "address that the ServerApp's own service listens on")
    public_host: str = setting("split.public-host", "", "name by which clients reach it; empty: as split.listen")
    port: int = setting("split.port", 0, "its port; 0: any free one", minimum=0, maximum=65_535)
    certificate: str = setting("split.certificate", "", "PEM file of its TLS certificate; empty: no TLS")
    private_key: str = setting("split.private-key", "", "PEM file of its TLS key")
    ca_certificate: str = setting(
        "split.ca-certificate", "", "PEM file by which clients check it; empty: split.certificate"
    )
    max_sessions: int = setting(
        "split.max-sessions", 256, "tasks of clients served at once; more are refused", minimum=1, maximum=10_000
    )
    message_deadline_s: float = setting(
        "split.message-deadline-s", 60.0, "seconds to wait for a gradient", above=0.0, maximum=MAX_DEADLINE_S
    )
    resume_s: float = setting(
        "split.resume-s",
        30.0,
        "seconds to try to reach the service, at first and again",
        above=0.0,
        maximum=MAX_DEADLINE_S,
    )

    @property
    def encodings(self) -> tuple[str, ...]:
        """Encodings that the planner may choose from."""
        return ENCODINGS if self.encoding == ANY else (self.encoding,)

    def faults(self) -> list[str]:
        """One line for each pair of settings at odds; ranges are checked where settings are parsed."""
        found = []
        if self.point and self.point < self.min_depth:
            found.append(f"split.point {self.point} is below split.min-depth {self.min_depth}, the privacy floor")
        if self.activation_noise and not self.activation_clip:
            found.append("split.activation-noise is in multiples of split.activation-clip, which is 0")
        if bool(self.certificate) != bool(self.private_key):
            found.append("split.certificate and split.private-key go together: give both, or none")
        if self.ca_certificate and not (self.certificate or self.address):
            found.append("split.ca-certificate has clients ask for TLS: without split.certificate there is none")
        if self.address and not _is_address(self.address):
            found.append(f"split.address must be host:port, not {self.address!r}")
        if self.address and (self.certificate or self.port):
            found.append("split.address names a service elsewhere: split.port and split.certificate say nothing there")
        if not all(math.isfinite(value) for value in (self.activation_clip, self.activation_noise)):
            found.append("split.activation-clip and split.activation-noise must be finite")
        return found


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65_536
