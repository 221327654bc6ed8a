"""Compute RMSNorm and rotary positions with hand-written gradients. Autograd would read and write memory twice as
often.

Shapes: B sequences, T positions, H heads, E entries of a head, D any size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return gain * x / sqrt(mean(x^2) + eps), with the mean over the last dimension. The result is computed in the
    dtype of the gain and cast to ``dtype``."""
    y: Tensor = _RMSNorm.apply(x, gain_D, eps, dtype)  # type: ignore[no-untyped-call]
    return y


def rotate(x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Apply rotary positions to x, and return the result as (B, H, T, E).

    Entries i and i + E/2 of a head form a pair. Each pair is rotated by an angle that depends on the token's position
    and on i.

    Cosines and sines are (T, E/2), or (B, T, E/2) if positions restart within a sequence.
    """
    y_BHTE: Tensor = _Rotate.apply(x_BTHE, cos_TE, sin_TE)  # type: ignore[no-untyped-call]
    return y_BHTE


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(gain_D.dtype)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain_D, inverse)
        y: Tensor = (wide * inverse).mul_(gain_D).to(dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_D, inverse = ctx.saved_tensors
        unit, g = x * inverse, g.to(gain_D.dtype)
        by_gain = g * unit
        along = (by_gain @ gain_D)[..., None].div_(x.shape[-1])  # the gradient's component along x
        grad_x = (g * gain_D).sub_(unit.mul_(along)).mul_(inverse)
        return grad_x.to(x.dtype), by_gain.flatten(0, -2).sum(0), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TE, sin_TE)
        return _turned(x_BTHE.transpose(1, 2), cos_TE.unsqueeze(-3), sin_TE.unsqueeze(-3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        cos_TE, sin_TE = ctx.saved_tensors
        cos_T1E, sin_T1E = cos_TE.unsqueeze(-2), sin_TE.unsqueeze(-2)
        return _turned(g_BHTE.transpose(1, 2), cos_T1E, -sin_T1E), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x by the angles with the given cosines and sines. The result is contiguous in memory."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((torch.addcmul(left * cos, right, sin, value=-1), torch.addcmul(right * cos, left, sin)), dim=-1)
