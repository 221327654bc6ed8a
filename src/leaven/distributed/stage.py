"""The stretch of a model that a rank runs in one go. Without a pipeline it is the whole model."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leaven.model.loss import cross_entropy
from leaven.model.transformer import Transformer


class LossFunction(Protocol):
    """As :func:`leaven.model.loss.cross_entropy`, of hidden (B, T, D) and targets (B, T)."""

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, /, **how: Any) -> Tensor: ...


def whole_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, /, **how: Any) -> Tensor:
    return cross_entropy(hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), **how)


class Stage(nn.Module):
    """Layers ``first`` to before ``last`` of a model, with the embedding before and the loss after if they are at its
    ends. Parameters keep the names that they have in the whole model, after ``model.``.

    ``dtype`` is that of the products. ``factor`` multiplies the loss: set it before a forward. ``splits_backward``:
    the gradients of inputs and of parameters are computed apart.
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
                model.layers[layer] = None  # type: ignore[assignment]  # children() passes it over
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
        """Tokens (B, T) of the first stage, else what the stage before gave (B, T, D), to what the next one gets, or
        of the last one the loss in nats, summed over the targets that count and multiplied by ``factor``, (1,)."""
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
        return torch.stack((loss,))  # and no view: hooks on a stage want its output to themselves
