"""What all tests share: signals end programs, and profiles are measured task by task, without the trials of whole mixes
and their workers."""

import signal

import pytest

from gpu_runtime.mix_trial import MixTrials


@pytest.fixture(autouse=True, scope="session")
def signals_end_programs() -> None:
    """Who starts the tests in the background may have had these ignored, which programs that tests start inherit."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def no_mix_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu_runtime/test_mix_trial.py has its own, which lets them happen."""
    monkeypatch.setattr(MixTrials, "_measured", lambda *_: None)
