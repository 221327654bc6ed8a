"""Clips gradients (:class:`Clipper`), updates parameters (:class:`Optimizer`), adjusts the fp16 loss scale
(:class:`LossScale`) and measures the gradient noise scale (:class:`NoiseScale`).

Weights, gradients, moments, loss and sums over micro-batches are always fp32: mixed precision with a master copy
(Micikevicius et al. 2018, arXiv 1710.03740). Except on mps, the host does not wait for the device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leaven.catalogue.noise_scale import gradient_noise, squared_gradient
from leaven.distributed.sharded_model import ShardedModel
from leaven.model.kernels import gate, multiply_, wide, widened
from leaven.recipe.hyperparameters import Clip, Hyperparameters
from leaven.scaling.apply import AT_BASE, Factors
from leaven.scaling.table import ParameterTable
from leaven.training.muon import MuonWithAdamW

MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""The keys of the optimizer's state for a parameter: Adam's step count (a scalar) and two moments, and Muon's
momentum. Moments and momentum have the shape of the parameter."""

Moments = Mapping[tuple[str, str], Tensor]


@dataclass
class Optimizer:
    """Adam, AdamW, or AdamW with Muon. The parameter groups are from the parameter table.

    A batch ramp may scale a beta: step i uses b_i = beta ** (1 / h_i). Here h_i is the half-life of the moment at
    step i, divided by its half-life at the full batch. After n steps, the correct bias correction divides by
    1 - (b_1 x ... x b_n), but torch divides by 1 - b_n ** c, where c is its step count. The two are equal if
    c = h_n x sum(1 / h_i). So whenever the batch changes, :meth:`recount` sets c to this value.
    """

    adam: torch.optim.Adam

    @classmethod
    def build(cls, groups: list[dict[str, Any]], tuned: Hyperparameters, **of_muon: Any) -> "Optimizer":
        """Return the optimizer that ``tuned`` selects. Adam adds weight decay to the gradient (L2). ``groups`` are
        from :func:`leaven.scaling.table.optimizer_groups`. ``of_muon`` are further arguments of
        :class:`MuonWithAdamW`."""
        if tuned.muon:
            how = {"nesterov": tuned.muon.nesterov, "ns_steps": tuned.muon.ns_steps} | of_muon
            return cls(MuonWithAdamW(groups, fused=True, **how))
        algorithm = torch.optim.AdamW if tuned.optimizer == "adamw" else torch.optim.Adam
        return cls(algorithm(groups, fused=True))

    def step(self, multiplier: float, skip: Tensor | None = None, ramp: Factors = AT_BASE) -> None:
        """Update the parameters with ``multiplier`` times the peak lr of each group, and drop the gradients. If the
        boolean scalar ``skip`` is true, parameters and state do not change. ``ramp`` converts lr, betas, eps and
        weight decay from the full batch to the current batch."""
        for group in self.adam.param_groups:
            keys = ("weight_decay",) if "match" in group else ("betas", "eps", "weight_decay")
            full = group.setdefault("full", {key: group[key] for key in keys})
            group["lr"] = group["peak_lr"] * multiplier * ramp.lr
            group["weight_decay"] = full["weight_decay"] * ramp.weight_decay
            if "betas" in full:
                group["betas"] = tuple(ramp.beta(beta) for beta in full["betas"])
                group["eps"] = full["eps"] * ramp.eps
        wait = skip is not None and skip.device.type == "mps"  # the gate of the fused kernel is not tested on mps
        if skip is not None and not wait:
            gate(self.adam, skip)
        if not (wait and skip):
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def recount(self, factor: float) -> None:
        """Multiply Adam's step counts by ``factor``: the half-life of the moments, in steps, after a change of the
        batch, divided by the one before."""
        for state in self.adam.state.values():
            if "step" in state:
                state["step"] *= factor

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.adam.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def state_dict(self) -> dict[tuple[str, str], Tensor]:
        """Return the optimizer's state by (key in :data:`MOMENTS`, parameter name)."""
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


@dataclass
class Clipper:
    """Clips gradients in place. Mode ``per-module`` limits the norm of the gradients of each module in each block.
    The other modes limit the norm of all gradients. In mode ``running``, the limit is a multiple of the running norm:
    the root of an exponential average of the squared, clipped norms of earlier steps."""

    limit: float  # largest norm that is not clipped; in mode ``running`` in units of the running norm
    model: ShardedModel
    # In mode ``per-module``: a number for each row of the parameter table, equal within a module of a block, (rows,).
    parts: Tensor | None = None
    running: Tensor | None = None  # in mode ``running``: mean square of norms and number of steps, (2,) in float64
    beta: float = 0.0  # beta of the exponential average of the running norm, at the full batch

    @classmethod
    def build(cls, clip: Clip, model: ShardedModel, table: ParameterTable) -> "Clipper":
        device, parts, running = model.device, None, None
        if clip.mode == "per-module":
            owners = [(row.module, row.layer) for row in table.rows]
            parts = torch.tensor([owners.index(owner) for owner in owners], device=device)
        if clip.mode == "running":
            running = torch.zeros(2, dtype=wide(device), device=device)
        return cls(clip.limit or torch.inf, model, parts, running, table.beta2)

    def unscale_and_clip(self, scale: Tensor | None = None, ramp: Factors = AT_BASE) -> Tensor:
        """Divide the gradients by ``scale`` and clip them: above the limit, multiply by limit / (norm + 1e-6), as in
        torch. Return the global norm before clipping. ``ramp`` has the factors for the current batch of a ramp."""
        parameters = self.model.local_parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert len(gradients) == len(parameters)
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
            limit = limit * self.running_norm(ramp)
        factors = (limit / (part_norms + 1e-6)).clamp(max=1.0).to(sizes.dtype)
        if factors.dim():
            factors = factors[self.model.row_numbers]
        multiply_(gradients, factors if scale is None else factors / scale)
        if self.running is not None:
            # Add the clipped norm: a spike must not raise the next limits. Ignore a norm that is not finite.
            clipped, beta = torch.minimum(widened(norm), limit), ramp.beta(self.beta)
            mean_square, steps = self.running.unbind()
            added = torch.stack((beta * mean_square + (1 - beta) * clipped**2, steps + 1))
            self.running = torch.where(clipped.isfinite(), added, self.running)
        return norm

    def running_norm(self, ramp: Factors = AT_BASE) -> Tensor:
        """Return the root of the exponential average of the squared, clipped gradient norms of earlier steps, a
        scalar. It is infinite before the first nonzero gradient."""
        assert self.running is not None
        mean_square, steps = self.running.unbind()
        return (mean_square / (1 - ramp.beta(self.beta) ** steps)).sqrt().masked_fill(mean_square == 0, torch.inf)

    def recount(self, factor: float) -> None:
        """Multiply the step count of the running norm by ``factor``, as :meth:`Optimizer.recount` does for Adam."""
        if self.running is not None:
            self.running = self.running * self.running.new_tensor([1.0, factor])

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.running is None else {"clip.running": self.running}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.running is not None and "clip.running" in state:
            self.running = state["clip.running"].to(self.running, copy=True)


