"""Weights survive the way to disk and back; a failed write leaves the old file alone."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from server_app.checkpoint import OutputError, append_line, load_weights, save_weights, write_json


def test_weights_come_back_equal_in_value_shape_and_dtype(tmp_path: Path) -> None:
    arrays = {
        "a/weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a/count": np.array(7, dtype=np.int64),
        "b/empty": np.zeros((0, 3), dtype=np.float64),
    }
    save_weights(tmp_path / "checkpoint", "last", arrays, {"round": 3})
    loaded = load_weights(tmp_path / "checkpoint", "last")
    assert loaded.keys() == arrays.keys()
    for key, value in arrays.items():
        assert loaded[key].dtype == value.dtype
        np.testing.assert_array_equal(loaded[key], value)
    assert json.loads((tmp_path / "checkpoint" / "last.json").read_text()) == {"round": 3}


def test_a_value_that_is_not_json_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "completed"})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text()) == {"status": "completed"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_is_told_with_the_path_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "completed"})
    (tmp_path / f".summary.json.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=f"^cannot write {path}: No space left on device$"):
        write_json(path, {"status": "failed"})
    assert json.loads(path.read_text()) == {"status": "completed"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_is_told_of_a_growing_file_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=f"^cannot write {path}: No space left on device$"):
        append_line(path, "{}")


def test_weights_below_a_file_are_told_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(OutputError, match=f"^cannot write {tmp_path}/checkpoint: File exists$"):
        save_weights(tmp_path / "checkpoint", "last", {}, {})
