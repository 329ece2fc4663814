"""What a split task costs a simulated client: the makespan of its pipeline in place of its solo cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_runtime.contracts import SplitReport, TaskCost, TaskPlan
from gpu_runtime.pipeline.cut_costs import ON, Link, SplitOptions, SplitTask, cuts
from gpu_runtime.pipeline.makespan import busy_s, step_s


@dataclass(frozen=True, kw_only=True)
class VirtualPipeline:
    """One step of a split task on the virtual clock, alone on its device, its link and the split service."""

    step_s: float
    device_s: float
    server_s: float
    batch_size: int

    def cost(self, whole: TaskCost) -> TaskCost:
        """The task's cost as lanes see it: the pipeline's makespan, of which the device works a part."""
        return replace(
            whole,
            solo_cost_s=self.step_s / self.batch_size,
            demand=min(1.0, whole.demand * self.device_s / self.step_s),
            speed_curve=(),
        )

    def report(self, report: SplitReport, num_steps: int, link: Link) -> SplitReport:
        """A client's report in virtual seconds; bytes stay those that really crossed."""
        return replace(
            report,
            device_s=self.device_s * num_steps,
            server_s=self.server_s * num_steps,
            wait_s=(self.step_s - self.device_s) * num_steps,
            uplink_bytes_per_s=link.uplink_bytes_per_s,
            downlink_bytes_per_s=link.downlink_bytes_per_s,
            latency_s=link.latency_s,
        )


def pipeline(plan: TaskPlan, batch_size: int, device: TaskCost, server: TaskCost, link: Link) -> VirtualPipeline | None:
    """The pipeline of a task split as `plan` says.

    Args:
        plan: split point, micro-batches and encoding.
        batch_size: examples of a step.
        device, server: true costs on the client and on the service's device.
        link: between them.

    Returns:
        None where the costs of the model's blocks are not known, or the task is not split.
    """
    blocks = len(device.blocks)
    if plan.split_point is None or blocks != len(server.blocks) or not 0 < plan.split_point < blocks:
        return None
    split = SplitTask(
        task=plan.task,
        batch_size=batch_size,
        blocks=device.blocks,
        server_blocks=server.blocks,
        unsplit_step_s=device.solo_cost_s * batch_size,
        target_bytes=device.target_bytes,
        update_s=device.update_s,
        server_update_s=server.update_s,
    )
    point = plan.split_point
    options = SplitOptions(encodings=(plan.encoding,), min_depth=point, max_depth=point, mode=ON)
    (cut,) = cuts(split, link, options)
    count = min(plan.micro_batches, batch_size)
    busy = busy_s(cut, batch_size, count)
    return VirtualPipeline(
        step_s=step_s(cut, batch_size, count), device_s=busy.device, server_s=busy.server, batch_size=batch_size
    )
