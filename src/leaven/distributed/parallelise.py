"""A model over ranks, in one straight function: tensor -> recompute -> compile -> shard.

Which stretches of layers a rank has is :mod:`leaven.distributed.pipeline`'s; how modules are cut over tensor ranks is
the table in :mod:`leaven.distributed.shardings`.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from leaven.distributed.pieces import Piece, piece_of
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.distributed.shardings import shard_tensors
from leaven.distributed.stage import Stage
from leaven.model.initialise import fill
from leaven.model.transformer import Transformer
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import ParameterTable

# In the parameters' dtype; everything else is computed in it where autocast says so.
_MATRICES = ("attention", "mlp")


def build_stage(
    shape: ModelShape,
    table: ParameterTable,
    layers: tuple[int, int],
    *,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Stage:
    """The layers from the first to before the second number, laid out over the ranks; without values."""
    first, last = layers
    with torch.device("meta"):
        multipliers = {row.name: row.multiplier for row in table.rows}
        model = Transformer(shape, multipliers, table.attention_scale)
        stage = Stage(model, first, last, dtype, splits_backward=layout.schedule == "zero-bubble")
    if layout.tp > 1:
        assert group.mesh is not None
        shard_tensors(stage, group.mesh["tp"])
    if layout.recompute == "full":
        for block in stage.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if layout.compile:
        for block in stage.layers:
            compile_block(block, whole=layout.tp == 1)
    if group.mesh is not None:
        shard(stage, group, layout.zero)
    stage.to_empty(device=device)
    return stage


def compile_block(block: nn.Module, whole: bool) -> None:
    """A block, or its two large parts each by itself: FSDP's hooks at those are not compiled, and a DTensor that
    passes from what is compiled before such a hook to what is after it comes back without its gradient's layout."""
    if whole:
        block.compile()
        return
    for name in _MATRICES:
        module = getattr(block, name)
        module.forward = torch.compile(module.forward)


def shard(stage: Stage, group: ProcessGroup, zero: int) -> None:
    """Parameters, gradients and optimiser states over the data-parallel ranks, as the ZeRO stage says (Rajbhandari et
    al. 2020, arXiv 1910.02054).

    Products read matrices in the dtype that autocast would cast them to, so they travel in it; norms and embeddings
    are read, and travel, in fp32, and so do all gradients. The loss is a sum over the tokens of all ranks, divided
    by their number before the backward pass: gradients are summed and never averaged.
    """
    assert group.mesh is not None
    mesh = group.mesh["replicate", "shard"] if group.degree("replicate") > 1 else group.mesh["shard"]
    lower = None if stage.dtype == torch.float32 else stage.dtype
    matrices = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False)
    others = MixedPrecisionPolicy(cast_forward_inputs=False)
    if lower is None:
        matrices = others
    for block in stage.layers:
        for name in _MATRICES:
            module = getattr(block, name)
            fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=matrices)
    if zero == 3 and stage.begins and not stage.model.shape.tied_embeddings:  # the end of a tied one reads it too
        embedding = fully_shard(stage.model.embedding, mesh=mesh, reshard_after_forward=True, mp_policy=others)
        embedding.set_unshard_in_backward(False)  # its gradient is of tokens and not of values
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=others)
    for unit in units(stage):
        # Gloo knows no division before a sum; one without it is what is wanted.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def pieces(stage: Stage) -> list[Piece]:
    """What this process holds of the stage's parameters. Where the last stage has a tied embedding of its own, the
    first owns it."""
    return [
        piece_of(name, parameter, owned=stage.begins or name != "embedding.weight")
        for name, parameter in stage.model.named_parameters()
    ]


@torch.no_grad()
def initialise(held: list[Piece], table: ParameterTable, seed: int) -> None:
    """Give what this process holds the values that the rows say: those that one process would give them."""
    for piece in held:
        row = table[piece.name]
        fill(piece.local, row.name, row.init_mean, row.init_std, seed, shape=piece.shape, offset=piece.offset)
