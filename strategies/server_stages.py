"""Where the server's halves of split models come from, as strategies see it: whole models are joined before anything
is aggregated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class StageError(RuntimeError):
    """A server stage that is not there; the text says why in one line."""


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """The server stage of one client's task after a round: its arrays by parameter name, and what trained them."""

    arrays: Mapping[str, npt.NDArray[np.generic]]
    num_steps: int
    num_examples: int


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
