"""A fluid model of a fleet whose true costs differ from its profiles by hidden errors, for tests of learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpu_runtime.contracts import Profile, Report, TaskReport
from strategies.load_assignment import Assignment, ClientLoad, LinearProgramAssigner, LoadProblem
from strategies.profiles import ProfileBook
from tests.strategies.fakes import profile_of

MODELS = {"digits": 0.002, "detection": 0.02, "segmentation": 0.01}


@dataclass(frozen=True, kw_only=True)
class FluidFleet:
    """Profiles as planners see them, and the truth."""

    profiles: tuple[Profile, ...]
    truth: Mapping[str, ClientLoad]
    sharing_mode: str

    @classmethod
    def random(cls, num_clients: int, seed: int, error: float = 0.15, sharing_mode: str = "competitive") -> FluidFleet:
        """Clients unequal in speed by several times; costs and capacity wrong by about `error`."""
        rng = np.random.default_rng(seed)
        profiles, truth = [], {}
        for index in range(num_clients):
            name, speed = f"client-{index}", float(np.exp(rng.uniform(0, 2)))
            mine = [task for task in MODELS if index == 0 or rng.random() < 0.8] or ["digits"]
            tasks = {task: (int(rng.integers(200, 1000)), MODELS[task] * speed) for task in mine}
            profile = profile_of(name, tasks, capacity=float(rng.uniform(0.9, 1.2)), fixed_s=0.2)
            profiles.append(profile)
            believed = ProfileBook(sharing_mode)
            believed.enter([profile])
            load = believed.load_of(name)
            truth[name] = replace(
                load,
                capacity=load.capacity / float(np.exp(rng.normal(0, error))),
                tasks={
                    task: replace(cost, solo_cost_s=cost.solo_cost_s * float(np.exp(rng.normal(0, error))))
                    for task, cost in load.tasks.items()
                },
            )
        return cls(profiles=tuple(profiles), truth=truth, sharing_mode=sharing_mode)

    def problem(self, clients: Mapping[str, ClientLoad]) -> LoadProblem:
        held = {task: [c.tasks[task].num_held for c in clients.values() if task in c.tasks] for task in MODELS}
        return LoadProblem(
            clients=tuple(clients.values()),
            totals={task: sum(numbers) // 2 for task, numbers in held.items() if numbers},
            sharing_mode=self.sharing_mode,
        )

    def report(self, client: str, loads: Mapping[str, int], noise: float = 1.0) -> Report:
        """What `client` reports after `loads`: all tasks end together, or one after another."""
        truth = self.truth[client]
        end_s = truth.finish_s(loads, self.sharing_mode) * noise
        tasks, passed_s = [], truth.fixed_s
        for task, load in loads.items():
            passed_s += truth.tasks[task].solo_cost_s * load
            seconds = passed_s * noise if self.sharing_mode == "sequential" else end_s
            tasks.append(TaskReport(task=task, num_examples=load, num_steps=-(-load // 32), seconds=seconds))
        return Report(client=client, server_round=1, seconds=end_s, clock="virtual", tasks=tuple(tasks))

    def best(self) -> Assignment:
        """The assignment of who knows the truth."""
        return LinearProgramAssigner().assign(self.problem(self.truth))

    def play(self, book: ProfileBook, noise: np.random.Generator | None = None) -> float:
        """One round by the book: assign, run, learn. Returns the true makespan over the true bound."""
        planned = LinearProgramAssigner().assign(self.problem({name: book.load_of(name) for name in self.truth}))
        for client, loads in planned.loads.items():
            factor = float(np.exp(noise.normal(0, 0.02))) if noise else 1.0
            book.learn(self.report(client, loads, factor))
        return self.problem(self.truth).makespan_s(planned.loads) / self.best().bound_s
