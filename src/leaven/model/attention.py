"""Compute causal attention on a CPU, one block of queries at a time. A block skips the keys after its last query.

torch's CPU kernel takes more than twice as long (measured: docs/log.md). Shapes: B sequences, H query heads, K
key/value heads, G = H / K, N = B x K, T positions, E entries of a head, t queries of a block, s keys that the block
attends to.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from leaven.model.kernels import softmax_backward

BLOCK = 128
"""Number of queries in a block. Smaller blocks make small, slow products; larger blocks compute more scores that the
causal mask discards (measured)."""


def causal_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *, scale: float) -> Tensor:
    """Return the causal attention softmax(scale x query . key) . value, of shape (B, H, T, E).

    The backward pass computes the scores again, so that nothing of size T x T is stored. Products are computed in the
    dtype of the arguments; the softmax and the sums over blocks are computed in fp32 or wider. Torch function modes
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
        # Stored as (B, T, H, E), the order in which the next product reads. Gradients that enter products are, too.
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
            ds_Nts = softmax_backward(dp_Nts, p_Nts)
            dq_NGTE[:, :, first:last] = (ds_Nts @ k_NTE[:, :last]).mul_(ctx.scale).view_as(dq_NGTE[:, :, first:last])
            dk_NTE[:, :last] += ds_Nts.mT @ q_NtE
        dk_BKTE, dv_BKTE = (x.view(len(g_BHTE), -1, *x.shape[1:]) for x in (dk_NTE.mul_(ctx.scale), dv_NTE))
        dv_BKTE = _heads_last(dv_BKTE, g_BHTE.dtype).copy_(dv_BKTE)
        return dq_NGTE.view(g_BHTE.shape), dk_BKTE.to(g_BHTE.dtype), dv_BKTE, None


def _blocks(q_NGTE: Tensor, k_NTE: Tensor, scale: float) -> Iterator[tuple[int, int, Tensor]]:
    """Split the queries into blocks, and yield ``(first, last, p_Nts)`` for each block.

    The block contains the queries ``first`` to ``last - 1``. ``p_Nts`` contains their attention probabilities,
    (N, G x t, s).
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
