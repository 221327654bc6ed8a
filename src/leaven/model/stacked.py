"""Models of one shape as one model: parameters [K, ...], products of matrices in batches of K.

The transformer itself is as it was: its sequences are those of all trials one after the other, (K x B, T), and only
what holds parameters is exchanged. torch's vmap would come to the same products; it stops at autograd functions
written by hand, of which the model has three, and cannot give each trial forward multipliers of its own.

Shape suffixes as in transformer.py, and K trials, N = B x T; a B in the names of what is handed on is K x B.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leaven.model.loss import CHUNK_ELEMENTS, IGNORED
from leaven.model.transformer import PerHeadNorm, RMSNorm, Transformer
from leaven.recipe.shape import ModelShape


class StackedTransformer(Transformer):
    """K transformers. ``multipliers`` are the forward multipliers of each trial, by parameter name.

    It is made without memory for its parameters: :meth:`hold` gives it some.
    """

    def __init__(
        self,
        shape: ModelShape,
        multipliers: Sequence[Mapping[str, float]],
        attention_scale: float,
        device: torch.device,
    ) -> None:
        with torch.device("meta"):
            super().__init__(shape, None, attention_scale)
        self.trials = len(multipliers)

        def of(name: str) -> Tensor | None:
            values = [one.get(name, 1.0) for one in multipliers]
            return torch.tensor(values, device=device) if any(value != 1.0 for value in values) else None

        for path, module in list(self.named_modules()):
            for name, child in module.named_children():
                stacked = _stacked(child, self.trials, of(f"{path}.{name}.weight"))
                if stacked is not None:
                    module.register_module(name, stacked)
        readout = of("embedding.weight" if shape.tied_embeddings else "unembedding.weight")
        self.logit_multipliers_K = torch.ones(self.trials, device=device) if readout is None else readout

    def hold(self, name: str, values: Tensor) -> nn.Parameter:
        """Let the parameter of this name be these values [K, ...], which are not copied."""
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(values)
        setattr(self.get_submodule(path), leaf, parameter)
        return parameter

    def keep(self, index: Tensor) -> None:
        """Go on with these trials; their parameters are handed over anew."""
        self.trials, self.logit_multipliers_K = len(index), self.logit_multipliers_K[index]
        for module in self.modules():
            if isinstance(module, _Linear) and module.multipliers_K is not None:
                module.multipliers_K = module.multipliers_K[index]

    def embed(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        if self.shape.positions == "learned" and documents_BT is None:
            documents_BT = torch.zeros_like(tokens_BT)  # places are looked up for every trial by itself
        return super().embed(tokens_BT, documents_BT)

    def losses(
        self,
        inputs_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None,
        factors_K: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The loss of each trial in nats, summed over the targets that count, times its factor, (K,); ``dtype`` is
        that of the products."""
        lower = dtype not in {torch.float32, torch.float64}
        with torch.autocast(inputs_BT.device.type, dtype, enabled=lower):
            hidden_KND = self.hidden(inputs_BT, documents_BT).reshape(self.trials, -1, self.shape.d_model)
        compute = dtype if lower else hidden_KND.dtype
        # Of the function's arguments those that need gradients say whether to compute any.
        weight_KVD = self.readout if torch.is_grad_enabled() else self.readout.detach()
        arguments = hidden_KND, weight_KVD, targets_BT.view(self.trials, -1), self.logit_multipliers_K, factors_K
        losses_K: Tensor = _StackedCrossEntropy.apply(*arguments, compute)  # type: ignore[no-untyped-call]
        return losses_K


def _stacked(module: nn.Module, trials: int, multipliers_K: Tensor | None) -> nn.Module | None:
    match module:
        case nn.Linear():
            return _Linear(module, trials, multipliers_K)
        case nn.Embedding():
            return _Embedding(module, trials)
        case RMSNorm() | nn.LayerNorm() | PerHeadNorm():
            return _Norm(module, trials)
    return None


def _parameters(module: nn.Module, trials: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(p.expand(trials, *p.shape)) for name, p in module.named_parameters()}


class _Linear(nn.Module):
    """The multipliers act on the weight and not on the branch that it makes, which is far larger."""

    def __init__(self, linear: nn.Linear, trials: int, multipliers_K: Tensor | None) -> None:
        super().__init__()
        own = _parameters(linear, trials)
        self.weight, self.bias = own["weight"], own.get("bias")
        self.multipliers_K = multipliers_K

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight_KFD: Tensor = self.weight
        bias_KF: Tensor | None = self.bias
        if self.multipliers_K is not None:
            weight_KFD = weight_KFD * self.multipliers_K[:, None, None]
            bias_KF = bias_KF * self.multipliers_K[:, None] if bias_KF is not None else None
        x_KND = x_BTD.reshape(len(weight_KFD), -1, x_BTD.shape[-1])
        if bias_KF is None:
            y_KNF = torch.bmm(x_KND, weight_KFD.mT)
        else:
            y_KNF = torch.baddbmm(bias_KF[:, None], x_KND, weight_KFD.mT)
        return y_KNF.view(*x_BTD.shape[:-1], -1)


