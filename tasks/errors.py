"""The error of the tasks room and the checks that need no torch, so that a config check stays cheap."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NAME_PATTERN = re.compile(r"[a-z][a-z0-9-]*")


class TaskError(ValueError):
    """A task that cannot be found, built or fed; the text names the task and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Text for the end of an error message: the known name nearest to `name`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
