"""The virtual clock: iterations by the discrete-event simulator, from measured stage times and the link's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_runtime.pipeline.cut_costs import Link
from gpu_runtime.pipeline.makespan import Affine, CutCost, busy_s, micro_batch_sizes
from gpu_runtime.pipeline.planner import Choice
from gpu_runtime.pipeline.simulator import SERVER, SimulatedSession, Timeline, simulate
from simulations.bench.pipelines.service import Iteration

# Steps of a simulated session; the first one is not counted, as in real time.
NUM_STEPS = 5


def virtual_iteration(choice: Choice, batch_size: int, link: Link) -> Iteration:
    """One iteration of a client alone on the service, whose cuts were costed over `link`."""
    if choice.cut is None:
        return Iteration(seconds=choice.step_s, device_s=choice.step_s, server_s=0.0, uplink_s=0.0, downlink_s=0.0)
    seconds = seconds_per_step(simulate([_session("client", choice.cut, batch_size, choice.micro_batches)]), 0)
    busy = busy_s(choice.cut, batch_size, choice.micro_batches)
    messages_s = choice.micro_batches * link.message_s
    return Iteration(
        seconds=seconds,
        device_s=busy.device,
        server_s=busy.server,
        uplink_s=busy.uplink,
        downlink_s=busy.downlink,
        bytes_up=round((busy.uplink - messages_s) * (link.uplink_bytes_per_s or 0.0)),
        bytes_down=round((busy.downlink - messages_s) * (link.downlink_bytes_per_s or 0.0)),
    )


def virtual_clients(
    choices: Sequence[Choice], batch_size: int, server_capacity: float, num_steps: int = NUM_STEPS
) -> Timeline:
    """Clients on one service, which does `server_capacity` seconds of server work a second.

    The simulated server does one piece of work at a time, that much faster; a real one with several lanes does several.
    """
    sessions = []
    for number, choice in enumerate(choices):
        assert choice.cut is not None, "a whole training does not meet others on the service"
        cut = replace(
            choice.cut,
            server=_faster(choice.cut.server, server_capacity),
            server_update_s=choice.cut.server_update_s / server_capacity,
        )
        sessions.append(_session(f"client-{number}", cut, batch_size, choice.micro_batches, num_steps))
    return simulate(sessions)


def seconds_per_step(timeline: Timeline, session: int) -> float:
    """Mean over all steps of a session but the first."""
    ends_s = timeline.step_ends_s[session]
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def server_idle_s(timeline: Timeline) -> float:
    """Seconds a step in which the service has nothing to do, over all steps but the first."""
    num_steps = len(timeline.step_ends_s[0])
    first_s = max(ends_s[0] for ends_s in timeline.step_ends_s)
    last_s = max(ends_s[-1] for ends_s in timeline.step_ends_s)
    work_s = sum(
        max(0.0, min(work.end_s, last_s) - max(work.start_s, first_s))
        for work in timeline.work
        if work.resource == SERVER
    )
    return (last_s - first_s - work_s) / (num_steps - 1)


def _session(client: str, cut: CutCost, batch_size: int, count: int, num_steps: int = NUM_STEPS) -> SimulatedSession:
    return SimulatedSession(client=client, cut=cut, steps=[micro_batch_sizes(batch_size, count)] * num_steps)


def _faster(work: Affine, factor: float) -> Affine:
    return Affine(call_s=work.call_s / factor, example_s=work.example_s / factor)
