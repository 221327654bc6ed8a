"""Builds Adam with parameter groups from the parameter table, and clips gradients by their norm.

Parameters of one module share a group if their lr, betas, eps and weight decay are equal. No scaling rule changes the
norm limit; ``leaven show`` explains why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leaven.distributed.sharded_model import ShardedModel
from leaven.model.kernels import gate, multiply_, wide, widened
from leaven.recipe.hyperparameters import Clip
from leaven.scaling.apply import AT_BASE, Factors
from leaven.scaling.table import ParameterRow, ParameterTable, optimizer_groups

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""The names of Adam's state for a parameter: the step count, which is a scalar, and two moments, which have the shape
of the parameter."""

Moments = Mapping[tuple[str, str], Tensor]


def parameter_groups(parameters: Mapping[str, Tensor], rows: Sequence[ParameterRow]) -> list[dict[str, Any]]:
    """Return groups for ``torch.optim``, with the keys module, param_names, params, peak_lr, lr, betas, eps and
    weight_decay.

    Raises:
        ValueError: if a parameter has no row or two rows, or a row has no parameter.
    """
    names = {row.name for row in rows}
    if len(names) != len(rows):
        raise ValueError("the parameter table claims a parameter twice")
    if parameters.keys() != names:
        raise ValueError(f"model and parameter table differ in {', '.join(sorted(parameters.keys() ^ names))}")
    groups = optimizer_groups(rows)
    for group in groups:
        group["params"] = [parameters[name] for name in group["param_names"]]
    return groups


@dataclass
class Optimizer:
    """Adam or AdamW with the groups of the parameter table. The schedule multiplies each group's peak learning rate.

    If a batch ramp scales the betas, beta at step i is beta ** (1 / h_i), where h_i is the half-life of the moment at
    step i relative to that at the full batch. Adam's bias correction must then divide by 1 minus the product of the
    betas of all steps so far. torch divides by 1 - beta_now ** n, where beta_now is the current beta and n is torch's
    step count. The two divisors are equal for n = h_now x sum(1 / h_i). When the batch changes, :meth:`recount` sets
    torch's step count to this n.
    """

    adam: torch.optim.Adam

    @classmethod
    def build(cls, parameters: Mapping[str, Tensor], rows: Sequence[ParameterRow], kind: str) -> "Optimizer":
        """Return an optimizer. The kind ``adamw`` has decoupled weight decay; ``adam`` adds weight decay to the
        gradient (L2)."""
        algorithm = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
        return cls(algorithm(parameter_groups(parameters, rows), fused=True))

    def step(self, multiplier: float, skip: Tensor | None = None, ramp: Factors = AT_BASE) -> None:
        """Update the parameters with ``multiplier`` times the peak lr of each group, and drop the gradients. If
        ``skip``, a tensor on the device, is true, the parameters do not change. During a batch ramp, ``ramp``
        converts lr, betas, eps and weight decay from the full batch to the current batch."""
        for group in self.adam.param_groups:
            full = group.setdefault("full", {key: group[key] for key in ("betas", "eps", "weight_decay")})
            group["lr"] = group["peak_lr"] * multiplier * ramp.lr
            group["betas"] = tuple(ramp.beta(beta) for beta in full["betas"])
            group["eps"] = full["eps"] * ramp.eps
            group["weight_decay"] = full["weight_decay"] * ramp.weight_decay
        wait = skip is not None and skip.device.type == "mps"  # where a gate of the fused kernel is not tested
        if skip is not None and not wait:
            gate(self.adam, skip)
        if not (wait and skip):
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def recount(self, factor: float) -> None:
        """Multiply the step counts by ``factor``. It is the new half-life of the moments divided by the old one, both
        in steps."""
        for state in self.adam.state.values():
            state["step"] *= factor

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.adam.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def state_dict(self) -> dict[tuple[str, str], Tensor]:
        """Return the moments and step counts by (kind, parameter name), where the kind is one of `MOMENTS`. The keys
        do not depend on the order of the groups."""
        return {
            (kind, name): value
            for name, parameter in self._named()
            for kind, value in self.adam.state[parameter].items()
        }

    def load_state_dict(self, state: Moments) -> None:
        for name, parameter in self._named():
            # Copies on the parameter's device; fused kernels need the step count there too.
            self.adam.state[parameter] = {
                kind: state[kind, name].to(parameter.device, copy=True) for kind in MOMENTS if (kind, name) in state
            }


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

    def unscale_and_clip(self, scale: Tensor | None = None, ramp: Factors = AT_BASE) -> Tensor:
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
