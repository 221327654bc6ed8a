"""Computes unembedding and cross-entropy when each tensor-parallel rank has one slice of the vocabulary and one slice
of the sequence.

Like :mod:`leaven.model.loss`, this module works on chunks of tokens: a rank stores the logits of only one chunk at a
time, and only for its slice of the vocabulary. Ranks exchange three numbers for each token. Shapes: B sequences, t
positions of this rank, T positions of all ranks together, D d_model, V vocabulary entries of this rank, n tokens of a
chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaven.distributed.compat import all_gather, reduce_scatter
from leaven.model.loss import IGNORED, WholeVocabulary, cross_entropy


def sharded_cross_entropy(
    hidden_BtD: Tensor, weight: DTensor, targets_BT: Tensor, *, group: dist.ProcessGroup, **how: Any
) -> Tensor:
    """Return the loss of :func:`leaven.model.loss.cross_entropy` over the tokens of all ranks, which is the same on
    every rank.

    ``hidden_BtD`` contains the positions of this rank, and ``targets_BT`` contains all positions. ``weight`` is
    sharded by its rows. ``how`` is passed to :func:`leaven.model.loss.cross_entropy`.
    """
    # Each rank has consecutive positions, so the gathered order is (rank, B, t).
    targets_BRt = targets_BT.view(len(targets_BT), dist.get_world_size(group), -1)
    vocabulary = SlicedVocabulary(group)
    return cross_entropy(hidden_BtD, weight.to_local(), targets_BRt.transpose(0, 1), vocabulary=vocabulary, **how)


@dataclass(frozen=True)
class SlicedVocabulary(WholeVocabulary):
    """Computes the loss of a chunk of tokens when each rank has a slice of the vocabulary."""

    group: dist.ProcessGroup

    def gather(self, hidden_ND: Tensor) -> Tensor:
        return all_gather(hidden_ND, self.group)

    def scatter(self, grad_ND: Tensor) -> Tensor:
        return reduce_scatter(grad_ND, self.group)  # each rank has the gradient from its slice of the vocabulary

    def loss(
        self, logits_nV: Tensor, targets_n: Tensor, weight: Tensor, learns: bool
    ) -> tuple[Tensor, Tensor | None]:
        compute, size = logits_nV.dtype, logits_nV.shape[1]
        logits_nV = logits_nV.to(weight.dtype)
        highest_n = logits_nV.amax(-1)
        dist.all_reduce(highest_n, dist.ReduceOp.MAX, self.group)
        # The target's logit is on one rank; the others add 0.
        place_n1 = (targets_n - dist.get_rank(self.group) * size)[:, None]
        mine_n1 = (place_n1 >= 0) & (place_n1 < size)
        place_n1 = place_n1.clamp(0, size - 1)
        target_n = torch.where(mine_n1, logits_nV.gather(1, place_n1), 0)[:, 0]
        p_nV = logits_nV.sub_(highest_n[:, None]).exp_()  # in place: logits are by far the largest tensors
        sums_2n = torch.stack((p_nV.sum(-1), target_n))
        dist.all_reduce(sums_2n, group=self.group)
        normaliser_n, target_n = sums_2n
        counts_n = targets_n != IGNORED
        loss = torch.where(counts_n, normaliser_n.log() + highest_n - target_n, 0).sum()
        if not learns:
            return loss, None
        g_nV = p_nV.div_(normaliser_n[:, None]).scatter_add_(1, place_n1, -mine_n1.to(weight.dtype))
        return loss, g_nV.mul_((counts_n * weight)[:, None]).to(compute)
