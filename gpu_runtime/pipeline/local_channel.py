"""A channel without a network: straight into a StageHost, in the caller's thread."""

from __future__ import annotations

import threading
from collections import deque

from gpu_runtime.pipeline.encoding import EncodingError
from gpu_runtime.pipeline.messages import tensor_buffers
from gpu_runtime.pipeline.session import (
    Activation,
    Channel,
    Gradient,
    LinkError,
    LinkStatistics,
    ProtocolError,
    SessionEnd,
    SessionSpec,
    SplitError,
    StageHost,
    StageSession,
)
from gpu_runtime.work import one_line


class LocalChannel(Channel):
    """Trains each micro-batch as it is sent. Without threads there is nothing to wait for: `receive` never blocks."""

    def __init__(self, host: StageHost) -> None:
        self._host = host
        self._stage: StageSession | None = None
        self._spec: SessionSpec | None = None
        self._due = (0, 0)
        self._gradients: deque[Gradient] = deque()
        self._failure: SplitError | None = None
        self._finished = False
        self._lock = threading.Lock()
        self._bytes_up = self._bytes_down = 0

    def open(self, spec: SessionSpec) -> None:
        with self._lock:
            self._check()
            self._spec = spec
            self._stage = self._host.open(spec)

    def send(self, activation: Activation) -> None:
        with self._lock:
            stage = self._open_stage()
            try:
                self._check_due(activation)
                gradient = stage.train(activation)
            except Exception as error:
                raise self._fail(error) from error
            self._bytes_up += sum(map(len, tensor_buffers([*activation.tensors, *activation.targets])))
            self._bytes_down += sum(map(len, tensor_buffers(gradient.tensors)))
            self._gradients.append(gradient)

    def receive(self) -> Gradient:
        with self._lock:
            self._open_stage()
            if not self._gradients:
                raise ProtocolError("no micro-batch is under way")
            return self._gradients.popleft()

    def finish(self, end: SessionEnd) -> None:
        with self._lock:
            stage = self._open_stage()
            try:
                if self._due[1] or self._gradients:
                    raise ProtocolError("the session ends in the middle of a step")
                theirs = stage.finish(end)
                if theirs != end:
                    raise ProtocolError(f"the device has trained {end}, the service {theirs}")
            except Exception as error:
                raise self._fail(error) from error
            self._finished = True

    def close(self) -> None:
        with self._lock:
            stage, self._stage = self._stage, None
            if stage is not None and not self._finished and self._failure is None:
                stage.abandon()
            self._failure = self._failure or LinkError("the channel is closed")

    @property
    def statistics(self) -> LinkStatistics:
        return LinkStatistics(bytes_up=self._bytes_up, bytes_down=self._bytes_down)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _open_stage(self) -> StageSession:
        self._check()
        if self._stage is None:
            raise ProtocolError("the channel is not open")
        return self._stage

    def _check_due(self, activation: Activation) -> None:
        assert self._spec is not None
        if (activation.step, activation.index) != self._due or activation.count > self._spec.micro_batches:
            raise ProtocolError(
                f"micro-batch {activation.index} of {activation.count} of step {activation.step} came where "
                f"{self._due[1]} of step {self._due[0]} is due"
            )
        if activation.index == 0 and self._gradients:
            raise ProtocolError(f"step {activation.step} begins before the gradients of the one before have arrived")
        last = activation.index == activation.count - 1
        self._due = (activation.step + 1, 0) if last else (activation.step, activation.index + 1)

    def _fail(self, error: Exception) -> SplitError:
        """The session is lost."""
        if isinstance(error, SplitError):
            self._failure = error
        elif isinstance(error, EncodingError):
            self._failure = ProtocolError(str(error))
        else:
            self._failure = SplitError(one_line(error))
        if self._stage is not None:
            self._stage.abandon()
        return self._failure
