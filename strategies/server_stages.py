"""Where the server's halves of split models come from, as strategies see it: whole models are joined before anything
is aggregated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpu_runtime.pipeline.halves import ServerHalf

__all__ = ["ServerHalf", "ServerStageSource", "StageError"]


class StageError(RuntimeError):
    """A server stage that is not there; the text says why in one line."""


class ServerStageSource(ABC):
    """The split service, as far as a strategy needs it."""

    @abstractmethod
    def open_round(self, server_round: int, attempt: int, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Have the service ready for a round's sessions: `arrays` by `<task>/<parameter>`, of the tasks that are split.

        Halves of earlier rounds and attempts are forgotten.

        Raises:
            StageError: it cannot be reached, or cannot serve them.
        """

    @abstractmethod
    def collect(self, server_round: int, client: str, task: str, attempt: int) -> ServerHalf:
        """Take the half that `client` has trained; it is gone from the service then.

        Raises:
            StageError: there is none.
        """
