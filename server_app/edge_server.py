"""`python -m server_app.split_service`: the split service alone on an edge server, until SIGTERM or Ctrl-C.

Exit codes: 0 stopped, 1 it could not serve, 2 wrong arguments or settings; every fault in one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from gpu_runtime.contracts import one_line
from gpu_runtime.device import discover
from gpu_runtime.pipeline.admin import admin_handler
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.service import ServiceSettings, SplitServer
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.signals import termination_interrupts
from server_app.edge_store import EdgeStore
from server_app.split_secrets import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE, check_pair, read_pem, tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with termination_interrupts(), _serving(options) as address:
            print(f"split service on {address}", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"error: {one_line(error) or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _serving(options: argparse.Namespace) -> Iterator[str]:
    """The address that is served while the context lasts."""
    token, admin_token = tokens()
    host = _bracketed(options.listen)
    if bool(options.certificate) != bool(options.private_key):
        raise ValueError("--certificate and --private-key go together: give both, or none")
    if options.certificate:
        check_pair(options.certificate, options.private_key)
    elif not options.insecure and not _is_loopback(options.listen):
        raise ValueError(
            f"--listen {options.listen} is open to a network: give --certificate and --private-key, or --insecure if "
            "whoever sees the traffic may read tokens, labels and activations"
        )
    machine = discover(options.cores)
    device = StageDevice(machine, deterministic=options.deterministic)
    stages = ServerStages(device, max_sessions=options.max_sessions)
    try:
        server = SplitServer(
            stages,
            token,
            address=f"{host}:{options.port}",
            certificate=read_pem(options.certificate),
            key=read_pem(options.private_key),
            settings=ServiceSettings(max_sessions=options.max_sessions),
            handlers=(admin_handler(EdgeStore(stages, machine, data_dir=options.data_dir), admin_token),),
        )
        try:
            yield server.address
        finally:
            server.close()
    finally:
        stages.close()
        device.close()


def _is_loopback(host: str) -> bool:
    """Whether all that `host` stands for is this machine alone.

    Raises:
        OSError: nobody knows the name.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError) as error:
        raise OSError(f"--listen {host}: {getattr(error, 'strerror', None) or error}") from None
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def _bracketed(host: str) -> str:
    if not host.strip("[]"):
        raise ValueError("--listen needs an address or a name")
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server_app.split_service",
        description="Serve the server's half of split models to runs whose split.address names this machine.",
        epilog=f"Tokens come from the environment: {TOKEN_VARIABLE} (sessions of clients) and {ADMIN_TOKEN_VARIABLE} "
        "(start weights in, trained halves out).",
    )
    parser.add_argument("--listen", metavar="HOST", required=True, help="address to listen on, e.g. 0.0.0.0")
    parser.add_argument("--port", metavar="N", required=True, type=_whole(0, 65_535), help="0: any free one")
    parser.add_argument("--certificate", metavar="FILE", default="", help="PEM of its TLS certificate")
    parser.add_argument("--private-key", metavar="FILE", default="", help="PEM of its TLS key")
    parser.add_argument("--insecure", action="store_true", help="no TLS, although others may listen in")
    parser.add_argument("--max-sessions", metavar="N", type=_whole(1, 10_000), default=256, help="default: 256")
    parser.add_argument("--cores", metavar="N", type=_whole(0, 4096), default=0, help="CPU cores; 0: those given")
    parser.add_argument("--data-dir", metavar="DIR", default="", help="data of tasks that bring none, to measure them")
    parser.add_argument("--deterministic", action="store_true", help="one core a session: weights repeat bit for bit")
    return parser


class _whole:
    """An argparse type: a whole number in a range."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self._minimum, self._maximum = minimum, maximum

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or not self._minimum <= int(text) <= self._maximum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {self._minimum} to {self._maximum}, not {text!r}"
            )
        return int(text)
