"""Run Paceline in simulation, watch it, and tell the truth about how it ended: `python -m simulations.run`.

Does what a bare `flwr run` does not: checks the config first, shows progress, waits for the end, exits with 0 only if
the run completed, and leaves no process, port or temporary file behind, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gpu_runtime.settings import Scalar, SettingsError
from server_app.checkpoint import OutputError, writing
from server_app.settings import Settings
from simulations.fleet import FleetError, load_fleet
from simulations.flower_home import FlowerError, FlowerHome, one_line
from simulations.outcome import LOG_NAME, RunOutcome, leave_summary, outcome_of, remove_if_only_a_log
from simulations.process_tree import adopt_orphans
from simulations.progress import Follower, JsonLines, Progress, Quiet, Spoken
from simulations.run_config import absolute_path, absolute_paths, defaults, parse_overrides, to_toml
from simulations.signals import Interrupted, signals_ignored, signals_raise

APP = Path(__file__).resolve().parent.parent
LOOK_S = 0.2
# How often Flower is asked whether the run is over: seldom, and often once the run's summary is there.
ASK_S = 3.0
ASK_SOON_S = 0.25
STOP_S = 5.0
MAX_UNANSWERED = 5
# How long Flower may take to say that a run is over whose summary is there: a client may never return.
SUMMARY_GRACE_S = 15.0
# How long Flower may take to say so when a process that the run needs has died; alone it notices after a minute.
DEATH_GRACE_S = 10.0
INTERRUPTED = 130
NUM_SUPERNODES_WITHOUT_FLEET = 4


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to be made: the app, its config overrides, and what the simulation gets of this machine."""

    app: Path
    run_config: Mapping[str, Scalar]
    out_dir: Path
    num_supernodes: int
    cpus_per_client: int
    gpus_per_client: float
    timeout_s: float

    def federation(self) -> dict[str, int | float]:
        """Flower's federation config."""
        return {
            "num-supernodes": self.num_supernodes,
            "client-resources-num-cpus": self.cpus_per_client,
            "client-resources-num-gpus": self.gpus_per_client,
            "init-args-num-cpus": max(num_cores(), self.cpus_per_client),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 completed, 1 failed, 2 bad arguments or config, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    errors = Console(stderr=True)
    try:
        request = build_request(arguments)
    except (SettingsError, FleetError) as error:
        for fault in error.faults:
            errors.print(fault, style="red", soft_wrap=True, highlight=False, markup=False)
        return 2
    progress = _progress(arguments, errors)
    adopt_orphans()
    try:
        with signals_raise():
            outcome = run(request, progress)
        if outcome.cause is None and outcome.folder is not None:
            progress.finished(outcome.summary, outcome.folder)
            return 0
        progress.failed(outcome.cause or "unknown", outcome.folder)
        return 1
    except Interrupted as interruption:
        progress.failed(f"interrupted by {interruption}", interruption.folder)
        return INTERRUPTED
    finally:
        progress.close()


def build_request(arguments: argparse.Namespace) -> RunRequest:
    """Merge and check everything that was asked for.

    Raises:
        SettingsError, FleetError: with all faults found.
    """
    try:
        app = Path(absolute_path(arguments.app, Path.cwd()))
    except ValueError as error:
        raise SettingsError([f"--app: {error}"]) from None
    overrides = parse_overrides(arguments.run_config)
    if arguments.fleet is not None:
        overrides["fleet.name"] = arguments.fleet
    if arguments.out_dir is not None:
        overrides["out-dir"] = arguments.out_dir
    base = defaults(app)
    if not overrides.get("out-dir") and not base.get("out-dir"):
        overrides["out-dir"] = "runs"
    overrides = absolute_paths(overrides, Path.cwd())
    merged = {**base, **overrides}
    num_supernodes = arguments.num_supernodes
    if app == APP:
        settings = Settings.from_run_config(merged)
        if settings.fleet.name:
            fleet = load_fleet(settings.fleet.name)
            num_supernodes = num_supernodes or fleet.num_clients
            fleet.deal(num_supernodes, settings.task_refs)
    return RunRequest(
        app=app,
        run_config=overrides,
        out_dir=Path(str(merged["out-dir"])),
        num_supernodes=num_supernodes or NUM_SUPERNODES_WITHOUT_FLEET,
        cpus_per_client=arguments.cpus_per_client or num_cores(),
        gpus_per_client=arguments.gpus_per_client,
        timeout_s=arguments.timeout_s,
    )


def run(request: RunRequest, progress: Progress) -> RunOutcome:
    """Make the run and wait for its end. Everything it started is gone when this returns or raises.

    Raises:
        Interrupted: with the folder of what the run has written so far, if anything.
    """
    deadline = time.monotonic() + request.timeout_s
    log_file = request.out_dir / f"superlink-{os.getpid()}.log"
    try:
        with writing(request.out_dir):
            request.out_dir.mkdir(parents=True, exist_ok=True)
        with writing(log_file):
            log_file.touch()
        with writing(Path(tempfile.gettempdir())):
            private = FlowerHome(log_file)
    except OutputError as error:
        _remove(log_file)
        return RunOutcome(cause=str(error), folder=None, summary={})
    folder: Path | None = None
    try:
        with _uninterrupted_exit(private) as home:
            try:
                progress.stage("starting Flower")
                home.start()
                config_file = home.root / "run-config.toml"
                with writing(config_file):
                    config_file.write_text(to_toml(request.run_config), encoding="utf-8")
                run_id = home.submit(request.app, config_file, request.federation())
                with writing(request.out_dir / run_id):
                    (request.out_dir / run_id).mkdir(exist_ok=True)
                    log_file = log_file.rename(request.out_dir / run_id / LOG_NAME)
            except (FlowerError, OutputError) as error:
                if home.is_alive():
                    _remove(log_file)
                return RunOutcome(cause=str(error), folder=None, summary={})
            folder = request.out_dir / run_id
            progress.stage("starting server and clients")
            try:
                cause = _follow(home, run_id, folder, progress, deadline, request.timeout_s)
            except Interrupted:
                with contextlib.suppress(FlowerError, OSError), signals_ignored():
                    home.stop(run_id)
                    _wait_finished(home, run_id, STOP_S)
                raise
            progress.stage("ending Flower's processes")
            outcome = outcome_of(cause, folder, log_file)
    except Interrupted as interruption:
        with signals_ignored():
            if folder is None:
                _remove(log_file)
            else:
                interruption.folder = remove_if_only_a_log(folder)
                if interruption.folder is not None:
                    leave_summary(folder, f"interrupted by {interruption}")
        raise
    if outcome.cause is not None:
        leave_summary(folder, outcome.cause)
    return outcome


def _follow(
    home: FlowerHome, run_id: str, folder: Path, progress: Progress, deadline: float, timeout_s: float
) -> str | None:
    """Pass on what the run writes until it is over; the cause if Flower, or what became of Flower, gives one.

    The run's summary is written last: once it is there, it counts, whatever then becomes of Flower.
    """
    files = (Follower(folder / "events.jsonl"), Follower(folder / "history.jsonl"))
    summary = folder / "summary.json"
    asked_at = time.monotonic()
    written_at = died_at = math.inf
    num_unanswered = 0
    cause = None
    while cause is None:
        _pass_on(*files, progress)
        now = time.monotonic()
        if summary.exists():
            written_at = min(written_at, now)
        if not home.is_alive():
            cause = "the SuperLink ended before the run"
        elif now >= asked_at + (ASK_S if written_at == math.inf else ASK_SOON_S):
            asked_at = now
            try:
                status, details = home.status(run_id)
                num_unanswered = 0
            except FlowerError as error:
                num_unanswered += 1
                if num_unanswered == MAX_UNANSWERED:
                    cause = str(error)
                status = details = ""
            if status.startswith("finished"):
                _pass_on(*files, progress)
                return None if status == "finished:completed" else one_line(details) or f"Flower says {status}"
            dead = home.dead()
            died_at = min(died_at, now) if dead else math.inf
            if now >= died_at + DEATH_GRACE_S:
                cause = f"a process of the simulation has died (killed, or out of memory?): {' and '.join(dead)}"
        if now >= deadline:
            cause = f"not finished after {timeout_s:g} s (--timeout-s)"
        if now >= written_at + SUMMARY_GRACE_S:
            cause = f"Flower has not ended it {SUMMARY_GRACE_S:g} s after its summary; does a client never return?"
        if cause is None:
            time.sleep(LOOK_S)
    was_over = summary.exists()
    if home.is_alive():
        with contextlib.suppress(FlowerError, OSError):
            home.stop(run_id)
    _pass_on(*files, progress)
    if not was_over:
        return cause
    progress.event({"event": "note", "text": f"the run has ended and was stopped: {cause}"})
    return None


def _remove(log_file: Path) -> None:
    with contextlib.suppress(OSError):
        log_file.unlink(missing_ok=True)


def _pass_on(events: Follower, history: Follower, progress: Progress) -> None:
    for event in events.read():
        progress.event(event)
    for entry in history.read():
        progress.round(entry)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait_finished(home: FlowerHome, run_id: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not home.status(run_id)[0].startswith("finished"):
        time.sleep(ASK_SOON_S)


@contextlib.contextmanager
def _uninterrupted_exit(home: FlowerHome) -> Iterator[FlowerHome]:
    """The home, closed at the end without further signals getting in the way."""
    try:
        yield home
    finally:
        with signals_ignored():
            home.close()


def _progress(arguments: argparse.Namespace, errors: Console) -> Progress:
    if arguments.json_lines:
        return JsonLines(errors)
    return Quiet(errors) if arguments.quiet else Spoken(Console(), errors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.run", description="Run Paceline in simulation.")
    parser.add_argument("--fleet", metavar="NAME", help="fleet by name, or a TOML file (sets fleet.name)")
    parser.add_argument(
        "--run-config", metavar="'KEY=VALUE ...'", action="append", default=[], help="overrides, as for flwr run"
    )
    parser.add_argument("--num-supernodes", metavar="N", type=_positive, help="clients; default: those of the fleet")
    parser.add_argument("--cpus-per-client", metavar="N", type=_positive, help="default: all cores, one client a time")
    parser.add_argument("--gpus-per-client", metavar="X", type=_fraction, default=0.0, help="default: 0")
    parser.add_argument("--timeout-s", metavar="S", type=_seconds, default=1800.0, help="default: 1800")
    parser.add_argument("--out-dir", metavar="DIR", help="outputs; default: ./runs")
    parser.add_argument("--app", metavar="DIR", default=str(APP), help="Flower app; default: Paceline")
    spoken = parser.add_mutually_exclusive_group()
    spoken.add_argument("--quiet", action="store_true", help="say nothing but the cause of a failure")
    spoken.add_argument("--json-lines", action="store_true", help="progress as one JSON object a line")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
