"""Gradient clipping by norm. Its limit moves with no rule: :func:`leaven.scaling.table.clip_reason` says why."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from leaven.recipe.hyperparameters import Clip
from leaven.scaling.table import ParameterTable

_STATE = "clip.running"  # among the optimiser's tensors in a checkpoint


@dataclass
class RunningNorm:
    """The root mean square of the gradient norms so far, exponentially weighted and corrected for its start at 0."""

    beta: float
    mean_square: float = 0.0
    steps: int = 0

    @property
    def value(self) -> float:
        """Infinite before the first gradient that is not 0: nothing is known yet, so nothing is clipped."""
        if self.mean_square == 0:
            return math.inf
        return math.sqrt(self.mean_square / (1 - self.beta**self.steps))

    def add(self, norm: float) -> None:
        self.mean_square = self.beta * self.mean_square + (1 - self.beta) * norm**2
        self.steps += 1


@dataclass
class Clipper:
    """Scales gradients down in place.

    ``parts`` are the parameters whose norms are limited one by one: all of them together, or those of each module in
    each block. ``running`` is there in mode ``running`` only: the limit is then in units of it.
    """

    limit: float
    parts: list[list[nn.Parameter]]
    running: RunningNorm | None = None

    @classmethod
    def build(cls, clip: Clip, model: nn.Module, table: ParameterTable) -> "Clipper":
        parameters = dict(model.named_parameters())
        parts: dict[object, list[nn.Parameter]] = {}
        for row in table.rows:
            part = (row.module, row.layer) if clip.mode == "per-module" else None
            parts.setdefault(part, []).append(parameters[row.name])
        running = RunningNorm(table.beta2) if clip.mode == "running" else None
        return cls(clip.limit or math.inf, list(parts.values()), running)

    def __call__(self) -> float:
        """Clip the gradients there are; returns the global norm that they had before."""
        limit = self.limit * (self.running.value if self.running is not None else 1.0)
        norms = [float(clip_grad_norm_(part, limit)) for part in self.parts]
        norm = math.hypot(*norms) if len(norms) > 1 else norms[0]
        if self.running is not None and math.isfinite(norm):
            # What the optimiser saw: a spike that was clipped must not raise the limit for the next one.
            self.running.add(min(norm, limit))
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        if self.running is None:
            return {}
        state = (self.running.mean_square, float(self.running.steps))
        return {_STATE: torch.tensor(state, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.running is not None and _STATE in state:
            mean_square, steps = state[_STATE].tolist()
            self.running.mean_square, self.running.steps = mean_square, int(steps)
