"""Computes unembedding and cross-entropy when each tensor-parallel rank has one slice of the vocabulary and one slice
of the sequence.

Like :mod:`leaven.model.loss`, this module works on chunks of tokens: a rank stores the logits of only one chunk at a
time, and only for its slice of the vocabulary. Ranks exchange three numbers for each token. Shapes: B sequences, t
positions of this rank, T positions of all ranks together, D d_model, V vocabulary entries of this rank, n tokens of a
chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from leaven.distributed.compat import all_gather, reduce_scatter
from leaven.model.loss import CHUNK_ELEMENTS, IGNORED


def sharded_cross_entropy(
    hidden_BtD: Tensor,
    weight: DTensor,
    targets_BT: Tensor,
    *,
    group: dist.ProcessGroup,
    multiplier: float = 1.0,
    factor: Tensor | float = 1.0,
    compute: torch.dtype | None = None,
    repeatable: bool = False,
) -> Tensor:
    """Return ``factor`` times the loss in nats, a scalar that is the same on every rank.

    The loss is the sum over the tokens of all ranks of -log softmax(multiplier x hidden . weight)[target].
    ``hidden_BtD`` contains the positions of this rank, and ``targets_BT`` contains all positions. ``weight`` is
    sharded by its rows. :func:`leaven.model.loss.cross_entropy` describes the other arguments.
    """
    weight_VD = weight.to_local()
    if not torch.is_grad_enabled():
        # Without this, the gradient of the weight, which is most of the work, would be computed and not used.
        weight_VD = weight_VD.detach()
    arguments = hidden_BtD, weight_VD, targets_BT, group, multiplier, factor, compute, repeatable
    total: Tensor = _ShardedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return total


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (torch passes by position)
        ctx: Any,
        hidden_BtD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        group: dist.ProcessGroup,
        multiplier: float,
        factor: Tensor | float,
        compute: torch.dtype | None,
        repeatable: bool,
    ) -> Tensor:
        compute = compute or hidden_BtD.dtype
        wide = torch.promote_types(compute, torch.float32)
        w_VD = weight_VD.to(compute)
        weight = torch.as_tensor(factor, dtype=wide)
        learns = hidden_BtD.requires_grad or weight_VD.requires_grad
        # Each rank has consecutive positions, so the gathered order is (rank, B, t).
        hidden_ND = all_gather(hidden_BtD.flatten(0, 1), group)
        length, size = hidden_BtD.shape[1], dist.get_world_size(group)
        targets_N = targets_BT.view(len(targets_BT), size, length).transpose(0, 1).flatten()
        first = dist.get_rank(group) * len(weight_VD)
        grad_hidden_ND = torch.empty_like(hidden_ND) if learns else None
        grad_weight_VD = torch.zeros_like(weight_VD) if learns else None
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        step = max(1, CHUNK_ELEMENTS.get(hidden_ND.device.type, 2**22) // len(weight_VD))
        for start in range(0, len(hidden_ND), step):
            part = slice(start, start + step)
            h_nD, targets_n = (hidden_ND[part] * multiplier).to(compute), targets_N[part]
            logits_nV = F.linear(h_nD, w_VD).to(wide)
            highest_n = logits_nV.amax(-1)
            dist.all_reduce(highest_n, dist.ReduceOp.MAX, group)
            # The target's logit is on one rank; the others add 0.
            place_n1 = (targets_n - first)[:, None]
            mine_n1 = (place_n1 >= 0) & (place_n1 < len(weight_VD))
            place_n1 = place_n1.clamp(0, len(weight_VD) - 1)
            target_n = torch.where(mine_n1, logits_nV.gather(1, place_n1), 0)[:, 0]
            p_nV = logits_nV.sub_(highest_n[:, None]).exp_()  # in place: logits are by far the largest tensors
            sums_2n = torch.stack((p_nV.sum(-1), target_n))
            dist.all_reduce(sums_2n, group=group)
            normaliser_n, target_n = sums_2n
            counts_n = targets_n != IGNORED
            total += torch.where(counts_n, normaliser_n.log() + highest_n - target_n, 0).sum()
            if grad_hidden_ND is None or grad_weight_VD is None:
                continue
            g_nV = p_nV.div_(normaliser_n[:, None]).scatter_add_(1, place_n1, -mine_n1.to(wide))
            g_nV = g_nV.mul_((counts_n * weight)[:, None]).to(compute)
            grad_hidden_ND[part] = (g_nV @ w_VD) * multiplier
            grad_weight_VD += g_nV.T @ h_nD
        grad_hidden_BtD = None
        if grad_hidden_ND is not None:  # each rank has computed what its vocabulary adds
            grad_hidden_BtD = reduce_scatter(grad_hidden_ND, group).view(hidden_BtD.shape)
        ctx.repeatable = repeatable
        ctx.save_for_backward(grad_hidden_BtD, grad_weight_VD)
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_BtD, grad_weight_VD = ctx.saved_tensors
        grad_weight_VD = grad_weight_VD * grad if ctx.repeatable else grad_weight_VD.mul_(grad)
        return grad_hidden_BtD * grad, grad_weight_VD, None, None, None, None, None, None
