"""Layouts of hundreds of processes are built without memory, one rank at a time."""

import os
from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from tests.distributed.pool import Pool

from leaven.distributed.compat import pretend
from leaven.distributed.process_group import ProcessGroup
from leaven.distributed.sharded_model import ShardedModel
from leaven.planning.stages import stage_layers
from leaven.planning.trainable import require_trainable
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

# Llama 3 70B (Grattafiori et al. 2024, arXiv 2407.21783, table 3) with 24 of its 80 layers.
LLAMA_70B = {
    "model.n_layers": 24,
    "model.d_model": 8192,
    "model.n_heads": 64,
    "model.n_kv_heads": 8,
    "model.d_head": 128,
    "model.d_ff": 28_672,
    "model.vocab_size": 128_256,
    "model.seq_len": 8192,
    "batch.tokens": 2048 * 8192,
    "batch.micro_batch": 1,
    "data.tokens": 15 * 10**12,
}
LAYOUTS = {
    "512 ranks": {"tp": 8, "pp": 8, "dp": 8, "zero": 1},
    "512 ranks, ZeRO 3": {"dp": 512, "zero": 3},
    "3,072 ranks": {"tp": 8, "pp": 12, "dp": 32, "zero": 2, "schedule": "interleaved", "stages_per_rank": 2},
}

Held = dict[str, tuple[tuple[int, ...], bool]]
"""Of each parameter the shape of what a process holds, and whether it owns it."""


def held(recipe: Recipe, among: tuple[int, ...]) -> Held:
    """Return the pieces of the rank that this process pretends to be. torch remembers meshes, so a process can be one
    rank of one layout only."""
    layout, rank = recipe.layout, among[int(os.environ["RANK"])]
    pretend(rank, layout.ranks)
    group = ProcessGroup.arranged(rank, layout, torch.device("cpu"))
    device, table = torch.device("meta"), parameter_table(recipe)
    model = ShardedModel(recipe.model, table, seed=0, dtype=torch.bfloat16, device=device, layout=layout, group=group)
    if model._pipeline is not None:
        batch = recipe.batch.tokens // recipe.model.seq_len // layout.dp
        model._pipeline._schedule_for(model.schedulable(batch), torch.Size((1, recipe.model.seq_len)))
    return {piece.name: (tuple(piece.local.shape), piece.owned) for piece in model.pieces}


def expected(recipe: Recipe, rank: int) -> Held:
    """Return the expected pieces. Tensor ranks split matrices by rows, but those out of heads and of d_ff by columns.
    Then data-parallel ranks split everything by rows: each gets ceil(rows / ranks) rows, and the last ranks get fewer
    or none."""
    shape, layout = recipe.model, recipe.layout
    pp, rest = divmod(rank, layout.dp * layout.tp)
    dp, tp = divmod(rest, layout.tp)
    layers = stage_layers(shape, layout.pp * layout.stages_per_rank)
    stages = range(pp, len(layers), layout.pp)
    mine = {layer for stage in stages for layer in range(sum(layers[:stage]), sum(layers[: stage + 1]))}
    found: Held = {}
    for parameter in shape.parameters():
        ends = 0 in stages if parameter.name.startswith("embedding") else len(layers) - 1 in stages
        if not (parameter.layer in mine if parameter.layer is not None else ends):
            continue
        rows, *columns = parameter.shape
        matrix = len(parameter.shape) == 2
        if parameter.name.endswith(("attention.out.weight", "mlp.out.weight")):
            columns = [columns[0] // layout.tp]
        elif matrix:
            rows //= layout.tp
        each = -(-rows // layout.dp)
        here = max(0, min(each, rows - dp * each))
        found[parameter.name] = (here, *columns), matrix or tp == 0
    return found


@pytest.mark.long
@pytest.mark.parametrize("values", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_70b_model_on_many_ranks(values: dict[str, Any], ranks: Pool, tiny: Recipe) -> None:
    recipe = tiny.replace(LLAMA_70B | {f"layout.{key}": value for key, value in values.items()})
    layout = recipe.layout
    require_trainable(recipe, layout.ranks)
    among = 0, layout.ranks // 2 + 1, layout.ranks - 1
    assert ranks(len(among), held, recipe, among) == [expected(recipe, rank) for rank in among]


def test_the_expected_pieces_of_all_ranks_make_the_model(tiny: Recipe) -> None:
    recipe = tiny.replace(LLAMA_70B | {f"layout.{key}": value for key, value in LAYOUTS["512 ranks"].items()})
    sizes = Counter[str]()
    for rank in range(recipe.layout.ranks):
        for parameter, (block, owned) in expected(recipe, rank).items():
            sizes[parameter] += prod(block) if owned else 0
    assert sizes == {parameter.name: parameter.size for parameter in recipe.model.parameters()}
