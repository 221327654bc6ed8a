"""Clips gradients by their norm. No scaling rule changes the limit of the norm; ``leaven show`` says why."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.distributed.sharded import ShardedModel
from leaven.model.kernels import multiply_, wide, widened
from leaven.recipe.hyperparameters import Clip
from leaven.scaling.apply import AT_BASE, Factors
from leaven.scaling.table import ParameterTable

_STATE = "clip.running"  # among the optimizer's tensors in a checkpoint


@dataclass
class RunningNorm:
    """The running root mean square of the gradient norms: an exponential average, corrected for its start at 0.

    When the batch size changes, the step count is converted as for Adam
    (:class:`leaven.training.optimizer.Optimizer`).
    """

    beta: float  # of the full batch
    state: Tensor  # mean square and steps, (2,) in float64 on the gradients' device

    def value(self, ramp: Factors = AT_BASE) -> Tensor:
        """Return the running norm, a scalar.

        It is infinite until the first nonzero gradient, so that nothing is clipped before.
        """
        mean_square, steps = self.state.unbind()
        return (mean_square / (1 - ramp.beta(self.beta) ** steps)).sqrt().masked_fill(mean_square == 0, torch.inf)

    def add(self, norm: Tensor, ramp: Factors = AT_BASE) -> None:
        """Add a norm to the average; ignore it if it is not finite."""
        (mean_square, steps), beta = self.state.unbind(), ramp.beta(self.beta)
        added = torch.stack((beta * mean_square + (1 - beta) * widened(norm) ** 2, steps + 1))
        self.state = torch.where(norm.isfinite(), added, self.state)


@dataclass
class Clipper:
    """Scales gradients down in place, without waiting for the device."""

    limit: float  # on the norm; in mode ``running`` in units of the running norm
    model: ShardedModel
    parts: Tensor | None = None  # in mode ``per-module``: the number of each row's module in its block
    running: RunningNorm | None = None  # in mode ``running``

    @classmethod
    def build(cls, clip: Clip, model: ShardedModel, table: ParameterTable) -> "Clipper":
        device, parts = model.device, None
        if clip.mode == "per-module":
            owners = [(row.module, row.layer) for row in table.rows]
            parts = torch.tensor([owners.index(owner) for owner in owners], device=device)
        state = torch.zeros(2, dtype=wide(device), device=device)
        running = RunningNorm(table.beta2, state) if clip.mode == "running" else None
        return cls(clip.limit or torch.inf, model, parts, running)

    def __call__(self, scale: Tensor | None = None, ramp: Factors = AT_BASE) -> Tensor:
        """Divide the gradients by ``scale`` and clip them. Return their global norm before clipping, a scalar.

        ``ramp`` converts the beta of the running norm from the full batch to the current batch of a ramp. As in
        torch, gradients above the limit are multiplied by limit / (norm + 1e-6).
        """
        gradients = [leaf.grad for leaf in self.model.leaves if leaf.grad is not None]
        assert len(gradients) == len(self.model.leaves)
        sizes = self.model.norms(gradients)[0]
        if scale is not None:
            sizes = sizes / scale
        norm: Tensor = torch.linalg.vector_norm(sizes)
        if self.limit == torch.inf and scale is None:
            return norm
        part_norms = norm
        if self.parts is not None:
            part_norms = torch.zeros_like(sizes).index_add_(0, self.parts, sizes**2).sqrt()[self.parts]
        limit = torch.full((), self.limit, dtype=wide(norm.device), device=norm.device)
        if self.running is not None:
            limit = limit * self.running.value(ramp)
        factors = (limit / (part_norms + 1e-6)).clamp(max=1.0).to(sizes.dtype)
        if factors.dim():
            factors = factors[self.model.of_held]
        multiply_(gradients, factors if scale is None else factors / scale)
        if self.running is not None:
            # The clipped norm: a spike must not raise the limit for the next one.
            self.running.add(torch.minimum(widened(norm), limit), ramp)
        return norm

    def recount(self, factor: float) -> None:
        """Convert the step count when the batch changes, as the optimizer does."""
        if self.running is not None:
            self.running.state = self.running.state * self.running.state.new_tensor([1.0, factor])

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.running is None else {_STATE: self.running.state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.running is not None and _STATE in state:
            self.running.state = state[_STATE].to(self.running.state, copy=True)
