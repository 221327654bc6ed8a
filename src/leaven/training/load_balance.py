"""Measures how many tokens each expert gets, and balances these loads with router biases."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.distributed.sharded_model import ShardedModel
from leaven.model.kernels import wide
from leaven.recipe.shape import ModelShape

BIASES = "router.bias"  # name of the biases in a checkpoint


@dataclass
class LoadBalance:
    """Measures the load of each expert: its number of tokens in a step, over all processes. If the router uses
    biases, updates them: a bias rises by ``bias_step`` if its expert's load is below the layer's mean, and falls by
    as much if it is above (Wang et al. 2024, arXiv 2408.15664)."""

    model: ShardedModel
    bias_step: float  # change of a bias in a step; 0 if the biases are not used
    bias_LE: Tensor  # the biases, (layers, experts); rows of layers without experts stay 0

    @classmethod
    def build(cls, shape: ModelShape, model: ShardedModel) -> "LoadBalance | None":
        experts = shape.experts
        if experts is None:
            return None
        step = experts.bias_step if experts.balanced_by_bias else 0.0
        balance = cls(model, step, torch.zeros(shape.n_layers, experts.number, device=model.device))
        if step:
            for layer, mixture in model.mixtures.items():
                mixture.bias_E = balance.bias_LE[layer]
        return balance

    def measure(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the load of each expert in the last step, (layers, experts); the balance loss without its
        coefficient, summed over the predicted tokens and averaged over the layers with experts; and the largest ratio
        of an expert's load to the mean load of its layer."""
        layers, experts = self.bias_LE.shape
        device = self.model.device
        tally = self.model.total_tally(torch.zeros(layers, experts + 1, dtype=wide(device), device=device))
        load_LE, balance_L = tally[:, :-1], tally[:, -1]
        mean_L = load_LE.mean(1)
        with_experts = mean_L > 0
        highest = (load_LE.amax(1) / mean_L.clamp(min=1)).amax()
        return load_LE, balance_L.sum() / with_experts.sum().clamp(min=1), highest

    def update(self, load_LE: Tensor, applied: Tensor) -> None:
        """Move the biases towards equal loads, if ``applied`` (a boolean scalar) is true."""
        if self.bias_step:
            wanted_LE = (load_LE.mean(1, keepdim=True) - load_LE).sign().to(self.bias_LE.dtype)
            self.bias_LE.add_(wanted_LE * applied, alpha=self.bias_step)  # in place: the routers have views of it

    def state_dict(self) -> dict[str, Tensor]:
        return {BIASES: self.bias_LE.clone()} if self.bias_step else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.bias_step:
            self.bias_LE.copy_(state[BIASES])
