"""Adam from the parameter table: one group for each set of values, every parameter in exactly one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leaven.model.kernels import gate
from leaven.scaling.apply import AT_BASE, Factors
from leaven.scaling.table import ParameterRow, optimiser_groups

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam knows of a parameter: its steps (), and two tensors like it."""

Moments = Mapping[tuple[str, str], Tensor]


def parameter_groups(parameters: Mapping[str, Tensor], rows: Sequence[ParameterRow]) -> list[dict[str, Any]]:
    """Groups for ``torch.optim``: module, param_names, params, peak_lr, lr, betas, eps, weight_decay.

    Raises:
        ValueError: naming the parameters that no row is for, or the rows without a parameter.
    """
    names = {row.name for row in rows}
    if len(names) != len(rows):
        raise ValueError("the parameter table claims a parameter twice")
    if parameters.keys() != names:
        raise ValueError(f"model and parameter table differ in {', '.join(sorted(parameters.keys() ^ names))}")
    groups = optimiser_groups(rows)
    for group in groups:
        group["params"] = [parameters[name] for name in group["param_names"]]
    return groups


@dataclass
class Optimiser:
    """Adam or AdamW over the table's groups; the schedule multiplies each group's own peak.

    In a scaled ramp the betas change with the batch. Adam's moments start at 0, and what corrects them is
    1 - prod(beta_i) over the steps so far. Here beta_i = beta ** (1 / half_life_i), so the product is beta_now ** n
    with n = half_life_now x sum(1 / half_life_i): torch's own correction is exact if its step count is n.
    :meth:`recount` keeps it so: when the batch changes, it converts the count into steps of the new batch.
    """

    adam: torch.optim.Adam

    @classmethod
    def build(cls, parameters: Mapping[str, Tensor], rows: Sequence[ParameterRow], kind: str) -> "Optimiser":
        """``adamw`` decouples the decay; ``adam`` adds it to the gradient (L2 in the loss)."""
        algorithm = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
        return cls(algorithm(parameter_groups(parameters, rows), fused=True))

    def step(self, multiplier: float, skip: Tensor | None = None, ramp: Factors = AT_BASE) -> None:
        """Update at ``multiplier`` times every group's peak lr, or not at all where ``skip`` is true on the device,
        and drop the gradients. ``ramp`` multiplies the values of the full batch."""
        for group in self.adam.param_groups:
            full = group.setdefault("full", {key: group[key] for key in ("betas", "eps", "weight_decay")})
            group["lr"] = group["peak_lr"] * multiplier * ramp.lr
            group["betas"] = tuple(ramp.beta(beta) for beta in full["betas"])
            group["eps"] = full["eps"] * ramp.eps
            group["weight_decay"] = full["weight_decay"] * ramp.weight_decay
        if skip is not None:
            gate(self.adam, skip)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def recount(self, factor: float) -> None:
        """Multiply the step counts by a factor, by which the half-life of the moments in steps grows from now on."""
        for state in self.adam.state.values():
            state["step"] *= factor

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.adam.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def state_dict(self) -> dict[tuple[str, str], Tensor]:
        """Returns moments and step counts by kind and parameter name, independent of the order of the groups."""
        return {
            (kind, name): value
            for name, parameter in self._named()
            for kind, value in self.adam.state[parameter].items()
        }

    def load_state_dict(self, state: Moments) -> None:
        for name, parameter in self._named():
            # Copies on the parameter's device, the step count too: the fused kernels want it there.
            self.adam.state[parameter] = {
                kind: state[kind, name].to(parameter.device, copy=True) for kind in MOMENTS if (kind, name) in state
            }
