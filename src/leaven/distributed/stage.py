"""Defines a stage, which consists of consecutive layers that one rank runs. Without pipeline parallelism, the stage
is the whole model."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leaven.model.loss import cross_entropy
from leaven.model.transformer import Transformer


class LossFunction(Protocol):
    """A function like :func:`leaven.model.loss.cross_entropy`, but for hidden states (B, T, D) and targets (B, T)."""

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, /, **how: Any) -> Tensor: ...


def whole_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, /, **how: Any) -> Tensor:
    return cross_entropy(hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), **how)


class Stage(nn.Module):
    """The layers of a model from number ``first`` up to, but not including, ``last``. The first stage also has the
    embedding, and the last stage also has the loss. Parameters have the same names as in the whole model, prefixed
    with ``model.``.

    Args:
        dtype: the dtype of matrix products.
        splits_backward: whether the backward pass computes the gradients of inputs and of parameters separately.

    ``factor`` multiplies the loss; set it before a forward pass.
    """

    def __init__(
        self, model: Transformer, first: int, last: int, dtype: torch.dtype, *, splits_backward: bool = False
    ) -> None:
        super().__init__()
        self.splits_backward = splits_backward
        shape = model.shape
        self.begins, self.ends = first == 0, last == shape.n_layers
        for layer in range(shape.n_layers):
            if not first <= layer < last:
                model.layers[layer] = None  # type: ignore[assignment]  # children() skips it
        if not self.begins:
            if shape.embedding_norm:
                del model.norm["embedding"]
            if shape.positions == "learned":
                del model.positions
            if not (self.ends and shape.tied_embeddings):
                del model.embedding
        if not self.ends:
            del model.norm["final"]
            if not shape.tied_embeddings:
                del model.unembedding
        self.model, self.dtype = model, dtype
        self.factor: Tensor | float = 1.0
        self.loss: LossFunction = whole_loss
        self.readout: Callable[[Tensor], Tensor] = lambda weight: weight

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.layers.children())

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, documents_BT: Tensor | None = None) -> Tensor:
        """Return the activations for the next stage, (B, T, D). On the last stage, return ``factor`` times the loss
        in nats, summed over all targets that are not ignored, (1,). On the first stage, ``x`` contains the tokens,
        (B, T). On other stages, ``x`` contains the activations of the previous stage, (B, T, D)."""
        model, lower = self.model, self.dtype not in {torch.float32, torch.float64}
        with torch.autocast(x.device.type, self.dtype, enabled=lower):
            if self.begins:
                x = model.embed(x, documents_BT)
            x_BTD = model.through_layers(x, model.shape.seq_len, documents_BT)
            if not self.ends:
                return x_BTD
            hidden_BTD = model.norm["final"](x_BTD)
        assert targets_BT is not None
        loss = self.loss(
            hidden_BTD,
            self.readout(model.readout),
            targets_BT,
            multiplier=model.logit_multiplier,
            factor=self.factor,
            compute=self.dtype if lower else None,
            repeatable=self.splits_backward,
        )
        return torch.stack((loss,))  # FSDP's hooks do not accept a view
