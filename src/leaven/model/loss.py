"""Compute unembedding and cross-entropy together, one chunk of tokens at a time.

The logits of 16 x 1,024 tokens and a vocabulary of 50,304 take 3.3 GB in fp32, and so does their gradient. Here the
logits of a chunk are freed as soon as its gradient is computed. Shape suffixes: N tokens, n tokens of a chunk, D
d_model, V vocabulary, B sequences, T positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leaven.model.kernels import times_transposed, transposed_times

IGNORED = -100  # a target with this value does not count in the loss
# Number of logits in a chunk, by device type, and on other devices. Larger chunks make larger products, which are
# faster, and need more memory.
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
CHUNK_ELEMENTS_ELSEWHERE = 2**22


def isolated(windows: Tensor, end_of_text: int) -> tuple[Tensor, Tensor]:
    """Return (documents, targets), both (B, T), for ``windows`` (B, T + 1). The first T tokens are the inputs.
    ``documents`` has the number of each input's document, counted from 0 in each row. A target is the next token,
    or `IGNORED` after an end-of-text token, because the next token begins another document."""
    ends_BT = windows[:, :-1] == end_of_text
    documents_BT = ends_BT.cumsum(1) - ends_BT.long()
    return documents_BT, windows[:, 1:].masked_fill(ends_BT, IGNORED)


class ZLoss:
    """The z-loss of a step: the sum over tokens of c log^2 Z (Chowdhery et al. 2022, arXiv 2204.02311, section 5),
    where c is ``coefficient`` and Z is the sum of exp(logit) over the vocabulary."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self.total: Tensor | float = 0.0  # sum of c log^2 Z over the tokens of a step, in nats

    def add(self, log_z_n: Tensor, counts_n: Tensor) -> Tensor:
        """Add the z-loss of the tokens with ``counts_n`` True to the total. Return 1 + 2 c log Z, (n,): the gradient
        of a token's logits, z-loss included, is (1 + 2 c log Z) x softmax - one-hot."""
        self.total = self.total + self.coefficient * log_z_n.square().masked_fill(~counts_n, 0).sum()
        return 1 + 2 * self.coefficient * log_z_n


