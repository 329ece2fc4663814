"""The outputs of a run on a disk that is full: what can be written is, and the cause survives."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime.contracts import MEASURED, Report
from server_app import app, history
from server_app.checkpoint import OutputError
from server_app.history import RunHistory, run_folder
from server_app.settings import Settings, SettingsError

REPORT = Report(client="a", server_round=1, seconds=1.0, clock=MEASURED, tasks=())


def settings(out_dir: Path) -> Settings:
    return Settings.from_run_config({"suite": "tiny", "out-dir": str(out_dir)})


def fill(folder: Path, name: str) -> None:
    """Let the file `name` be on a full disk."""
    (folder / f".{name}.{os.getpid()}.partial").symlink_to("/dev/full")


def test_a_trace_that_cannot_be_written_is_a_note_in_the_summary(tmp_path: Path) -> None:
    written = RunHistory(tmp_path, settings(tmp_path))
    written._reports.append(REPORT)
    fill(tmp_path, "trace.json")
    written.finish()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["notes"] == [f"cannot write {tmp_path}/trace.json: No space left on device"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "7").write_text("a file")
    with pytest.raises(OutputError, match=f"^cannot write {tmp_path}/7: File exists$"):
        run_folder(str(tmp_path), 7)


def test_a_summary_that_cannot_be_written_does_not_hide_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    fill(folder, "summary.json")

    def fails(*_: Any) -> None:
        raise RuntimeError("the cause")

    monkeypatch.setattr(app, "federate", fails)
    context: Any = SimpleNamespace(run_id=7, run_config={"suite": "tiny", "out-dir": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"^the cause$"):
        app.main(None, context)  # type: ignore[call-arg, arg-type]
    assert history.run_folder(str(tmp_path), 7) == folder
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize("out_dir", ["/nowhere/a\0b", "/dev/null/x"])
def test_faulty_settings_are_the_cause_also_where_no_summary_can_be_left(out_dir: str) -> None:
    context: Any = SimpleNamespace(run_id=7, run_config={"out-dir": out_dir, "rounds": 0})
    with pytest.raises(SettingsError, match="rounds must be"):
        app.main(None, context)  # type: ignore[call-arg, arg-type]
