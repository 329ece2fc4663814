"""The service's end of one session: what has come, what goes back, and the one thread that trains.

A session outlives the streams it runs over. Each micro-batch is taken exactly once, in order; gradients of the step
under way are kept until the first micro-batch of the next one says that they have arrived.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gpu_runtime.pipeline import split_pb2 as pb
from gpu_runtime.pipeline.encoding import EncodingError
from gpu_runtime.pipeline.frames import Assembler, Frame
from gpu_runtime.pipeline.messages import end_message, failure_message, gradient_frames
from gpu_runtime.pipeline.session import (
    Activation,
    ProtocolError,
    SessionEnd,
    SessionSpec,
    SplitError,
    StageHost,
    StageSession,
)
from gpu_runtime.work import one_line


class Superseded(Exception):
    """The stream is no longer the session's: another one has taken its place, or the session is over."""


class Stream:
    """One connection: frames on their way out. `session` is None until it has said Hello; `cancel` breaks it off."""

    def __init__(self, max_message_bytes: int, cancel: Callable[[], object] = lambda: None) -> None:
        self.cancel = cancel
        self.assembler = Assembler("activation", max_message_bytes)
        self.session: ServedSession | None = None
        self.heard_s = time.monotonic()
        self.num_queued = 0
        self._num_sent = 0
        self.held_up = False
        self._taken_s: float | None = None
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def push(self, frame: Frame) -> None:
        self._frames.put(frame)

    def end(self) -> None:
        """Nothing more goes out after what has been pushed."""
        self._frames.put(None)

    def fail(self, error: SplitError) -> None:
        """Tell the other side, and end."""
        self.push(Frame(pb.ServerFrame(failure=failure_message(error))))
        self.end()

    def take(self, timeout_s: float | None) -> Frame | None:
        """The next frame to send; None at the end. Raises queue.Empty."""
        self._taken_s = None
        frame = self._frames.get(timeout=timeout_s)
        self._taken_s = time.monotonic()
        if frame is not None and frame.message.HasField("piece"):
            piece = frame.message.piece
            self._num_sent += piece.number == piece.count - 1
        return frame

    def stuck_s(self, now_s: float) -> float:
        """For how long the frame taken last has been on its way out; 0 where none is."""
        taken_s = self._taken_s
        return now_s - taken_s if taken_s is not None else 0.0

    @property
    def num_waiting(self) -> int:
        """Frames pushed and not yet taken."""
        return self._frames.qsize()

    @property
    def num_unsent(self) -> int:
        """Gradients queued (counted by the session) and not yet taken (counted by the sending thread)."""
        return self.num_queued - self._num_sent


@dataclass(frozen=True, slots=True)
class _Arrived:
    activation: Activation
    arrived_s: float
    held_up: bool


