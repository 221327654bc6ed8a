"""Averages the weights of a run over its steps (:class:`leaven.recipe.recipe.Average`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from leaven.distributed.sharded_model import ShardedModel
from leaven.model.kernels import lerp_

AVERAGE = "average"  # the average of a parameter is the tensor ``average.NAME`` of a checkpoint


class WeightAverage:
    """The average of the weights. Each process averages only the weights that it updates, without communication."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._average: list[Tensor] = []  # in the order of ``local_parameters``; empty until the average begins

    @property
    def begun(self) -> bool:
        return bool(self._average)

    @torch.no_grad()
    def add(self, share: float) -> None:
        """Set the average to (1 - ``share``) x average + ``share`` x weights. The first call copies the weights."""
        weights = [parameter.detach() for parameter in self._model.local_parameters]
        if self._average:
            lerp_(self._average, weights, share)
        else:
            self._average = [weight.clone() for weight in weights]

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Swap the average and the model's weights inside the ``with`` block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weights in zip(self._average, self._model.local_parameters, strict=True):
            held = weights.clone()
            weights.copy_(average)
            average.copy_(held)
        self._model.drop_gathered()

    def state_dict(self) -> dict[tuple[str, str], Tensor]:
        """Return the averages by (``AVERAGE``, parameter name), or {} before the first :meth:`add`."""
        names = [each.row.name for each in self._model.parameters] if self._average else []
        return {(AVERAGE, name): average for name, average in zip(names, self._average, strict=True)}

    def load_state_dict(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Restore the averages. Without averages in ``state``, the next :meth:`add` begins a new average."""
        self._average = [
            state[AVERAGE, each.row.name].to(each.local, copy=True)
            for each in self._model.parameters
            if (AVERAGE, each.row.name) in state
        ]