class WholeVocabulary:
    """Compute the loss of a chunk of tokens in a process that has all tokens and the whole vocabulary."""

    def gather(self, hidden_ND: Tensor) -> Tensor:
        """Return the hidden states of all tokens, given those of this process."""
        return hidden_ND

    def scatter(self, grad_ND: Tensor) -> Tensor:
        """Return the gradient of the input of :meth:`gather`. ``grad_ND`` is the gradient of its output."""
        return grad_ND

    def loss(
        self, logits_nV: Tensor, targets_n: Tensor, weight: Tensor, learns: bool, z_loss: ZLoss | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of the losses, without the z-loss, and ``weight`` times the gradient (n, V) of losses and
        z-loss with respect to the logits, or None unless ``learns``. The logits may be overwritten."""
        counts_n = targets_n != IGNORED
        targets_n1 = targets_n.clamp(min=0)[:, None]
        # log Z = logit - log(softmax) for every logit. The softmax of the largest logit cannot underflow.
        p_nV = torch.softmax(logits_nV, -1, dtype=weight.dtype)
        log_z_n = logits_nV.amax(-1) - p_nV.amax(-1).log()
        loss = (log_z_n - logits_nV.gather(1, targets_n1)[:, 0]).masked_fill(~counts_n, 0).sum()
        if not learns:
            return loss, None
        # d loss / d logits = softmax - one-hot. The result overwrites the softmax and then the logits.
        g_nV = p_nV
        if z_loss is not None:
            g_nV.mul_(z_loss.add(log_z_n, counts_n)[:, None])
        g_nV.scatter_add_(1, targets_n1, g_nV.new_full(targets_n1.shape, -1.0))
        return loss, torch.mul(g_nV, (counts_n * weight)[:, None], out=logits_nV)


def cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    factor: Tensor | float = 1.0,
    compute: torch.dtype | None = None,
    repeatable: bool = False,
    vocabulary: WholeVocabulary | None = None,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Return ``factor`` times the loss, a scalar, for hidden states (..., D) and targets (...).

    The loss, in nats, is the sum of -log softmax(multiplier x hidden . weight)[target] over the targets that
    are not `IGNORED`.

    Args:
        softcap: logits become softcap x tanh(logit / softcap).
        factor: may be a loss scale, because it is applied before gradients are rounded to ``compute``.
        compute: dtype of matrix products and logits, by default the dtype of ``hidden``. The softmax and the sum of
            losses are in fp32 or wider.
        repeatable: whether the backward pass may run twice. This needs memory for a second weight gradient.
        vocabulary: how processes share the tokens and the vocabulary. None: this process has all of them.
        z_loss: added to the gradients, not to the result.
    """
    if not torch.is_grad_enabled():
        # Without this, the gradient of the weight, which is most of the work, would be computed and not used.
        weight_VD = weight_VD.detach()
    how = multiplier, softcap, factor, compute, repeatable, vocabulary or WholeVocabulary(), z_loss
    tensors = hidden.flatten(0, -2), weight_VD, targets.flatten()
    total: Tensor = _CrossEntropy.apply(*tensors, *how)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (torch passes by position)
        ctx: Any,
        own_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        multiplier: float,
        softcap: float | None,
        factor: Tensor | float,
        compute: torch.dtype | None,
        repeatable: bool,
        vocabulary: WholeVocabulary,
        z_loss: ZLoss | None,
    ) -> Tensor:
        compute = compute or own_ND.dtype
        wide = torch.promote_types(compute, torch.float32)
        w_VD = weight_VD.to(compute)
        # ``factor`` is a number on the host or a tensor on the device. It must not be narrower than the loss.
        weight = torch.as_tensor(factor, dtype=wide)
        learns = own_ND.requires_grad or weight_VD.requires_grad
        hidden_ND = vocabulary.gather(own_ND)
        grad_hidden_ND = torch.empty_like(hidden_ND) if learns else None
        grad_weight_VD: Tensor | None = None
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        size = max(1, CHUNK_ELEMENTS.get(hidden_ND.device.type, CHUNK_ELEMENTS_ELSEWHERE) // len(weight_VD))
        for first in range(0, len(hidden_ND), size):
            part = slice(first, first + size)
            # Multiplying the hidden values is cheaper than multiplying the logits, which are many more.
            h_nD = (hidden_ND[part] * multiplier).to(compute)
            logits_nV, tanh_nV = times_transposed(h_nD, w_VD), None
            if softcap is not None:
                tanh_nV = logits_nV.to(wide).div_(softcap).tanh_()
                logits_nV = (tanh_nV * softcap).to(compute)
            loss, g_nV = vocabulary.loss(logits_nV, targets_N[part], weight, learns, z_loss)
            if g_nV is not None and tanh_nV is not None:
                g_nV = g_nV.mul_(1 - tanh_nV.square_())
            total += loss
            if grad_hidden_ND is not None and g_nV is not None:
                grad_hidden_ND[part] = times_transposed(g_nV, w_VD.T) * multiplier
                product_VD = transposed_times(g_nV, h_nD)
                if grad_weight_VD is None:
                    grad_weight_VD = product_VD.to(weight_VD.dtype)
                else:
                    grad_weight_VD += product_VD
        ctx.repeatable = repeatable
        ctx.save_for_backward(
            None if grad_hidden_ND is None else vocabulary.scatter(grad_hidden_ND),
            None if grad_weight_VD is None else grad_weight_VD.contiguous(),
        )
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        grad_weight_VD = grad_weight_VD * grad if ctx.repeatable else grad_weight_VD.mul_(grad)
        return grad_hidden_ND * grad, grad_weight_VD, *[None] * 8
