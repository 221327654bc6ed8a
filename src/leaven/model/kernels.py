"""Wrap private functions of torch, which may change between versions. tests/model/test_kernels.py tests each wrapper.

The wrappers that take a sequence of tensors process all of them in a few kernels. A loop over the tensors would need
hundreds of kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of the tensors as one tensor, (number of tensors,)."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def multiply_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply tensors in place. ``factors`` is a scalar, which multiplies every tensor, or it contains one factor
    for each tensor, (number of tensors,)."""
    if factors.dim() == 0:
        torch._foreach_mul_(list(tensors), factors)
    else:
        torch._foreach_mul_(list(tensors), list(factors.unbind()))


def subtract_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    torch._foreach_sub_(list(tensors), list(others))


def wide(device: torch.device) -> torch.dtype:
    """Return the widest dtype of a device: float64, or float32 on mps, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(x: Tensor) -> Tensor:
    """Return the tensor in the widest dtype of its device."""
    return x.to(wide(x.device))


def gate(adam: torch.optim.Adam, skip: Tensor) -> None:
    """If ``skip`` is true, make the next step of a fused Adam optimizer do nothing. That step does not increase the
    step count either. ``skip`` is a tensor on the device."""
    adam.found_inf = skip.float()  # type: ignore[attr-defined]


def softmax_backward(grad: Tensor, softmax: Tensor) -> Tensor:
    """Return the gradient with respect to the input of a softmax over the last dimension. ``softmax`` is the output
    of the softmax, and ``grad`` is the gradient with respect to this output."""
    ds: Tensor = torch.ops.aten._softmax_backward_data(grad, softmax, -1, softmax.dtype)
    return ds
