"""What all tests share: profiles are measured task by task, without the trials of whole mixes and their workers."""

import pytest

from gpu_runtime.mix_trial import MixTrials


@pytest.fixture(autouse=True)
def no_mix_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu_runtime/test_mix_trial.py has its own, which lets them happen."""
    monkeypatch.setattr(MixTrials, "_measured", lambda *_: None)
