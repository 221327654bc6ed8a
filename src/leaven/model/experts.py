"""A mixture of experts: a router chooses some of the experts for each token, and no token is dropped.

Shape suffixes: B sequences, T positions, D d_model, F d_expert, E experts, k active experts, R = B x T x k rows. A
token has one row for each of its experts. Rows are sorted by expert.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leaven.model.kernels import grouped_linear
from leaven.recipe.experts import Experts
from leaven.recipe.shape import Activation, ModelShape

SMALLEST = 1e-20  # added to a sum of scores, as in DeepSeek-V3's code: the sum is 0 if all sigmoids underflow


def activated(activation: Activation, h: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return the hidden values of an MLP. ``h`` and ``gate`` are the outputs of the matrices ``in`` and ``gate``."""
    match activation:
        case "swiglu":
            assert gate is not None
            return F.silu(gate) * h
        case "geglu":
            assert gate is not None
            return F.gelu(gate, approximate="tanh") * h
        case "gelu":
            return F.gelu(h, approximate="tanh")
        case "relu":
            return F.relu(h)
        case "squared_relu":
            return F.relu(h).square()


@dataclass(frozen=True)
class SequenceWeights:
    """How much each sequence of a micro-batch counts in the loss of a step."""

    targets_B: Tensor  # number of targets that are not IGNORED; 0 for sequences that only fill a micro-batch
    factor: Tensor | float  # factor on the loss of one target


@dataclass
class RouterTally:
    """The expert load and the balance loss of a layer in one step. Each backward pass adds to both."""

    load_E: Tensor | float = 0.0  # number of tokens sent to each expert
    balance: Tensor | float = 0.0  # balance loss without its coefficient, summed over the targets


class Router(nn.Module):
    """Maps a token's activations to one logit per expert. Computes in the dtype of its weights, fp32."""

    def __init__(self, d_model: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, d_model) / math.sqrt(d_model))

    def forward(self, x_BTD: Tensor) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            return F.linear(x_BTD.to(self.weight.dtype), self.weight)


class ExpertMatrices(nn.Module):
    """A matrix for each expert, (experts, fan out, fan in)."""

    def __init__(self, experts: int, fan_out: int, fan_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, fan_out, fan_in) / math.sqrt(fan_in))


class RoutedExperts(nn.Module):
    gate: ExpertMatrices  # only in gated MLPs
    out: ExpertMatrices

    def __init__(self, shape: ModelShape, experts: Experts) -> None:
        super().__init__()
        for name in ("gate", "in") if shape.gated else ("in",):
            self.add_module(name, ExpertMatrices(experts.number, experts.d_expert, shape.d_model))
        self.out = ExpertMatrices(experts.number, shape.d_model, experts.d_expert)
        self.activation, self.gated = shape.activation, shape.gated

    def forward(self, x_RD: Tensor, load_E: Tensor) -> Tensor:
        """Return the outputs (R, D) of rows that are sorted by expert. ``load_E``: number of rows of each expert."""
        gate_RF = grouped_linear(x_RD, self.gate.weight, load_E) if self.gated else None
        h_RF = activated(self.activation, grouped_linear(x_RD, getattr(self, "in").weight, load_E), gate_RF)
        return grouped_linear(h_RF, self.out.weight, load_E)


