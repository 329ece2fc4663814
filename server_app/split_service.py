"""The split service of a run: hosted here in the ServerApp, or on an edge server that stands alone.

`python -m server_app.split_service` is the latter (server_app.edge_server).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from gpu_runtime.contracts import SplitAccess, TaskCost, one_line, split_key
from gpu_runtime.device import discover
from gpu_runtime.pipeline.halves import ServerHalf
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.service import ServiceSettings, SplitServer
from gpu_runtime.pipeline.session import SessionKey, SplitError
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.workload import Workload
from server_app.settings import Settings, SettingsError
from strategies.server_stages import ServerStageSource, StageError
from strategies.split_plan import SplitService
from strategies.split_settings import SplitSettings
from tasks.base import Task

TOKEN_VARIABLE, ADMIN_TOKEN_VARIABLE = "PACELINE_SPLIT_TOKEN", "PACELINE_SPLIT_ADMIN_TOKEN"

Arrays = Mapping[str, npt.NDArray[np.generic]]


class HostedStages(ServerStageSource):
    """Server stages in this process."""

    def __init__(self, run: str, host: ServerStages, tasks: Mapping[str, Task]) -> None:
        self._run, self._host = run, host
        self._workloads = cast(Mapping[str, Workload], tasks)
        self._open: int | None = None

    def open_round(self, server_round: int, attempt: int, arrays: Arrays) -> None:
        if self._open is not None:
            self._host.release(self._run, self._open)
        self._open = server_round
        by_task: dict[str, dict[str, npt.NDArray[np.generic]]] = {}
        for key, array in arrays.items():
            task, name = split_key(key)
            by_task.setdefault(task, {})[name] = array
        try:
            self._host.open_round(
                self._run, server_round, attempt, {task: self._workloads[task] for task in by_task}, by_task
            )
        except SplitError as error:
            raise StageError(str(error)) from error

    def collect(self, server_round: int, client: str, task: str, attempt: int) -> ServerHalf:
        key = SessionKey(run=self._run, server_round=server_round, attempt=attempt, client=client, task=task)
        try:
            return self._host.collect(key)
        except SplitError as error:
            raise StageError(str(error)) from error


@contextlib.contextmanager
def split_service(
    settings: Settings, run: str, tasks: Mapping[str, Task], costs: Mapping[str, TaskCost]
) -> Iterator[SplitService]:
    """The service of a run, for as long as the context lasts.

    Args:
        settings: of the run.
        run: its name.
        tasks: by name.
        costs: of each task on the service's device.

    Raises:
        SettingsError: certificates or a key that cannot be read or used.
        OSError: the address cannot be listened on.
    """
    split = settings.split
    certificate, key = _certificate(split)
    device = StageDevice(discover(settings.sharing.cores), deterministic=settings.training.deterministic)
    host = ServerStages(device, max_sessions=split.max_sessions)
    token = secrets.token_urlsafe(32)
    try:
        server = SplitServer(
            host,
            token,
            address=f"{_in_address(split.listen)}:{split.port}",
            certificate=certificate,
            key=key,
            settings=service_settings(split),
        )
        try:
            yield SplitService(
                access=access_of(split, run, _public_address(split, server.address), token),
                stages=HostedStages(run, host, tasks),
                costs=costs,
                block_names=block_names(tasks),
            )
        finally:
            server.close()
    finally:
        host.close()
        device.close()


def service_settings(split: SplitSettings) -> ServiceSettings:
    """Bounds and deadlines of a service, from the run's."""
    return ServiceSettings(
        max_sessions=split.max_sessions,
        message_s=split.message_deadline_s,
        idle_s=10 * split.message_deadline_s,
        resume_s=split.resume_s,
    )


def access_of(split: SplitSettings, run: str, address: str, token: str) -> SplitAccess:
    """What clients are told."""
    authority = _read(split.ca_certificate or split.certificate)
    return SplitAccess(
        address=address,
        run=run,
        token=token,
        certificate=authority.decode("ascii", "replace") if authority else "",
        fallback=split.fallback,
        activation_clip=split.activation_clip,
        activation_noise=split.activation_noise,
        message_deadline_s=split.message_deadline_s,
        resume_s=split.resume_s,
    )


def block_names(tasks: Mapping[str, Task]) -> dict[str, tuple[str, ...]]:
    """Names of the blocks of each task's model, in order; none where it has no blocks."""
    found = {}
    for name, task in tasks.items():
        blocks = getattr(task.build_model(), "blocks", None)
        found[name] = tuple(child for child, _ in blocks.named_children()) if blocks is not None else ()
    return found


def token_from(variable: str) -> str:
    """A secret from the environment.

    Raises:
        ValueError: it is not there.
    """
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(f"the environment variable {variable} must hold the token of the split service")
    return token


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError([f"{path} cannot be read: {error.strerror or error}"]) from error


def _certificate(split: SplitSettings) -> tuple[bytes | None, bytes | None]:
    """Certificate and key, once it is clear that TLS can use them, and clients what they are to trust.

    gRPC does not say what it does not like about them.
    """
    certificate, key, authority = _read(split.certificate), _read(split.private_key), _read(split.ca_certificate)
    faults = []
    if certificate is not None and key is not None:
        try:
            # Asked for a passphrase, it would wait for a keyboard.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(split.certificate, split.private_key, lambda: "")
        except (OSError, ValueError) as error:
            faults.append(f"split.certificate and split.private-key are no certificate and its key: {error}")
    if authority is not None:
        try:
            ssl.create_default_context(cadata=authority.decode("ascii"))
        except (OSError, ValueError) as error:
            faults.append(f"split.ca-certificate holds no certificate: {error}")
    if faults:
        raise SettingsError([one_line(fault) for fault in faults])
    return certificate, key


def _public_address(split: SplitSettings, address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{_in_address(split.public_host) or host}:{port}"


def _in_address(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
