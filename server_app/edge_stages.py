"""EdgeStages: a run's server stages on an edge server, and what the run must know of that server before it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_runtime.contracts import HeldTask, SplitAccess, TaskCost, one_line, split_key, to_json
from gpu_runtime.pipeline.admin import PreparedStages, StageSpec
from gpu_runtime.pipeline.channel import Deadlines, GrpcChannel
from gpu_runtime.pipeline.edge_client import EdgeClient
from gpu_runtime.pipeline.encoding import EncodingError
from gpu_runtime.pipeline.halves import ServerHalf
from gpu_runtime.pipeline.probe import measure_link
from gpu_runtime.pipeline.session import LinkError, RefusedError, SessionKey, SplitError
from gpu_runtime.pipeline.wire import WRONG_TOKEN
from server_app.settings import SettingsError
from server_app.split_secrets import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from strategies.server_stages import ServerStageSource, StageError

Arrays = Mapping[str, npt.NDArray[np.generic]]
P = ParamSpec("P")
T = TypeVar("T")


class EdgeStages(ServerStageSource):
    """Server stages of one run on an edge server.

    Args:
        access: how clients reach it; the run's name there is no other run's.
        admin_token: for its admin calls.
        held: the run's tasks by name.
        keep_s: seconds after which it may forget a round that this process never releases.
    """

    def __init__(self, access: SplitAccess, admin_token: str, held: Mapping[str, HeldTask], keep_s: float) -> None:
        self._access, self._admin_token, self._held, self._keep_s = access, admin_token, held, keep_s
        self._rounds: set[int] = set()
        self._client: EdgeClient | None = None

    def open_round(self, server_round: int, attempt: int, arrays: Arrays) -> None:
        by_task: dict[str, dict[str, npt.NDArray[np.generic]]] = {}
        for key, array in arrays.items():
            task, name = split_key(key)
            by_task.setdefault(task, {})[name] = array
        self._release()
        self._rounds.add(server_round)
        for task, mine in by_task.items():
            held = self._held[task]
            stages = PreparedStages(
                run=self._access.run,
                server_round=server_round,
                task=task,
                reference=held.ref,
                spec=to_json(StageSpec(attempt=attempt, data=held.data, keep_s=self._keep_s)),
                arrays=mine,
            )
            self._call(EdgeClient.prepare, stages)

    def collect(self, server_round: int, client: str, task: str, attempt: int) -> ServerHalf:
        key = SessionKey(run=self._access.run, server_round=server_round, attempt=attempt, client=client, task=task)
        stage = self._call(EdgeClient.collect, key)
        return ServerHalf(arrays=stage.arrays, num_steps=stage.end.num_steps, num_examples=stage.end.num_examples)

    def check(self) -> None:
        """Try both tokens.

        Raises:
            SettingsError: one of them is wrong.
            StageError: the edge server cannot be reached.
        """
        try:
            # Nothing is open yet: this does nothing, but for who may not call.
            self._call(EdgeClient.release, self._access.run, 0)
        except StageError as error:
            if isinstance(error.__cause__, RefusedError):
                raise SettingsError([f"{error}: see {ADMIN_TOKEN_VARIABLE} here and there"]) from error
            raise
        channel = GrpcChannel(
            self._access.address,
            self._access.token,
            certificate=self._access.certificate,
            deadlines=Deadlines(message_s=self._access.message_deadline_s, resume_s=self._access.resume_s),
        )
        try:
            measure_link(channel, self._access.run, "server")
        except SplitError as error:
            if str(error) == WRONG_TOKEN:
                raise SettingsError([f"{self._named(error)}: see {TOKEN_VARIABLE} here and there"]) from error
            # One that is full now need not be so when a round comes.
            if not isinstance(error, RefusedError):
                raise StageError(self._named(error)) from error

    def costs(self) -> tuple[dict[str, TaskCost], tuple[str, ...]]:
        """Costs on the edge server's device of the tasks that can be measured there, and why others cannot.

        Raises:
            StageError: it cannot be reached, or does not answer in time.
        """
        profile = self._call(EdgeClient.measure, list(self._held.values()))
        found = {each.task: each.cost for each in profile.tasks if each.cost is not None and each.task in self._held}
        return found, tuple(one_line(f"the edge server: {fault}") for fault in profile.errors)

    def close(self) -> None:
        """The edge server forgets the run, where it can be reached."""
        try:
            self._release()
        except StageError:
            pass  # it forgets by itself
        finally:
            self._disconnect()

    # ------------------------------------------------------------------------------------------------- private

    def _release(self) -> None:
        for server_round in sorted(self._rounds):
            self._call(EdgeClient.release, self._access.run, server_round)
            self._rounds.discard(server_round)

    def _call(self, method: Callable[Concatenate[EdgeClient, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._client is None:
            self._client = EdgeClient(
                self._access.address, self._admin_token, certificate=self._access.certificate, deadline_s=120.0
            )
        try:
            return method(self._client, *args, **kwargs)
        except LinkError as error:
            # A connection that has failed waits longer and longer before it tries again; a new one tries at once.
            self._disconnect()
            raise StageError(self._named(error)) from error
        except (SplitError, EncodingError) as error:
            raise StageError(self._named(error)) from error

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _named(self, error: Exception) -> str:
        return one_line(f"edge server {self._access.address}: {error}")