FIRST_SCALE = 2.0**16
GROW_AFTER = 2_000  # the loss scale doubles after so many consecutive steps without overflow, as in torch


@dataclass
class LossScale:
    """The factor on the loss in the backward pass, so that small gradients do not vanish in fp16. It is halved at an
    overflow of loss or gradient, but not below 1, and doubled after :data:`GROW_AFTER` consecutive steps without
    overflow."""

    value: Tensor  # a scalar on the device
    good_steps: Tensor  # number of consecutive steps without overflow, a scalar on the device

    @classmethod
    def build(cls, device: torch.device) -> "LossScale":
        return cls(torch.tensor(FIRST_SCALE, device=device), torch.tensor(0.0, device=device))

    def update(self, finite: Tensor) -> None:
        """Adjust the scale after a step. ``finite`` (a boolean scalar) says whether loss and gradient were finite."""
        # masked_fill with a number does not wait for the device; torch.where would copy the number from the host.
        good_steps = (self.good_steps + 1).masked_fill(~finite, 0)
        grows = good_steps >= GROW_AFTER
        # At 1 the overflow is in the loss itself, and a smaller scale does not help.
        self.value = torch.where(finite, self.value * (1 + grows.float()), self.value / 2).clamp(min=1.0)
        self.good_steps = good_steps.masked_fill(grows, 0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": torch.stack((self.value, self.good_steps))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.value, self.good_steps = state["loss_scale"].to(self.value.device, copy=True).unbind()


KEEP = 0.95
"""Weight of the previous average when a measurement is added: about the last twenty measurements count. A single
measurement is too noisy, because its error is as large as its value."""


@dataclass
class NoiseScale:
    """Measures the gradient noise scale tr(Sigma) / |G|^2 (:mod:`leaven.catalogue.noise_scale`). A measurement
    estimates both from a step's gradient after the first micro-batch and after all micro-batches. The noise scale is
    the ratio of their running averages."""

    every: int  # tokens between measurements
    model: ShardedModel
    averages: Tensor  # averages of tr(Sigma) for one token and of |G|^2: (2,), on the gradients' device
    first_norm: Tensor = field(default_factory=lambda: torch.tensor(0.0))  # after the first micro-batch
    # How many targets count in the first micro-batch of the step, a scalar. Set before the step's first forward pass.
    first_targets: Tensor = field(default_factory=lambda: torch.tensor(0.0))

    @classmethod
    def build(cls, every: int | None, model: ShardedModel) -> "NoiseScale | None":
        device = model.device
        return None if every is None else cls(every, model, torch.zeros(2, dtype=wide(device), device=device))

    def after_first(self) -> None:
        """Store the norm of the gradient after the first micro-batch of a step."""
        self.first_norm = torch.linalg.vector_norm(self.model.gradient_norms())

    def after_all(self, targets: int, grad_norm: Tensor, loss_scale: Tensor | None) -> Tensor:
        """Add the measurement of a step, and return the result of :meth:`add`. ``targets`` is the number of tokens
        that count in the loss. ``grad_norm`` is the norm of their mean gradient, without the loss scale."""
        share = (1 if loss_scale is None else loss_scale) / targets
        return self.add(self.first_targets, self.first_norm / (share * self.first_targets), targets, grad_norm)

    def add(self, small: Tensor, small_norm: Tensor, big: int, big_norm: Tensor) -> Tensor:
        """Add the norms of a step's gradients, averaged over ``small`` and over ``big`` tokens. Return the noise
        scale in tokens, or nan while the estimated squared norm of the true gradient is 0 or less."""
        small_squared, big_squared = widened(small_norm) ** 2, widened(big_norm) ** 2
        noise = gradient_noise(widened(small), small_squared, big, big_squared)
        found = torch.stack((noise, squared_gradient(widened(small), small_squared, big, big_squared)))
        self.averages = torch.where(found.isfinite().all(), KEEP * self.averages + (1 - KEEP) * found, self.averages)
        noise, signal = self.averages.unbind()
        return torch.where(signal > 0, noise / signal, torch.nan)

    def state_dict(self) -> dict[str, Tensor]:
        return {"noise_scale.averages": self.averages}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        saved = state["noise_scale.averages"] if "noise_scale.averages" in state else torch.zeros_like(self.averages)
        self.averages = saved.to(self.averages, copy=True)
