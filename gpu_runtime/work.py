"""What an executor runs: work cut into steps. `training.TaskTraining` and `evaluation.TaskEvaluation` are such work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class TrainingError(RuntimeError):
    """Work that cannot go on; the text says why in one line."""


class RemoteError(TrainingError):
    """What went wrong in another process; the text is its error in one line, with its type."""


class Work(ABC):
    """A piece of work of one task, advanced one step at a time, never by two threads at once.

    Attributes:
        task: name of the task.
        num_examples: examples to work through.
        batch_size: examples a step takes (the last may take fewer).
        examples_done, steps_done: progress.
        lane: the only lane that can take its next steps; None for any.
        own_lane: whether its steps mostly wait, for a network say: it then gets a lane of its own in this process,
            beside those of the backend, and no core is kept for it.
        can_move: whether its lane may go to another stream of the device between two steps.
    """

    task: str
    num_examples: int
    batch_size: int
    examples_done: int = 0
    steps_done: int = 0
    lane: str | None = None
    own_lane: bool = False
    can_move: bool = False

    @property
    def finished(self) -> bool:
        return self.examples_done >= self.num_examples

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not go as planned and was overcome, in words for the report."""
        return ()

    def shrink(self, fraction: float, need: str) -> bool:
        """Called before the first step: do with at most `fraction` of the memory, for the reason that `need` tells.

        Returns:
            False when the work cannot.
        """
        return False

    def advance(self, num_steps: int, stopping: Callable[[], bool]) -> None:
        """Take `num_steps` steps; fewer when the work is finished or `stopping` says so between two of them."""
        for _ in range(num_steps):
            self.step()
            if self.finished or stopping():
                break

    def moved(self) -> None:  # noqa: B027 - most work does not care
        """Called on the lane's new stream before the next step, if the lane has gone elsewhere since the last one.

        All that was started on the old stream has ended by then.
        """

    @abstractmethod
    def step(self) -> None:
        """Advance by one batch. Called in the lane's thread, on the lane's stream."""

    def interrupt(self) -> None:  # noqa: B027 - most steps end by themselves
        """Called by any thread when the work is cancelled: have a step that waits for others end, with an error."""

    @abstractmethod
    def finish(self) -> None:
        """Called once in the lane, after the last step: bring the results to the host and let the device memory go."""

    @abstractmethod
    def abandon(self) -> None:
        """Called instead of `finish` when the work failed or was cancelled: let the memory go."""


def one_line(error: BaseException) -> str:
    """An exception in one line of at most 300 characters."""
    lines = str(error).strip().splitlines()
    if isinstance(error, RemoteError) and lines:
        text = lines[0]
    else:
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
