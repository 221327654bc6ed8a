"""Initialise parameters by name, from the parameter table.

Each parameter's values are a function of (seed, name, shape) alone: neither the order of creation nor the layout of
the run has an influence. A parameter is drawn in blocks of rows, each block from a separate seed, so that a slice can
be drawn without the rest.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from leaven.model.transformer import Transformer
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import ParameterTable

BLOCK_ROWS = 256


def build_model(
    shape: ModelShape, table: ParameterTable, seed: int, device: torch.device | str = "cpu"
) -> Transformer:
    """Build a model with the multipliers and initial values of its parameter table, in fp32."""
    with torch.device("meta"):
        multipliers = {row.name: row.multiplier for row in table.rows}
        model = Transformer(shape, multipliers, table.attention_scale)
    model.to_empty(device=device)
    initialise(model, table, seed)
    return model


@torch.no_grad()
def initialise(model: Transformer, table: ParameterTable, seed: int) -> None:
    """Initialise every parameter as its row of the table says."""
    parameters = dict(model.named_parameters())
    for row in table.rows:
        fill(parameters.pop(row.name), row.name, row.init_mean, row.init_std, seed)
    assert not parameters, f"no rows for {sorted(parameters)}"


def fill(
    piece: Tensor,
    name: str,
    mean: float,
    std: float,
    seed: int,
    *,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> None:
    """Initialise a parameter, or the block at ``offset`` of a parameter of ``shape``, from a normal distribution.

    Values are drawn in fp32 for every dtype, so that models of different dtypes agree.
    """
    if std == 0:
        piece.fill_(mean)
        return
    shape, offset = shape or piece.shape, offset or (0,) * piece.dim()
    end = offset[0] + len(piece)
    for first in range(offset[0] // BLOCK_ROWS * BLOCK_ROWS, end if piece.numel() else 0, BLOCK_ROWS):
        generator = torch.Generator().manual_seed(name_seed(seed, name, first // BLOCK_ROWS))
        rows = torch.empty((min(BLOCK_ROWS, shape[0] - first), *shape[1:]), dtype=torch.float32)
        rows.normal_(mean, std, generator=generator)
        low, high = max(first, offset[0]), min(first + BLOCK_ROWS, end)
        rows = rows[low - first : high - first]
        for dim in range(1, piece.dim()):
            rows = rows.narrow(dim, offset[dim], piece.shape[dim])
        piece[low - offset[0] : high - offset[0]].copy_(rows)


def name_seed(seed: int, *path: str | int) -> int:
    """Return a 63-bit seed derived from ``seed`` and names that say what the seed is for."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
