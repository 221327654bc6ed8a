"""Defines the compute dtypes, and the dynamic loss scale for fp16.

Weights, gradients, moments, loss and sums over micro-batches are always fp32: mixed precision with a master copy
(Micikevicius et al. 2018, arXiv 1710.03740).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FIRST_SCALE = 2.0**16
GROW_AFTER = 2_000
"""The loss scale doubles after this many consecutive steps without overflow, as in torch."""

_STATE = "loss_scale"  # among the optimizer's tensors in a checkpoint


@dataclass
class LossScale:
    """The factor that multiplies the loss before the backward pass, so that small gradients do not vanish in fp16.

    If the gradient of a step overflows, the step is skipped and the scale is halved. After :data:`GROW_AFTER` steps
    without overflow the scale is doubled. The scale is a power of two, so it changes only the exponents of gradients.
    """

    value: Tensor  # a scalar on the device
    good_steps: Tensor  # consecutive steps without overflow, a scalar on the device

    @classmethod
    def build(cls, device: torch.device) -> "LossScale":
        return cls(torch.tensor(FIRST_SCALE, device=device), torch.tensor(0.0, device=device))

    def update(self, finite: Tensor) -> None:
        """Adjust the scale after a step. ``finite`` is a boolean scalar: whether both the loss and the gradient were
        finite."""
        # masked_fill with a number does not wait for the device; torch.where would copy it from the host.
        good_steps = (self.good_steps + 1).masked_fill(~finite, 0)
        grows = good_steps >= GROW_AFTER
        # At 1 the overflow is in the loss itself, and a smaller scale does not help.
        self.value = torch.where(finite, self.value * (1 + grows.float()), self.value / 2).clamp(min=1.0)
        self.good_steps = good_steps.masked_fill(grows, 0)

    def state_dict(self) -> dict[str, Tensor]:
        return {_STATE: torch.stack((self.value, self.good_steps))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.value, self.good_steps = state[_STATE].to(self.value.device, copy=True).unbind()