class _Embedding(nn.Module):
    def __init__(self, embedding: nn.Embedding, trials: int) -> None:
        super().__init__()
        self.weight = _parameters(embedding, trials)["weight"]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        trials, size = self.weight.shape[:2]
        first_K = torch.arange(0, trials * size, size, device=tokens_BT.device)
        rows_KN = tokens_BT.reshape(trials, -1) + first_K[:, None]
        return F.embedding(rows_KN.view_as(tokens_BT), self.weight.flatten(0, 1))


class _Norm(nn.Module):
    """Over the last dimension, with gains of their own for each trial, and for each head where they have a norm
    each. In the gains' dtype, or what autocast says, as the norms that it stands for."""

    def __init__(self, norm: nn.Module, trials: int) -> None:
        super().__init__()
        own = _parameters(norm, trials)
        self.weight, self.bias = own["weight"], own.get("bias")
        self.eps: Any = norm.eps
        self.function = F.layer_norm if getattr(norm, "centred", isinstance(norm, nn.LayerNorm)) else F.rms_norm
        self.lowers = isinstance(norm, RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        gain_K = self._for(self.weight, x)
        wide = self.function(x.to(gain_K.dtype), x.shape[-1:], eps=self.eps).reshape(len(gain_K), -1, *x.shape[1:])
        y = wide * gain_K if self.bias is None else torch.addcmul(self._for(self.bias, x), wide, gain_K)
        device = x.device.type
        lower = self.lowers and torch.is_autocast_enabled(device)
        return y.flatten(0, 1).to(torch.get_autocast_dtype(device) if lower else x.dtype)

    @staticmethod
    def _for(parameter: Tensor, x: Tensor) -> Tensor:
        """[K, ...] with room for the dimensions of x in between."""
        return parameter[(slice(None), *(None,) * (x.dim() + 1 - parameter.dim()))]


class _StackedCrossEntropy(torch.autograd.Function):
    """:func:`leaven.model.loss.cross_entropy` of K trials, each with its own weight, multiplier and factor: (K,)."""

    @staticmethod
    def forward(  # noqa: PLR0917 (torch passes by position)
        ctx: Any,
        hidden_KND: Tensor,
        weight_KVD: Tensor,
        targets_KN: Tensor,
        multipliers_K: Tensor,
        factors_K: Tensor,
        compute: torch.dtype,
    ) -> Tensor:
        wide = torch.promote_types(compute, torch.float32)
        w_KVD, multipliers_K11, factors_K = weight_KVD.to(compute), multipliers_K[:, None, None], factors_K.to(wide)
        learns = hidden_KND.requires_grad or weight_KVD.requires_grad
        grad_hidden_KND = torch.empty_like(hidden_KND) if learns else None
        grad_weight_KVD = torch.zeros_like(weight_KVD) if learns else None
        totals_K = torch.zeros(len(w_KVD), dtype=wide, device=hidden_KND.device)
        size = max(1, CHUNK_ELEMENTS.get(hidden_KND.device.type, 2**22) // (w_KVD.shape[0] * w_KVD.shape[1]))
        for first in range(0, targets_KN.shape[1], size):
            part = slice(first, first + size)
            h_KnD, targets_Kn = (hidden_KND[:, part] * multipliers_K11).to(compute), targets_KN[:, part]
            logits_KnV = torch.bmm(h_KnD, w_KVD.mT)
            counts_Kn, targets_Kn1 = targets_Kn != IGNORED, targets_Kn.clamp(min=0)[..., None]
            log_p_KnV = torch.log_softmax(logits_KnV, -1, dtype=wide)
            totals_K -= log_p_KnV.gather(2, targets_Kn1)[..., 0].masked_fill(~counts_Kn, 0).sum(1)
            if grad_hidden_KND is None or grad_weight_KVD is None:
                continue
            g_KnV = log_p_KnV.exp_().scatter_add_(2, targets_Kn1, -torch.ones_like(targets_Kn1, dtype=wide))
            g_KnV = torch.mul(g_KnV, (counts_Kn * factors_K[:, None])[..., None], out=logits_KnV)
            grad_hidden_KND[:, part] = torch.bmm(g_KnV, w_KVD) * multipliers_K11
            grad_weight_KVD += torch.bmm(g_KnV.mT, h_KnD)
        ctx.save_for_backward(grad_hidden_KND, grad_weight_KVD)
        return totals_K * factors_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_KND, grad_weight_KVD = ctx.saved_tensors
        grad_K11 = grad_K[:, None, None]
        return grad_hidden_KND * grad_K11, grad_weight_KVD.mul_(grad_K11), None, None, None, None
