"""Compute causal attention, RMSNorm and rotary positions with hand-written gradients.

Other functions wrap private functions of torch, which may change between versions of torch.

Shapes: B sequences, T positions, H query heads, K key/value heads, G = H / K, N = B x K, E entries of a head, D any
size, t queries of a block, s keys that the block attends to.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

BLOCK = 128
"""Number of queries in a block of attention. Smaller blocks make small, slow products; larger blocks compute more
scores that the causal mask discards (measured)."""


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of the tensors as one tensor, (number of tensors,).

    This function launches a few kernels for all tensors together; a loop over the tensors would launch hundreds. The
    same is true of :func:`multiply_` and :func:`subtract_`.
    """
    return torch.stack(torch._foreach_norm(list(tensors)))


def multiply_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply tensors in place.

    ``factors`` is one factor for all tensors, (), or a factor for each tensor, (number of tensors,).
    """
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
    """Make the next step of a fused Adam optimizer do nothing if ``skip`` is true.

    A skipped step does not increase Adam's step count. ``skip`` is a scalar on the device of the parameters.
    """
    adam.found_inf = skip.float()  # type: ignore[attr-defined]


def causal_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *, scale: float) -> Tensor:
    """Return the causal attention softmax(scale x query . key) . value, of shape (B, H, T, E).

    Use this function on a CPU, where torch's own kernel takes more than twice as long (measured: docs/log.md). It
    computes one block of queries at a time. For each block, it skips the keys after the block's last query.

    The backward pass computes the scores again, so that nothing of size T x T is stored. Products are computed in the
    dtype of the arguments. The softmax and the sums over blocks are computed in fp32 or wider. Torch function modes
    intercept this function as they intercept torch's own functions.
    """
    if has_torch_function((q_BHTE, k_BKTE, v_BKTE)):
        arguments = q_BHTE, k_BKTE, v_BKTE
        return handle_torch_function(causal_attention, arguments, *arguments, scale=scale)
    y_BHTE: Tensor = _CausalAttention.apply(q_BHTE, k_BKTE, v_BKTE, scale)  # type: ignore[no-untyped-call]
    return y_BHTE


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        q_NGTE = q_BHTE.reshape(-1, q_BHTE.shape[1] // k_BKTE.shape[1], *q_BHTE.shape[2:])
        k_NTE, v_NTE = k_BKTE.flatten(0, 1), v_BKTE.flatten(0, 1)
        ctx.save_for_backward(q_NGTE, k_NTE, v_NTE)
        # Stored in memory as (B, T, H, E), the order in which the next product reads it; so is the gradient of v.
        y_BHTE = _heads_last(q_BHTE, q_BHTE.dtype)
        for first, last, p_Nts in _blocks(q_NGTE, k_NTE, scale):
            y_BHTE[:, :, first:last] = (p_Nts @ v_NTE[:, :last]).view_as(y_BHTE[:, :, first:last])
        return y_BHTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        q_NGTE, k_NTE, v_NTE = ctx.saved_tensors
        g_NGTE = g_BHTE.reshape(q_NGTE.shape)
        wide = torch.promote_types(g_BHTE.dtype, torch.float32)
        dq_NGTE = torch.empty_like(q_NGTE)
        dk_NTE, dv_NTE = torch.zeros_like(k_NTE, dtype=wide), torch.zeros_like(v_NTE, dtype=wide)
        for first, last, p_Nts in _blocks(q_NGTE, k_NTE, ctx.scale):
            g_NtE, q_NtE = g_NGTE[:, :, first:last].flatten(1, 2), q_NGTE[:, :, first:last].flatten(1, 2)
            dv_NTE[:, :last] += p_Nts.mT @ g_NtE
            dp_Nts = g_NtE @ v_NTE[:, :last].mT
            ds_Nts = torch.ops.aten._softmax_backward_data(dp_Nts, p_Nts, -1, p_Nts.dtype)
            dq_NGTE[:, :, first:last] = (ds_Nts @ k_NTE[:, :last]).mul_(ctx.scale).view_as(dq_NGTE[:, :, first:last])
            dk_NTE[:, :last] += ds_Nts.mT @ q_NtE
        dk_BKTE, dv_BKTE = (x.view(len(g_BHTE), -1, *x.shape[1:]) for x in (dk_NTE.mul_(ctx.scale), dv_NTE))
        dv_BKTE = _heads_last(dv_BKTE, g_BHTE.dtype).copy_(dv_BKTE)
        return dq_NGTE.view(g_BHTE.shape), dk_BKTE.to(g_BHTE.dtype), dv_BKTE, None


def _blocks(q_NGTE: Tensor, k_NTE: Tensor, scale: float) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``(first, last, p_Nts)`` for each block of queries.

    The block has the t queries at the positions ``first`` to ``last - 1``, and ``p_Nts`` their attention
    probabilities, (N, G x t, s). They attend to the s = ``last`` positions up to the end of the block, so later
    positions have no columns. For example, the second block has the queries 128 to 255, and s is 256.
    """
    length = q_NGTE.shape[2]
    wide = torch.promote_types(q_NGTE.dtype, torch.float32)
    later_tt = q_NGTE.new_full((BLOCK, BLOCK), -torch.inf, dtype=wide).triu(1)
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        size = last - first
        scores_Nts = (q_NGTE[:, :, first:last].flatten(1, 2) @ k_NTE[:, :last].mT).to(wide).mul_(scale)
        scores_Nts.view(len(k_NTE), -1, size, last)[..., first:] += later_tt[:size, :size]
        yield first, last, scores_Nts.softmax(-1).to(q_NGTE.dtype)


def _heads_last(like_BHTE: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor of shape (B, H, T, E) that is stored in memory as (B, T, H, E)."""
    batch, heads, length, size = like_BHTE.shape
    return like_BHTE.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def rms_norm(x: Tensor, gain_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return gain * x / sqrt(mean(x^2) + eps), with the mean over the last dimension.

    The result is computed in the dtype of the gain and cast to ``dtype``. The gradient is hand-written, because
    autograd would read and write memory twice as often.
    """
    y: Tensor = _RMSNorm.apply(x, gain_D, eps, dtype)  # type: ignore[no-untyped-call]
    return y


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


def rotate(x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Apply rotary positions to x, and return the result as (B, H, T, E).

    Entries i and i + E/2 of a head form a pair. Each pair is rotated by an angle that depends on the token's position
    and on i.

    Cosines and sines are (T, E/2), or (B, T, E/2) if positions restart within a sequence.
    """
    y_BHTE: Tensor = _Rotate.apply(x_BTHE, cos_TE, sin_TE)  # type: ignore[no-untyped-call]
    return y_BHTE


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
