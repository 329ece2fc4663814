"""The benchmarks' command line, with the benchmark itself replaced."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulations.bench import __main__ as bench
from simulations.bench import competitive


def test_the_result_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def measured(device: Any, *, seconds: float, pairs: int, say: Any) -> dict[str, Any]:
        asked.update(device=device.kind, seconds=seconds, pairs=pairs)
        say("on the way")
        return {"name": "competitive", "headline": {}}

    monkeypatch.setattr(competitive.competitive, "run", measured)
    file = tmp_path / "result.json"
    assert bench.main(["competitive", "--device", "cpu", "--quick", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(file.read_text()) == {"name": "competitive", "headline": {}}
    assert captured.err == "on the way\n"
    assert asked == {"device": "cpu", **competitive.QUICK}


def test_an_absent_device_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(["competitive", "--device", "cuda"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
