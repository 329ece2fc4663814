"""How a run ended: Flower's word and the run's own summary together, and the cause of a failure in one line."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.checkpoint import OutputError, write_json
from simulations.flower_home import one_line, strip_colours
from simulations.progress import Follower

LOG_NAME = "superlink.log"
_ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|^\w*(Error|Exception)\b")


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended. `cause` is None if it completed; `folder` is None if it never began."""

    cause: str | None
    folder: Path | None
    summary: Mapping[str, Any]


def outcome_of(cause: str | None, folder: Path, log_file: Path) -> RunOutcome:
    """Flower's word and the run's own summary together: both must say completed."""
    summary = read_summary(folder)
    if cause is None and summary.get("status") == "completed":
        return RunOutcome(cause=None, folder=folder, summary=summary)
    return RunOutcome(cause=find_cause(summary, cause, log_file), folder=folder, summary=summary)


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of a run, empty if there is none that can be read."""
    try:
        value = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def leave_summary(folder: Path, cause: str) -> None:
    """Say in summary.json why a run failed whose server could not: it was stopped or died, or the disk was full."""
    path = folder / "summary.json"
    if not path.exists():
        rounds = list(Follower(folder / "history.jsonl").read())
        with contextlib.suppress(OutputError, ValueError):
            write_json(path, {"status": "failed", "cause": cause, "rounds": rounds})


def remove_if_only_a_log(folder: Path) -> Path | None:
    """Remove the folder of a run that has written nothing but Flower's log; the folder if it stays."""
    if [path.name for path in folder.iterdir()] != [LOG_NAME]:
        return folder
    with contextlib.suppress(OSError):
        (folder / LOG_NAME).unlink()
        folder.rmdir()
        return None
    return folder


def find_cause(summary: Mapping[str, Any], details: str | None, log_file: Path) -> str:
    """Why a run failed, in one line: its summary's cause, else Flower's details, else the log's last error."""
    if summary.get("cause"):
        return one_line(str(summary["cause"]))
    logged = last_error(log_file)
    vague = details is None or "unknown error" in details
    if vague and logged:
        return logged
    return details or "the run left no summary.json"


def last_error(log_file: Path) -> str | None:
    """The last line of the log that speaks of an error, without colours and time stamps."""
    try:
        lines = strip_colours(log_file.read_text(encoding="utf-8", errors="replace")).splitlines()
    except OSError:
        return None
    found = [line for line in lines if _ERROR_LINE.search(line)]
    return one_line(found[-1]) if found else None