class MixtureOfExperts(nn.Module):
    """The routed and the shared experts of a block.

    Args:
        shared: the MLP of the shared experts, or None.
        shared_multiplier: (factor on the shared experts' output) / (factor on the routed experts' output).
        losses: coefficients of the balance loss and of the router's z-loss.
    """

    bias_E: Tensor | None  # added to the scores before experts are chosen; set by LoadBalance (training)

    def __init__(
        self, shape: ModelShape, shared: nn.Module | None, shared_multiplier: float, losses: tuple[float, float]
    ) -> None:
        super().__init__()
        assert shape.experts is not None
        self.settings = shape.experts
        self.router = Router(shape.d_model, shape.experts.number)
        self.experts = RoutedExperts(shape, shape.experts)
        if shared is not None:
            self.shared = shared
        self.has_shared, self.shared_multiplier = shared is not None, shared_multiplier
        self.losses = losses
        self.counts_losses = True  # False if another rank adds the gradients of the losses for the same tokens
        self.register_buffer("bias_E", None, persistent=False)
        self.tally = RouterTally()

    def forward(self, x_BTD: Tensor, sequences: SequenceWeights | None = None) -> Tensor:
        chosen_BTk, weights_BTk, load_BE = self._route(x_BTD, sequences)
        y_BTD = self._experts(x_BTD, chosen_BTk, weights_BTk, load_BE.sum(0))
        if self.has_shared:
            y_BTD = torch.add(y_BTD, self.shared(x_BTD), alpha=self.shared_multiplier)
        return y_BTD

    def _route(self, x_BTD: Tensor, sequences: SequenceWeights | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's experts (B, T, k) and their weights (B, T, k), and the load (B, E): the number of
        tokens that each expert gets from each sequence."""
        settings, k = self.settings, self.settings.active
        logits_BTE = self.router(x_BTD)
        scores_BTE = logits_BTE.softmax(-1) if settings.router == "softmax" else logits_BTE.sigmoid()
        ranked_BTE = scores_BTE.detach() if self.bias_E is None else scores_BTE.detach() + self.bias_E
        chosen_BTk = ranked_BTE.topk(k, dim=-1).indices
        weights_BTk = scores_BTE.gather(-1, chosen_BTk)
        if settings.normalise:
            weights_BTk = weights_BTk / (weights_BTk.sum(-1, keepdim=True) + SMALLEST)
        if settings.weight_scale != 1:
            weights_BTk = weights_BTk * settings.weight_scale
        rows_BR = chosen_BTk.flatten(1)
        load_BE = rows_BR.new_zeros(len(rows_BR), settings.number).scatter_add_(1, rows_BR, torch.ones_like(rows_BR))
        if sequences is not None and self.counts_losses and torch.is_grad_enabled():
            weights_BTk = self._with_losses(weights_BTk, logits_BTE, scores_BTE, load_BE, sequences)
        return chosen_BTk, weights_BTk, load_BE

    def _with_losses(
        self, weights_BTk: Tensor, logits_BTE: Tensor, scores_BTE: Tensor, load_BE: Tensor, sequences: SequenceWeights
    ) -> Tensor:
        """Return the weights unchanged. The backward pass adds the gradients of the router's losses."""
        balance, z_loss = self.losses
        targets_B = sequences.targets_B.to(scores_BTE.dtype)
        shares_BTE = scores_BTE
        if self.settings.router == "sigmoid":
            shares_BTE = scores_BTE / (scores_BTE.sum(-1, keepdim=True) + SMALLEST)
        # For each sequence: E x sum over experts of (share of the choices) x (mean normalised score). The result is 1
        # if all experts have the same share.
        choices = self.settings.active * logits_BTE.shape[1]
        even_B = self.settings.number * (load_BE.to(shares_BTE.dtype) / choices * shares_BTE.mean(1)).sum(-1)
        loss = balance * (even_B * targets_B).sum()
        if z_loss:
            loss = loss + z_loss * (logits_BTE.logsumexp(-1).square().mean(1) * targets_B).sum()
        load_E = (load_BE * (targets_B > 0)[:, None]).sum(0)
        seen = even_B.detach() @ targets_B
        same_BTk: Tensor = _AlsoMinimise.apply(  # type: ignore[no-untyped-call]
            weights_BTk, loss * sequences.factor, self.tally, (load_E, seen)
        )
        return same_BTk

    def _experts(self, x_BTD: Tensor, chosen_BTk: Tensor, weights_BTk: Tensor, load_E: Tensor) -> Tensor:
        """Return the weighted sum (B, T, D) of the outputs of each token's experts."""
        k = chosen_BTk.shape[-1]
        by_expert_R = chosen_BTk.flatten().argsort(stable=True)
        place_R = torch.empty_like(by_expert_R).scatter_(
            0, by_expert_R, torch.arange(len(by_expert_R), device=by_expert_R.device)
        )
        x_RD = copied_rows(x_BTD.flatten(0, 1), by_expert_R, place_R, k)
        y_RD = self.experts(x_RD, load_E)
        y_BTkD = copied_rows(y_RD, place_R, by_expert_R).view(*chosen_BTk.shape, -1)
        y_BTD: Tensor = (y_BTkD * weights_BTk.to(y_BTkD.dtype)[..., None]).sum(-2)
        return y_BTD


def copied_rows(x_ND: Tensor, order_R: Tensor, inverse_R: Tensor, copies: int = 1) -> Tensor:
    """Return R = ``copies`` x N rows. Row i is row ``order_R[i] // copies`` of ``x_ND``; ``inverse_R`` is the inverse
    of this permutation. The backward pass gathers with it, because scattering is not reproducible on a GPU."""
    x_RD: Tensor = _Rows.apply(x_ND, order_R, inverse_R, copies)  # type: ignore[no-untyped-call]
    return x_RD


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, inverse_R: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return x_ND[order_R // copies if copies > 1 else order_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        g_RD = g_RD[inverse_R]
        return (g_RD.view(-1, ctx.copies, g_RD.shape[-1]).sum(1) if ctx.copies > 1 else g_RD), None, None, None


class _AlsoMinimise(torch.autograd.Function):
    """An identity function of ``x``. The backward pass gives ``loss`` the gradient 1, so training minimises it, and
    adds ``counted``, the pair (load of each expert, balance loss), to ``tally``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, tally: RouterTally, counted: tuple[Tensor, Tensor]) -> Tensor:
        ctx.tally, ctx.counted = tally, counted
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (one,) = ctx.saved_tensors
        ctx.tally.load_E = ctx.tally.load_E + ctx.counted[0]
        ctx.tally.balance = ctx.tally.balance + ctx.counted[1]
        return g, one, None, None
