"""The ServerApp: parse the settings, put the pieces together, run, and leave a summary whatever happens."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from server_app import run_loop
from server_app.checkpoint import OutputError, write_json
from server_app.evaluation import Evaluator
from server_app.history import FAILED, RunHistory, run_folder
from server_app.settings import Settings, SettingsError
from strategies.registry import build
from strategies.split_plan import SplitService
from strategies.split_settings import OFF

app = ServerApp()
log = logging.getLogger("flwr.paceline")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run config describes."""
    settings = _settings(context)
    history = RunHistory(run_folder(settings.run.out_dir, context.run_id), settings)
    try:
        if any("runtime-envs" in entry for entry in sys.path):
            history.note(
                "Flower installed this app's dependencies again for this run; set "
                "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 before the SuperLink starts to save that time"
            )
        federate(grid, settings, history)
    except BaseException as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        log.error("run failed: %s", cause)
        try:
            history.finish(cause)
        except OutputError as second:  # must not hide why the run failed
            log.error("%s", second)
        raise
    history.finish()
    log.info("outputs in %s", history.folder)


def federate(grid: Grid, settings: Settings, history: RunHistory) -> ArrayRecord:
    """Put evaluator, strategy and fleet together and run; returns the last weights."""
    evaluator = Evaluator(settings.task_refs, settings.data, settings.sharing)
    strategy = build(settings.strategy, list(evaluator.tasks))
    federation = _with_fleet(grid, settings)
    with contextlib.ExitStack() as stack:
        if settings.split.mode != OFF:
            strategy.use_split(stack.enter_context(_split(settings, history, evaluator, federation)), settings.split)
        try:
            return run_loop.run(federation, settings, strategy, evaluator, history)
        finally:
            for note in getattr(federation, "notes", ()):
                history.note(note)


def _split(
    settings: Settings, history: RunHistory, evaluator: Evaluator, federation: Grid
) -> contextlib.AbstractContextManager[SplitService]:
    """The split service of the run. Its costs are measured, but where a fleet's clock is virtual, its device is too."""
    from server_app.split_service import split_service

    virtual = getattr(federation, "server_costs", lambda: None)()
    return split_service(settings, history.folder.name, evaluator, virtual, history.note)


def _settings(context: Context) -> Settings:
    """Parsed settings; faults are logged one a line and left in a summary where the run config says where."""
    try:
        return Settings.from_run_config(context.run_config)
    except SettingsError as error:
        for fault in error.faults:
            log.error("%s", fault)
        out_dir: Any = context.run_config.get("out-dir", "")
        try:
            folder = run_folder(out_dir if isinstance(out_dir, str) and out_dir.startswith("/") else "", context.run_id)
            write_json(folder / "summary.json", {"status": FAILED, "cause": str(error), "rounds": []})
        except (OutputError, ValueError) as second:  # ValueError: out-dir itself may be what is faulty
            log.error("no summary: %s", second)
        raise


def _with_fleet(grid: Grid, settings: Settings) -> Grid:
    """The grid itself, or, where a simulated fleet is set, a virtual one around it."""
    if not settings.fleet.name:
        return grid
    from simulations.fleet import load_fleet
    from simulations.virtual_grid import VirtualGrid

    fleet = load_fleet(settings.fleet.name)
    return VirtualGrid(
        grid,
        fleet,
        settings.task_refs,
        seed=settings.data.seed,
        clock=settings.fleet.clock,
        identity_timeout_s=settings.run.join_timeout_s,
        hold_s=settings.run.round_timeout_s,
    )
