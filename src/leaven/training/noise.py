"""The gradient noise scale of a run, measured on the way: from the gradient after the first micro-batch of a step and
that after all of them, which the step computes anyhow.

Both estimates are averaged apart over the measurements, exponentially weighted, and divided then
(:mod:`leaven.catalogue.noise_scale`). Both averages start at 0, which their ratio does not see.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.catalogue.noise_scale import gradient_noise, squared_gradient
from leaven.distributed.sharded import ShardedModel

KEEP = 0.95
"""Of the averages at each measurement: the last twenty count. A single estimate is of the size of its own noise."""

_STATE = "noise_scale.averages"  # among the optimiser's tensors in a checkpoint


@dataclass
class NoiseScale:
    """Measured at the first step at or beyond each multiple of ``every`` tokens.

    ``averages`` are two numbers in float64 on the gradients' device: tr(Sigma) of one token, and |G|^2.
    """

    every: int
    averages: Tensor

    @classmethod
    def build(cls, every: int | None, device: torch.device) -> "NoiseScale | None":
        return None if every is None else cls(every, torch.zeros(2, dtype=torch.float64, device=device))

    def due(self, before: int, after: int) -> bool:
        """Whether a step that takes the run from ``before`` to ``after`` tokens is measured."""
        return after // self.every > before // self.every

    def add(self, small: Tensor, small_norm: Tensor, big: int, big_norm: Tensor) -> Tensor:
        """Take in a step, unless a norm is no number: norms () of the mean gradient over so many tokens.

        Returns the noise scale in tokens, (), not a number while the estimate of |G|^2 is not above 0.
        """
        small_squared, big_squared = small_norm.double() ** 2, big_norm.double() ** 2
        noise = gradient_noise(small.double(), small_squared, big, big_squared)
        found = torch.stack((noise, squared_gradient(small.double(), small_squared, big, big_squared)))
        self.averages = torch.where(found.isfinite().all(), KEEP * self.averages + (1 - KEEP) * found, self.averages)
        noise, signal = self.averages.unbind()
        return torch.where(signal > 0, noise / signal, torch.nan)

    def state_dict(self) -> dict[str, Tensor]:
        return {_STATE: self.averages}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As it was saved; from the start where it was not measured then."""
        saved = state[_STATE] if _STATE in state else torch.zeros_like(self.averages)
        self.averages = saved.to(self.averages.device, copy=True)


@dataclass
class NoiseMeasurement:
    """Measures the noise scale in one step: the norm of the gradient after its first micro-batch, over all
    processes, and that after all of them."""

    scale: NoiseScale
    model: ShardedModel
    first_targets: Tensor  # that count in the first micro-batch, ()
    targets: int  # that count in the batch
    loss_scale: Tensor | None
    first_norm: Tensor | None = None

    def after_first(self) -> None:
        """Take the norm of the gradients so far."""
        self.first_norm = torch.linalg.vector_norm(self.model.gradient_norms())

    def result(self, grad_norm: Tensor) -> Tensor:
        """The noise scale in tokens, (); ``grad_norm``: that of the mean gradient of the batch."""
        assert self.first_norm is not None
        share = (1 if self.loss_scale is None else self.loss_scale) / self.targets
        mean_norm = self.first_norm / (share * self.first_targets)
        return self.scale.add(self.first_targets, mean_norm, self.targets, grad_norm)
