"""Initialise parameters with the distributions that the parameter table defines.

Values are drawn in blocks of rows, each with its own seed. So they do not depend on how processes share the model,
and a process draws only the blocks that it needs.
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
    """Build a model in fp32 with the multipliers and initial values that its parameter table defines."""
    with torch.device("meta"):
        model = Transformer(shape, table.multipliers, table.attention_scale, table.router_losses)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == table.multipliers.keys(), "the model and the table have different parameters"
    for row in table.rows:
        fill(parameters[row.name], row.name, row.init_mean, row.init_std, seed)
    return model


@torch.no_grad()
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
    """Fill ``piece`` with normally distributed values. ``seed`` and ``name`` determine them. ``piece`` is a
    parameter of shape ``shape``, or the block of it that begins at index ``offset``. Values are drawn in fp32
    and then cast, so models of different dtypes have the same values up to rounding."""
    if std == 0:
        piece.fill_(mean)
        return
    shape, offset = shape or piece.shape, offset or (0,) * piece.dim()
    if len(shape) == 3:
        for expert, matrix in enumerate(piece, offset[0]):
            fill(matrix, f"{name}.{expert}", mean, std, seed, shape=shape[1:], offset=offset[1:])
        return
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
    """Derive a 63-bit seed from ``seed`` and ``path``, such as the name of a parameter and the number of a block."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
