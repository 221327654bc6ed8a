"""The optimiser, from the parameter table: one group for each set of values, every parameter in exactly one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leaven.model.kernels import gate
from leaven.scaling.table import ParameterTable, optimiser_groups

Moments = Mapping[str, Tensor]


def parameter_groups(model: nn.Module, table: ParameterTable) -> list[dict[str, Any]]:
    """Groups for ``torch.optim``: module, param_names, params, peak_lr, lr, betas, eps, weight_decay.

    Raises:
        ValueError: naming the parameters that the table misses, or those that the model does.
    """
    parameters = dict(model.named_parameters())
    rows = {row.name: row for row in table.rows}
    if len(rows) != len(table.rows):
        raise ValueError("the parameter table claims a parameter twice")
    if parameters.keys() != rows.keys():
        odd = sorted(parameters.keys() ^ rows.keys())
        raise ValueError(f"model and parameter table differ in {', '.join(odd)}")
    groups = optimiser_groups(table.rows)
    for group in groups:
        group["params"] = [parameters[name] for name in group["param_names"]]
    return groups


@dataclass
class Optimiser:
    """Adam or AdamW over the table's groups; the schedule multiplies each group's own peak."""

    adam: torch.optim.Adam

    @classmethod
    def build(cls, model: nn.Module, table: ParameterTable, kind: str) -> "Optimiser":
        """``adamw`` decouples the decay; ``adam`` adds it to the gradient (L2 in the loss)."""
        algorithm = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
        return cls(algorithm(parameter_groups(model, table), fused=True))

    def step(self, multiplier: float, skip: Tensor | None = None) -> None:
        """One update at ``multiplier`` times every group's peak lr, none at all where ``skip`` is true on the device;
        the gradients are gone afterwards."""
        for group in self.adam.param_groups:
            group["lr"] = group["peak_lr"] * multiplier
        if skip is not None:
            gate(self.adam, skip)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.adam.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and step counts by ``kind.parameter name``: independent of the order of the groups."""
        return {
            f"{kind}.{name}": value
            for name, parameter in self._named()
            for kind, value in self.adam.state[parameter].items()
        }

    def load_state_dict(self, state: Moments) -> None:
        for name, parameter in self._named():
            # Copies on the parameter's device, the step count too: the fused kernels want it there.
            self.adam.state[parameter] = {
                kind: state[f"{kind}.{name}"].to(parameter.device, copy=True)
                for kind in ("step", "exp_avg", "exp_avg_sq")
                if f"{kind}.{name}" in state
            }
