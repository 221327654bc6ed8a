"""In which dtype is computed, and the loss scale that half precision needs.

Weights, gradients, moments, loss and the sums over micro-batches are fp32 whatever the products are computed in:
mixed precision with a master copy (Micikevicius et al. 2018, arXiv 1710.03740).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FIRST_SCALE = 2.0**16
GROW_AFTER = 2_000
"""Steps in a row without overflow after which the scale doubles: NVIDIA's and torch's value."""

_STATE = "loss_scale"  # among the optimiser's tensors in a checkpoint


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass, so that small gradients do not vanish in fp16.

    A step whose gradient overflows is not done and halves the scale; :data:`GROW_AFTER` steps in a row without
    overflow double it. Powers of two: the gradients' bits do not change. All of it stays on the device.
    """

    value: Tensor
    good_steps: Tensor

    @classmethod
    def build(cls, device: torch.device) -> "LossScale":
        return cls(torch.tensor(FIRST_SCALE, device=device), torch.tensor(0.0, device=device))

    def update(self, finite: Tensor) -> None:
        # masked_fill takes its number along; torch.where would copy it from the host, and wait for the device.
        good_steps = (self.good_steps + 1).masked_fill(~finite, 0)
        grows = good_steps >= GROW_AFTER
        # Below 1 the loss itself is no number, and halving mends nothing.
        self.value = torch.where(finite, self.value * (1 + grows.float()), self.value / 2).clamp(min=1.0)
        self.good_steps = good_steps.masked_fill(grows, 0)

    def state_dict(self) -> dict[str, Tensor]:
        return {_STATE: torch.stack((self.value, self.good_steps))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.value, self.good_steps = state[_STATE].to(self.value.device, copy=True).unbind()
