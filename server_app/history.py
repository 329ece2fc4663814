"""The outputs of a run: one folder with events, a line per round, weights, trace and, written last, the summary."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from gpu_runtime.contracts import Report
from gpu_runtime.trace import chrome_trace
from server_app.checkpoint import OutputError, append_line, write_json, writing
from server_app.evaluation import TaskScore
from server_app.settings import Settings
from strategies.base import RoundRecord

# Flower shows what goes to its own logger and its children.
log = logging.getLogger("flwr.paceline")

COMPLETED, FAILED = "completed", "failed"
DEFAULT_FOLDER = "paceline-runs"


def run_folder(out_dir: str, run_id: int) -> Path:
    """`<out-dir>/<run-id>`, made if missing. An empty `out_dir` means `paceline-runs` in the home folder.

    Raises:
        OutputError: it cannot be made.
    """
    folder = (Path(out_dir) if out_dir else Path.home() / DEFAULT_FOLDER) / str(run_id)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("flwr", "ray", "torch", "torchvision", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def round_entry(record: RoundRecord, scores: Mapping[str, TaskScore]) -> dict[str, Any]:
    """One entry of `rounds` in summary.json and one line of history.jsonl."""
    entry = asdict(record)
    entry["round"] = entry.pop("server_round")
    for client in entry["clients"].values():
        client["idle_fraction"] = 1.0 - client["busy_s"] / record.makespan_s if record.makespan_s > 0 else 0.0
    entry["tasks"] = {task: asdict(score) for task, score in scores.items()}
    return entry


def _words(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in metrics.items())


class RunHistory:
    """Writes the outputs of one run as it goes on."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self._settings = settings
        self.rounds: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.bytes_up = 0
        self.bytes_down = 0
        self._reports: list[Report] = []
        self._started_s = time.monotonic()

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl, for whoever follows the run."""
        self._append("events.jsonl", {"event": kind, "time_s": time.time(), **fields})

    def note(self, text: str) -> None:
        """Something the user should know: an event and a line in the summary."""
        if text not in self.notes:
            self.notes.append(text)
            self.event("note", text=text)

    def add_round(
        self,
        record: RoundRecord,
        scores: Mapping[str, TaskScore],
        reports: Sequence[Report],
        client_metrics: Mapping[str, float],
    ) -> None:
        """Record a finished round."""
        entry = round_entry(record, scores)
        if client_metrics:
            entry["client_metrics"] = dict(client_metrics)
        self.rounds.append(entry)
        self._reports.extend(reports)
        self._append("history.jsonl", entry)
        scored = "  ".join(f"{task} {_words(score.metrics)}" for task, score in scores.items())
        log.info(
            "round %d: makespan %.3g %s s, idle %.0f%%  %s",
            record.server_round,
            record.makespan_s,
            record.clock,
            100 * record.idle_fraction,
            scored,
        )

    def finish(self, cause: str | None = None) -> None:
        """Write trace.json and then summary.json; `cause` says in one line why a failed run failed.

        A trace that cannot be written is a note in the summary.

        Raises:
            OutputError: the summary cannot be written.
        """
        if self._settings.run.trace and self._reports:
            try:
                write_json(self.folder / "trace.json", chrome_trace(self._reports))
            except OutputError as error:
                log.error("%s", error)
                self.notes.append(str(error))
        write_json(self.folder / "summary.json", self._summary(cause))

    def _summary(self, cause: str | None) -> dict[str, Any]:
        settings = self._settings
        seconds = sum(entry["makespan_s"] for entry in self.rounds)
        examples = sum(
            task["examples"]
            for entry in self.rounds
            for client in entry["clients"].values()
            for task in client["tasks"].values()
        )
        splits = [
            task["split"]
            for entry in self.rounds
            for client in entry["clients"].values()
            for task in client["tasks"].values()
            if task["split"]
        ]
        last = self.rounds[-1]["tasks"] if self.rounds else {}
        return {
            "status": FAILED if cause else COMPLETED,
            "cause": cause,
            "strategy": settings.strategy.name,
            "fleet": settings.fleet.name,
            "suite": settings.data.tasks or settings.data.suite,
            "seed": settings.data.seed,
            "clock": settings.fleet.clock if settings.fleet.name else "measured",
            "rounds": self.rounds,
            "final": {task: score["metrics"] for task, score in last.items()},
            "mean_makespan_s": seconds / len(self.rounds) if self.rounds else 0.0,
            "mean_idle_fraction": fmean(entry["idle_fraction"] for entry in self.rounds) if self.rounds else 0.0,
            "wall_s": time.monotonic() - self._started_s,
            "examples_per_s": examples / seconds if seconds > 0 else 0.0,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "split_bytes_up": sum(split["bytes_up"] for split in splits),
            "split_bytes_down": sum(split["bytes_down"] for split in splits),
            "notes": self.notes,
            "versions": versions(),
            "settings": settings.flat(),
        }

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        append_line(self.folder / name, json.dumps(value, allow_nan=False))
