"""The runtime itself as a variant: whatever `EmbeddedRuntime` does with a plan, its profile measured just before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_runtime.allocator import TaskLoad, predicted_makespan
from gpu_runtime.apart import apart
from gpu_runtime.bench.mixes import ORIGIN, Work
from gpu_runtime.bench.models import build
from gpu_runtime.bench.variants import Run, Variant, VariantError
from gpu_runtime.contracts import FAILED, DataSpec, HeldTask, Plan, TaskCost, TaskPlan, array_key
from gpu_runtime.device import Device
from gpu_runtime.runtime import EmbeddedRuntime
from gpu_runtime.settings import SharingSettings


class DeviceRuntime(EmbeddedRuntime):
    """An embedded runtime on the synthetic tasks and on a device that is given, not discovered."""

    def __init__(self, device: Device, sharing: SharingSettings, budget_s: float) -> None:
        super().__init__(build, sharing, budget_s=budget_s)
        self._device = device


class Ours(Variant):
    """The runtime with a sharing mode and backend.

    Args:
        name: of the variant.
        device: where.
        mode: of sharing.
        backend: what lanes are made of; `auto` for what the runtime chooses.
        profile_s: seconds that profiling may take for each task.
    """

    def __init__(
        self, name: str, device: Device, *, mode: str = "competitive", backend: str = "auto", profile_s: float = 0.5
    ) -> None:
        self.name, self._mode = name, mode
        sharing = SharingSettings(mode=mode, backend=backend, cores=device.num_cores if device.kind == "cpu" else 0)
        self._runtime = DeviceRuntime(device, sharing, profile_s)
        self._costs: dict[str, TaskCost] = {}
        self._capacity = 1.0

    def prepare(self, work: Work) -> None:
        """Profile the tasks: as a client does before its first round."""
        profile = apart(lambda: self._runtime.profile(ORIGIN.client, _held(list(work))))
        if profile.errors:
            raise VariantError("; ".join(profile.errors))
        self._capacity = profile.capacity
        self._costs.update({task.task: task.cost for task in profile.tasks if task.cost is not None})

    def predicted_s(self, work: Work) -> float:
        """Makespan of the work by the profile alone. Call `prepare` first."""
        loads = [
            TaskLoad(
                task=task,
                num_examples=share.num_examples,
                solo_cost_s=self._costs[task].solo_cost_s,
                demand=self._costs[task].demand,
                speed_curve=self._costs[task].speed_curve,
            )
            for task, share in work.items()
        ]
        return predicted_makespan(loads, self._capacity)

    def run(self, work: Work, deadline_s: float, *, trace: bool = False) -> Run:
        plan = Plan(
            client=ORIGIN.client,
            server_round=ORIGIN.server_round,
            seed=ORIGIN.seed,
            tasks=tuple(TaskPlan(task=task, num_examples=share.num_examples) for task, share in work.items()),
            sharing_mode=self._mode,
            deadline_s=deadline_s,
            trace=trace,
        )
        arrays = {array_key(task, name): array for task, share in work.items() for name, array in share.arrays.items()}
        report = apart(lambda: self._runtime.train(plan, arrays, _held(list(work)))).report
        failed = [f"{task.task}: {task.error}" for task in report.tasks if task.outcome == FAILED]
        if failed:
            raise VariantError("; ".join(failed))
        done: Mapping[str, int] = {task.task: task.num_examples for task in report.tasks}
        total_s = sum(share.one_s for share in work.values())
        return Run(
            seconds=report.seconds,
            finish_s={task.task: task.seconds for task in report.tasks},
            done_fraction=sum(share.one_s * done[task] / share.num_examples for task, share in work.items()) / total_s,
            backend=report.backend,
        )

    def close(self) -> None:
        self._runtime.close()


def _held(tasks: Sequence[str]) -> list[HeldTask]:
    return [HeldTask(ref=task, data=DataSpec()) for task in tasks]
