"""A worker process: trains what it is told to, a few steps at a time. Started by `gpu_runtime.workers.pool` only.

Orders and answers are frames on a Unix socket. Every order is answered; a fault by `{"error": LINE}`.

begin    task, held, plan, origin, device; arrays; descriptors of shared memory, or none -> {}
steps    task, num_steps, width, stage (null: this worker took the last steps)         -> {stage}
finish   task, stage                                                                   -> {stage}; arrays
forget                                                                                 -> {}
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import torch

from gpu_runtime.contracts import HeldTask, TaskPlan, from_mapping
from gpu_runtime.socket_wire import Frame, WireError, close_all, receive, send
from gpu_runtime.training import Origin, TaskTraining
from gpu_runtime.work import one_line
from gpu_runtime.workers.handover import OwnTraining, SharedTraining, Stage, from_plain, to_plain
from gpu_runtime.workload import SyntheticExamples
from gpu_runtime.workload_cache import WorkloadCache

PARENT_POLL_S = 1.0


class Worker:
    """What one worker holds: workloads, and its copies of the trainings of this execution.

    Args:
        factory: of workloads, "package.module:function".
    """

    def __init__(self, factory: str) -> None:
        self._workloads = WorkloadCache(factory)
        self._trainings: dict[str, SharedTraining | OwnTraining] = {}

    def answer(self, frame: Frame) -> Frame:
        """Carry out one order."""
        order = str(frame.header["order"])
        if order == "begin":
            return self._begin(frame)
        if order == "forget":
            while self._trainings:
                self._trainings.popitem()[1].close()
            return Frame(header={})
        training = self._trainings[str(frame.header["task"])]
        stage = None if frame.header["stage"] is None else from_plain(frame.header["stage"])
        if order == "steps":
            torch.set_num_threads(int(frame.header["width"]))
            return Frame(header={"stage": to_plain(training.advance(int(frame.header["num_steps"]), stage))})
        if order == "finish":
            arrays = training.finish(stage)
            return Frame(header={"stage": to_plain(Stage(progress=training.training.progress))}, arrays=arrays)
        raise ValueError(f"unknown order {order!r}")

    def _begin(self, frame: Frame) -> Frame:
        body = frame.header
        try:
            workload = self._workloads.get(from_mapping(HeldTask, body["held"]))
            training = TaskTraining(
                workload=SyntheticExamples(workload) if body["synthetic"] else workload,
                plan=from_mapping(TaskPlan, body["plan"]),
                arrays=frame.arrays,
                origin=Origin(**body["origin"]),
                device=torch.device(body["device"]),
            )
            if not frame.descriptors:
                self._trainings[str(body["task"])] = OwnTraining(training, torch.device(body["device"]))
                return Frame(header={})
            model_memory, optimizer_memory = frame.descriptors
        except BaseException:
            close_all(frame.descriptors)
            raise
        self._trainings[str(body["task"])] = SharedTraining(training, model_memory, optimizer_memory)
        return Frame(header={})


def serve(sock: socket.socket, factory: str) -> None:
    """Answer orders until the other side goes."""
    worker = Worker(factory)
    try:
        send(sock, Frame(header={"pid": os.getpid()}))
        while True:
            order = receive(sock)
            try:
                answer = worker.answer(order)
            except BaseException as error:  # it must reach the parent, whatever it is
                answer = Frame(header={"error": one_line(error)})
            send(sock, answer)
    except WireError:
        pass


def leave_with_parent(parent: int) -> None:
    """End at once when the parent has died, even in a step that never returns, and all that tasks have started."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end_group()

    threading.Thread(target=watch, daemon=True).start()


def end_group() -> None:
    """End this process and what is left of its children: it leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(arguments: list[str]) -> int:
    """Descriptor of the socket, process id of the parent, workload factory."""
    descriptor, parent, factory = arguments
    leave_with_parent(int(parent))
    torch.set_num_threads(1)
    with socket.socket(fileno=int(descriptor)) as sock:
        serve(sock, factory)
    end_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
