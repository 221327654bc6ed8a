"""Functions that ranks run in the tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.distributed.cut_up import whole_checkpoint

from leaven.data.tokens import TokenSet
from leaven.distributed.exchange import Exchange
from leaven.distributed.process_group import ProcessGroup, join_process_group
from leaven.distributed.sharded_model import ShardedModel
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table
from leaven.training.checkpoint import write_checkpoint
from leaven.training.engine import Training

CPU = torch.device("cpu")


@contextmanager
def dtype_of(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sharded(recipe: Recipe, group: ProcessGroup, device: torch.device = CPU) -> ShardedModel:
    """Return the part of an fp32 model that this process stores."""
    how: dict[str, Any] = {"seed": 0, "dtype": torch.float32, "device": device, "layout": recipe.layout}
    return ShardedModel(recipe.model, parameter_table(recipe), group=group, **how)


def train(recipe: Recipe, tokens: TokenSet, steps: int, dtype: str = "float64") -> dict[str, Any]:
    """Train some steps and validate. Return the metrics, and the parameters that this process owns at the end."""
    with dtype_of(dtype), join_process_group(recipe.layout, torch.device("cpu")) as group:
        training = Training(recipe, tokens, device="cpu", group=group)
        done = [training.step() for _ in range(steps)]
        validation = training.evaluate()
        averaged = training.evaluate(averaged=True) if training.average else validation
        done.append(training.step())
        pieces = [
            (piece.name, piece.shape, piece.offset, piece.local.detach().numpy().copy())
            for piece in training.sharded.pieces
            if piece.owned
        ]
        averages = training.average.state_dict() if training.average else {}
    return {
        "losses": [step.loss for step in done],
        "z_losses": [step.z_loss or 0.0 for step in done],
        "loads": [(step.max_load or 0.0, step.balance_loss or 0.0) for step in done],
        "grad_norms": [step.grad_norm for step in done],
        "update_norms": [step.update_norm for step in done],
        "modules": [step.modules for step in done],
        "validation": validation,
        "averaged": averaged,
        "averages": averages,
        "pieces": pieces,
    }


def train_and_save(recipe: Recipe, tokens: TokenSet, steps: int, start: Path | None, end: Path) -> list[float]:
    """Train some steps, from the checkpoint ``start`` if it is given, and save ``end``. Return the losses."""
    with dtype_of("float64"), join_process_group(recipe.layout, torch.device("cpu")) as group:
        training = Training(recipe, tokens, device="cpu", group=group)
        if start is not None:
            training.restore(whole_checkpoint(start, group=group))
        losses = [training.step().loss for _ in range(steps)]
        write_checkpoint(end, training.checkpoint(), Exchange(group))
    return losses


def assembled(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the whole parameters. Exactly one process must own each element."""
    whole: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, shape, offset, values in rank["pieces"]:
            target = whole.setdefault(name, np.zeros(shape))
            count = times.setdefault(name, np.zeros(shape, dtype=int))
            there = tuple(slice(start, start + length) for start, length in zip(offset, values.shape, strict=True))
            target[there] = values
            count[there] += 1
    assert all((count == 1).all() for count in times.values()), "owned twice or not at all"
    return whole
