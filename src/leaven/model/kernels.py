"""The names of torch that it does not promise to keep, in one place; tests/model/test_kernels.py tests each.

They do to many tensors in a few kernels what a loop over parameters does in hundreds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, (tensors,)."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def multiply_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply all by one factor (), or each by its own (tensors,)."""
    if factors.dim() == 0:
        torch._foreach_mul_(list(tensors), factors)
    else:
        torch._foreach_mul_(list(tensors), list(factors.unbind()))


def subtract_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    torch._foreach_sub_(list(tensors), list(others))


def gate(adam: torch.optim.Adam, skip: Tensor) -> None:
    """Let the next step of a fused Adam do nothing, its step count included, where ``skip`` is true on the device."""
    adam.found_inf = skip.float()  # type: ignore[attr-defined]


def softmax_backward(grad: Tensor, softmax: Tensor) -> Tensor:
    """The gradient of what a softmax over the last dimension was taken of, in one pass."""
    ds: Tensor = torch.ops.aten._softmax_backward_data(grad, softmax, -1, softmax.dtype)
    return ds
