"""The split service of a run: hosted here in the ServerApp, or on an edge server that stands alone.

`python -m server_app.split_service` is the latter (server_app.edge_server).
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from gpu_runtime.contracts import SplitAccess, TaskCost, one_line, split_key
from gpu_runtime.device import discover
from gpu_runtime.pipeline.halves import ServerHalf
from gpu_runtime.pipeline.server_stage import ServerStages
from gpu_runtime.pipeline.service import ServiceSettings, SplitServer
from gpu_runtime.pipeline.session import SessionKey, SplitError
from gpu_runtime.pipeline.stage_device import StageDevice
from gpu_runtime.randomness import seeded_draws
from gpu_runtime.workload import Workload
from server_app.edge_stages import EdgeStages
from server_app.evaluation import Evaluator
from server_app.settings import Settings, SettingsError
from server_app.split_secrets import read_pem, tokens
from strategies.server_stages import ServerStageSource, StageError
from strategies.split_plan import SplitService
from strategies.split_settings import SplitSettings
from tasks.base import Task

# A round's halves are collected when its replies are in.
MARGIN_S = 600.0

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
    settings: Settings,
    run: str,
    evaluator: Evaluator,
    costs: Mapping[str, TaskCost] | None,
    note: Callable[[str], None],
) -> Iterator[SplitService]:
    """The service of a run, for as long as the context lasts: an edge server's where settings name one.

    Args:
        settings: of the run.
        run: its name.
        evaluator: has its tasks.
        costs: of each task on the service's device; None to measure them.
        note: told what the user should know: an edge server that cannot be had.

    Raises:
        SettingsError: certificates or a key that cannot be read or used, a token that is missing or wrong.
        OSError: the address cannot be listened on.
    """
    where = _edge if settings.split.address else _hosted
    with where(settings, run, evaluator, costs, note) as service:
        yield service


@contextlib.contextmanager
def _hosted(
    settings: Settings,
    run: str,
    evaluator: Evaluator,
    costs: Mapping[str, TaskCost] | None,
    note: Callable[[str], None],
) -> Iterator[SplitService]:
    split = settings.split
    certificate, key = _certificate(split)
    if costs is None:
        costs = evaluator.costs()
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
                stages=HostedStages(run, host, evaluator.tasks),
                costs=costs,
                block_names=block_names(evaluator.tasks),
            )
        finally:
            server.close()
    finally:
        host.close()
        device.close()


@contextlib.contextmanager
def _edge(
    settings: Settings,
    run: str,
    evaluator: Evaluator,
    costs: Mapping[str, TaskCost] | None,
    note: Callable[[str], None],
) -> Iterator[SplitService]:
    split = settings.split
    try:
        token, admin_token = tokens()
    except ValueError as error:
        raise SettingsError([f"split.address is set: {error}"]) from None
    # Others may use the edge server, also from other SuperLinks: a run there has a name that nobody can guess.
    access = access_of(split, f"{run}-{secrets.token_hex(8)}", split.address, token)
    stages = EdgeStages(access, admin_token, evaluator.held, keep_s=2 * settings.run.round_timeout_s + MARGIN_S)
    try:
        try:
            stages.check()
            if costs is None:
                costs, faults = stages.costs()
                for fault in faults:
                    note(fault)
        except StageError as error:
            note(one_line(f"nothing is split {'in this run' if costs is None else 'until it is back'}: {error}"))
            costs = {} if costs is None else costs
        yield SplitService(
            access=access,
            stages=stages,
            costs=costs,
            block_names=block_names(evaluator.tasks),
        )
    finally:
        stages.close()


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
        with seeded_draws(0, torch.device("cpu")):
            blocks = getattr(task.build_model(), "blocks", None)
        found[name] = tuple(child for child, _ in blocks.named_children()) if blocks is not None else ()
    return found


def _read(path: str) -> bytes | None:
    try:
        return read_pem(path)
    except ValueError as error:
        raise SettingsError([str(error)]) from None


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


if __name__ == "__main__":
    from server_app.edge_server import main

    sys.exit(main())