class ServedSession:
    """One session of a `StageHost`.

    `quiet_since_s` is when it last trained or lost its connection; `over` is set when its stage is gone.

    Args:
        spec: what the device wants.
        nonce: what tells this session from others with its key.
        host: opens its stage.
        queue_bound: micro-batches that may wait to be trained.
        previous: the session that this one replaces; it is gone before the new one is opened.
    """

    def __init__(
        self, spec: SessionSpec, nonce: str, host: StageHost, queue_bound: int, previous: ServedSession | None
    ) -> None:
        self.spec = spec
        self.nonce = nonce
        self._host = host
        self._queue_bound = queue_bound
        self._previous = previous
        self._changed = threading.Condition()
        self._incoming: deque[_Arrived] = deque()
        self._num_taken = 0
        self._due = (0, 0)
        self._count: int | None = None
        self._kept: deque[list[Frame]] = deque()
        self._num_trained = 0
        self._opened = False
        self._finish: SessionEnd | None = None
        self._end: SessionEnd | None = None
        self._failure: SplitError | None = None
        self._stream: Stream | None = None
        self.quiet_since_s = time.monotonic()
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"split-{spec.key.client}-{spec.key.task}", daemon=True)

    def start(self) -> None:
        """Begin to open the stage."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether it has a stream."""
        return self._stream is not None

    @property
    def waiting(self) -> bool:
        """Whether it is the device's turn: nothing to train, nothing to send."""
        with self._changed:
            stream = self._stream
            return (
                self._opened
                and not self._incoming
                and self._num_trained == self._num_taken
                and not (stream is not None and stream.num_unsent > 0)
            )

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False when it is still busy."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ----------------------------------------------------------------------------------- called by the streams' readers

    def attach(self, stream: Stream, num_gradients: int) -> None:
        """`stream` takes the session over; the device has `num_gradients` of its gradients.

        Raises:
            ProtocolError: gradients that are not there any more, or not yet.
        """
        with self._changed:
            first = self._num_trained - len(self._kept)
            if self._failure is None and not first <= num_gradients <= self._num_trained:
                raise ProtocolError(
                    f"the device has {num_gradients} gradients; the service holds {first} to {self._num_trained}"
                )
            if self._stream is not None:
                self._stream.end()
            self._stream = stream
            stream.session = self
            if self._failure is not None:
                stream.fail(self._failure)
            elif self._opened:
                self._welcome(stream, num_gradients - first)
            self._changed.notify_all()

    def detach(self, stream: Stream) -> None:
        """`stream` is gone."""
        with self._changed:
            if self._stream is stream:
                self._stream = None
                self.quiet_since_s = time.monotonic()
                self._changed.notify_all()

    def accept(self, stream: Stream, activation: Activation, arrived_s: float) -> None:
        """Take a micro-batch, once there is room.

        Raises:
            ProtocolError: it is not the one that is due.
            Superseded: the stream has lost the session.
        """
        with self._changed:
            self._check_due(stream, activation)
            waited = False
            while len(self._incoming) >= self._queue_bound and self._stream is stream and self._failure is None:
                waited = True
                self._changed.wait()
            if self._stream is not stream or self._failure is not None or self._end is not None:
                raise Superseded
            if activation.index == 0:
                self._kept.clear()
            self._count = activation.count
            last = activation.index == activation.count - 1
            self._due = (activation.step + 1, 0) if last else (activation.step, activation.index + 1)
            self._num_taken += 1
            self._incoming.append(_Arrived(activation, arrived_s, stream.held_up))
            stream.held_up = waited
            self._changed.notify_all()

    def finish(self, stream: Stream, end: SessionEnd) -> None:
        """The device says that all steps are done.

        Raises:
            ProtocolError: in the middle of a step, or twice with other words.
        """
        with self._changed:
            if self._stream is not stream:
                raise Superseded
            if self._due[1] != 0 or (self._finish not in (None, end)):
                raise ProtocolError(f"the device finishes when micro-batch {self._due} is due")
            self._finish = end
            if self._end is not None:
                stream.push(Frame(pb.ServerFrame(done=end_message(self._end))))
            self._changed.notify_all()

    def owns(self, stream: Stream) -> bool:
        """Whether `stream` is the session's."""
        return self._stream is stream

    def fail(self, error: SplitError) -> None:
        """The session is lost; the device is told why."""
        with self._changed:
            if self._failure is None and self._end is None:
                self._failure = error
                self._incoming.clear()
                if self._stream is not None:
                    self._stream.fail(error)
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- the session's thread

    def _run(self) -> None:
        stage: StageSession | None = None
        try:
            if self._previous is not None:
                while not self._previous.over.wait(0.5):
                    if self._failure is not None:
                        return
                self._previous = None
            stage = self._host.open(self.spec)
            with self._changed:
                self._opened = True
                if self._stream is not None and self._failure is None:
                    self._welcome(self._stream, 0)
            while (arrived := self._next()) is not None:
                self._train(stage, arrived)
            if self._finish is not None and self._failure is None:
                end = stage.finish(self._finish)
                with self._changed:
                    self._end = end
                    if self._stream is not None:
                        self._stream.push(Frame(pb.ServerFrame(done=end_message(end))))
        except SplitError as error:
            self.fail(error)
        except EncodingError as error:
            self.fail(ProtocolError(str(error)))
        except Exception as error:
            # Whatever went wrong in a model is this session's trouble: the service goes on.
            self.fail(SplitError(one_line(error)))
        finally:
            try:
                if stage is not None and self._end is None:
                    stage.abandon()
            finally:
                with self._changed:
                    self._kept.clear()
                    self.quiet_since_s = time.monotonic()
                self.over.set()

    def _next(self) -> _Arrived | None:
        """The next micro-batch; None when there will be none."""
        with self._changed:
            while not self._incoming and self._failure is None and self._finish is None:
                self._changed.wait()
            if self._failure is not None or not self._incoming:
                return None
            arrived = self._incoming.popleft()
            self._changed.notify_all()
            return arrived

    def _train(self, stage: StageSession, arrived: _Arrived) -> None:
        gradient = stage.train(arrived.activation)
        if (gradient.step, gradient.index) != (arrived.activation.step, arrived.activation.index):
            raise SplitError(f"the stage answered micro-batch {gradient.step, gradient.index} instead")
        frames = gradient_frames(gradient, arrived.arrived_s, time.monotonic(), arrived.held_up)
        with self._changed:
            self._kept.append(frames)
            self._num_trained += 1
            self.quiet_since_s = time.monotonic()
            if self._stream is not None and self._failure is None:
                self._send(self._stream, frames)

    # ------------------------------------------------------------------------------------ under the session's condition

    def _welcome(self, stream: Stream, skip: int) -> None:
        stream.push(Frame(pb.ServerFrame(welcome=pb.Welcome(num_micro_batches=self._num_taken))))
        for frames in list(self._kept)[skip:]:
            self._send(stream, frames)

    def _send(self, stream: Stream, frames: list[Frame]) -> None:
        stream.num_queued += 1
        for frame in frames:
            stream.push(frame)

    def _check_due(self, stream: Stream, activation: Activation) -> None:
        if self._stream is not stream:
            raise Superseded
        if (activation.step, activation.index) != self._due:
            raise ProtocolError(
                f"micro-batch {activation.index} of step {activation.step} came where "
                f"{self._due[1]} of step {self._due[0]} is due"
            )
        if activation.count > self.spec.micro_batches or (activation.index and activation.count != self._count):
            raise ProtocolError(f"a step of {activation.count} micro-batches; {self.spec.micro_batches} were agreed")
        if self._finish is not None:
            raise ProtocolError("a micro-batch after the end")
        unfinished = self._num_trained < self._num_taken or stream.num_unsent > 0
        if activation.index == 0 and unfinished:
            raise ProtocolError(f"step {activation.step} begins before the gradients of the one before have arrived")
