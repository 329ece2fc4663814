"""Makes this folder's fakes importable whatever pytest's import mode, and keeps measured profiles out of the user's."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# scripts/gpu_check.sh may run where torch, numpy and pytest are all there is.
if importlib.util.find_spec("hypothesis") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if "from hypothesis" in path.read_text()]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch.cuda.is_available() is false")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
