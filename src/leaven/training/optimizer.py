"""Builds Adam with parameter groups from the parameter table. Parameters with equal values share a group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leaven.model.kernels import gate
from leaven.scaling.apply import AT_BASE, Factors
from leaven.scaling.table import ParameterRow, optimizer_groups

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""Adam's state of a parameter: the step count, a scalar, and two moments of its shape."""

Moments = Mapping[tuple[str, str], Tensor]


def parameter_groups(parameters: Mapping[str, Tensor], rows: Sequence[ParameterRow]) -> list[dict[str, Any]]:
    """Return groups for ``torch.optim``, with the keys module, param_names, params, peak_lr, lr, betas, eps and
    weight_decay.

    Raises:
        ValueError: if parameters have no row or rows have no parameter; the message names them.
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
    """Adam or AdamW over the table's groups; the schedule multiplies each group's peak learning rate.

    If a batch ramp scales the betas, beta at step i is beta ** (1 / h_i), where h_i is the half-life of the moment at
    step i relative to that at the full batch. Adam's bias correction must then divide by 1 minus the product of the
    betas of all steps so far. torch divides by 1 - beta_now ** n, with n its step count. The two are equal for
    n = h_now x sum(1 / h_i). When the batch changes, :meth:`recount` sets torch's step count to this n.
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
        ``skip``, a tensor on the device, is true, the parameters do not change. ``ramp`` has the factors by which lr,
        betas, eps and weight decay at the current batch differ from those at the full batch."""
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
        """Multiply the step counts by ``factor``. That is the ratio of the new half-life of the moments, in steps, to
        the old one."""
        for state in self.adam.state.values():
            state["step"] *= factor

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.adam.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def state_dict(self) -> dict[tuple[str, str], Tensor]:
        """Return moments and step counts. Their keys consist of kind and parameter name, and do not depend on the
        order of the groups."""
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
