"""Measures the gradient noise scale of a run by comparing two gradients of one step: the gradient after the first
micro-batch and the gradient after all micro-batches.

The estimates of tr(Sigma) and |G|^2 (:mod:`leaven.catalogue.noise_scale`) are averaged separately, with exponential
weights, and then divided. Both averages start at 0, which cancels in their ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.catalogue.noise_scale import gradient_noise, squared_gradient
from leaven.distributed.sharded_model import ShardedModel
from leaven.model.kernels import wide, widened

KEEP = 0.95
"""Each measurement multiplies the previous average by this weight, so about the last twenty measurements count. The
noise of a single estimate is as large as the estimate itself."""

_STATE = "noise_scale.averages"  # among the optimizer's tensors in a checkpoint


@dataclass
class NoiseScale:
    """The noise scale, averaged over measurements. The run measures it every ``every`` tokens."""

    every: int  # tokens
    averages: Tensor  # of tr(Sigma) for one token and of |G|^2: (2,), float64, on the gradients' device

    @classmethod
    def build(cls, every: int | None, device: torch.device) -> "NoiseScale | None":
        return None if every is None else cls(every, torch.zeros(2, dtype=wide(device), device=device))

    def due(self, before: int, after: int) -> bool:
        """Return whether to measure the noise scale in a step that advances the run from ``before`` to ``after``
        tokens."""
        return after // self.every > before // self.every

    def add(self, small: Tensor, small_norm: Tensor, big: int, big_norm: Tensor) -> Tensor:
        """Add a measurement to the averages: ``small_norm`` is the norm of the mean gradient over ``small`` tokens,
        and ``big_norm`` that over ``big`` tokens. Ignore the measurement if it is not finite.

        Return the noise scale in tokens, a scalar. It is nan as long as the estimate of |G|^2 is not positive.
        """
        small_squared, big_squared = widened(small_norm) ** 2, widened(big_norm) ** 2
        noise = gradient_noise(widened(small), small_squared, big, big_squared)
        found = torch.stack((noise, squared_gradient(widened(small), small_squared, big, big_squared)))
        self.averages = torch.where(found.isfinite().all(), KEEP * self.averages + (1 - KEEP) * found, self.averages)
        noise, signal = self.averages.unbind()
        return torch.where(signal > 0, noise / signal, torch.nan)

    def state_dict(self) -> dict[str, Tensor]:
        return {_STATE: self.averages}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the averages; reset them if the checkpoint has none."""
        saved = state[_STATE] if _STATE in state else torch.zeros_like(self.averages)
        self.averages = saved.to(self.averages, copy=True)


@dataclass
class NoiseMeasurement:
    """Measures the noise scale in one step, over all processes."""

    scale: NoiseScale
    model: ShardedModel
    first_targets: Tensor  # targets that count in the first micro-batch, a scalar
    targets: int  # targets that count in the batch
    loss_scale: Tensor | None  # a scalar; None except in fp16
    first_norm: Tensor | None = None  # of the gradient after the first micro-batch, a scalar

    def after_first(self) -> None:
        """Measure the gradient after the first micro-batch."""
        self.first_norm = torch.linalg.vector_norm(self.model.gradient_norms())

    def result(self, grad_norm: Tensor) -> Tensor:
        """Return the noise scale in tokens, a scalar; ``grad_norm`` is the norm of the mean gradient of the batch."""
        assert self.first_norm is not None
        share = (1 if self.loss_scale is None else self.loss_scale) / self.targets
        mean_norm = self.first_norm / (share * self.first_targets)
        return self.scale.add(self.first_targets, mean_norm, self.targets, grad_norm)
