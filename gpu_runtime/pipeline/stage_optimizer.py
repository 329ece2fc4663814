"""The optimiser of one half of a model: its step is that half's part of the whole model's step."""

from __future__ import annotations

import torch

from gpu_runtime.pipeline.stages import Stage
from gpu_runtime.precision import Precision
from gpu_runtime.training import pull_to_anchor
from gpu_runtime.workload import Workload


class StageOptimizer:
    """The workload's optimiser on a stage's parameters, with FedProx's pull to where they are now.

    Args:
        stage: with its start weights. One without parameters to train takes no steps, and no optimiser is asked for:
            many refuse an empty list, also one that a workload has filtered.
        workload: makes the optimiser.
        learning_rate: None for the workload's own.
        proximal_mu: strength of the pull; 0: none.
        precision: of the stage's training.
    """

    def __init__(
        self,
        stage: Stage,
        workload: Workload,
        *,
        learning_rate: float | None,
        proximal_mu: float,
        precision: Precision,
    ) -> None:
        self._parameters = list(stage.parameters())
        self._mu, self._precision = proximal_mu, precision
        rate = workload.learning_rate if learning_rate is None else learning_rate
        self._optimizer: torch.optim.Optimizer | None = None
        if any(parameter.requires_grad for parameter in self._parameters):
            self._optimizer = workload.optimizer(stage.parameters(), rate)
        self._anchor = [parameter.detach().clone() for parameter in self._parameters] if proximal_mu else []

    def step(self) -> None:
        """One step with the gradients that are there, which are dropped then."""
        if self._optimizer is None:
            return
        if self._anchor:
            pull_to_anchor(self._parameters, self._anchor, self._mu)
        self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
