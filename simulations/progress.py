"""What the user sees of a run: lines as rounds finish, read from the run's own files, and a table at the end."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table


class Follower:
    """New whole lines of a growing file of JSON objects, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Objects written since the last call; lines that are not JSON objects are passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


class Progress(ABC):
    """Told what happens; says it or not."""

    @abstractmethod
    def stage(self, text: str) -> None:
        """The run as a whole is at this stage."""

    @abstractmethod
    def event(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""

    @abstractmethod
    def round(self, entry: Mapping[str, Any]) -> None:
        """A line of history.jsonl: a finished round."""

    @abstractmethod
    def finished(self, summary: Mapping[str, Any], folder: Path) -> None:
        """The run completed; its outputs are in `folder`."""

    @abstractmethod
    def failed(self, cause: str, folder: Path | None) -> None:
        """The run failed for `cause`, one line."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will be said."""


class Quiet(Progress):
    """Only the cause of a failure, on standard error."""

    def __init__(self, errors: Console) -> None:
        self._errors = errors

    def stage(self, text: str) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...

    def round(self, entry: Mapping[str, Any]) -> None: ...

    def finished(self, summary: Mapping[str, Any], folder: Path) -> None: ...

    def failed(self, cause: str, folder: Path | None) -> None:
        say_failure(self._errors, cause, folder)

    def close(self) -> None: ...


class JsonLines(Quiet):
    """One JSON object a line on standard output, for programs."""

    def stage(self, text: str) -> None:
        self._say("stage", text=text)

    def event(self, event: Mapping[str, Any]) -> None:
        self._say("event", **event)

    def round(self, entry: Mapping[str, Any]) -> None:
        self._say("round", **entry)

    def finished(self, summary: Mapping[str, Any], folder: Path) -> None:
        self._say("finished", status="completed", outputs=str(folder), final=summary.get("final", {}))

    def failed(self, cause: str, folder: Path | None) -> None:
        self._say("finished", status="failed", cause=cause, outputs=str(folder) if folder else None)
        super().failed(cause, folder)

    @staticmethod
    def _say(kind: str, **fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}), flush=True)


class Spoken(Progress):
    """Lines for people; in a terminal with a moving sign of life below them."""

    def __init__(self, console: Console, errors: Console) -> None:
        self._console = console
        self._errors = errors
        self._status: Status | None = None
        if console.is_terminal:
            self._status = console.status("")
            self._status.start()

    def stage(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
        else:
            self._print(escape(text))

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "round":
            if self._status is not None:
                self._status.update(f"round {event.get('round')} of {event.get('rounds')}")
        elif kind == "note":
            self._print(f"[yellow]note:[/] {escape(str(event.get('text', '')))}")
        elif kind == "joined":
            self._print(f"{event.get('clients')} clients joined")
        elif kind == "profiled":
            self._print("profiles of " + escape(", ".join(map(str, event.get("clients", [])))))

    def round(self, entry: Mapping[str, Any]) -> None:
        for line in round_lines(entry):
            self._print(line)

    def finished(self, summary: Mapping[str, Any], folder: Path) -> None:
        self.close()
        self._console.print(final_table(summary))
        self._print(f"outputs: {escape(str(folder))}")

    def failed(self, cause: str, folder: Path | None) -> None:
        self.close()
        say_failure(self._errors, cause, folder)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def say_failure(console: Console, cause: str, folder: Path | None) -> None:
    """The cause in one line, and where to look further."""
    console.print(f"[red]run failed:[/] {escape(cause)}", soft_wrap=True, highlight=False)
    if folder is not None:
        console.print(f"outputs and log: {escape(str(folder))}", soft_wrap=True, highlight=False)


def round_lines(entry: Mapping[str, Any]) -> Iterator[str]:
    """A finished round: makespan; each task's loss and metrics; each client's idle time; what was not used."""
    plan = ", ".join(
        f"{word} {entry[key]:.3g}" for word, key in (("plan", "plan_s"), ("bound", "bound_s")) if entry.get(key)
    )
    clock = f" {entry['clock']}" if entry.get("clock") else ""
    makespan_s = float(entry.get("makespan_s") or 0.0)
    line = f"[bold]round {entry.get('round')}[/]  makespan {makespan_s:.3g}{clock} s" + (f" ({plan})" if plan else "")
    yield f"{line}  idle {float(entry.get('idle_fraction') or 0.0):.0%}"
    yield "  " + "  ".join(
        f"{escape(task)} loss {_number(score.get('loss'))} "
        + " ".join(f"{escape(name)} {_number(value)}" for name, value in score.get("metrics", {}).items())
        for task, score in entry.get("tasks", {}).items()
    )
    yield "  idle: " + "  ".join(
        f"{escape(name)} {_idle(client, makespan_s)}" for name, client in entry.get("clients", {}).items()
    )
    split = {task: line for task in entry.get("tasks", {}) if (line := _split(entry, task))}
    if split:
        yield "  split: " + "  ".join(f"{escape(task)} {escape(line)}" for task, line in split.items())
    for text in entry.get("refused", []):
        yield f"  [yellow]not used:[/] {escape(str(text))}"


def _split(entry: Mapping[str, Any], task: str) -> str:
    """How clients split a task: `old-laptop after block 2, 8 x int8`; empty where none did."""
    found = []
    for name, client in entry.get("clients", {}).items():
        split = client.get("tasks", {}).get(task, {}).get("split")
        if split:
            found.append(f"{name} after block {split['split_point']}, {split['micro_batches']} x {split['encoding']}")
    return "; ".join(found)


def final_table(summary: Mapping[str, Any]) -> Table:
    """Per task: metrics of the last round and examples trained; below, mean makespan and idle fraction."""
    rounds = summary.get("rounds", [])
    plural = "round" if len(rounds) == 1 else "rounds"
    makespan_s, idle = summary.get("mean_makespan_s", 0.0), summary.get("mean_idle_fraction", 0.0)
    table = Table(
        title=f"{summary.get('strategy')} on {summary.get('fleet') or 'real machines'}: {len(rounds)} {plural}",
        caption=f"mean makespan {makespan_s:.3g} {summary.get('clock')} s\nmean idle fraction {idle:.1%}",
    )
    for column in ("task", "metric", "value", "examples trained"):
        table.add_column(column, justify="right" if column in ("value", "examples trained") else "left")
    for task, metrics in summary.get("final", {}).items():
        examples = sum(
            client["tasks"].get(task, {}).get("examples", 0) for entry in rounds for client in entry["clients"].values()
        )
        for position, (name, value) in enumerate(metrics.items()):
            first = position == 0
            table.add_row(task if first else "", name, _number(value), f"{examples}" if first else "")
    return table


def _idle(client: Mapping[str, Any], makespan_s: float) -> str:
    if client.get("outcome") not in (None, "trained", "partial"):
        return escape(str(client["outcome"]))
    return f"{1.0 - float(client.get('busy_s') or 0.0) / makespan_s:.0%}" if makespan_s > 0 else "-"


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
