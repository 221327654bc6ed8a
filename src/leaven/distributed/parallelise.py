"""Builds the layers of one rank, and then applies tensor parallelism, recomputation, compilation and sharding to
them, in this order.

:mod:`leaven.distributed.pipeline` decides which layers a rank has. The table in :mod:`leaven.distributed.shardings`
determines how each module is split over tensor-parallel ranks.
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

# The modules of a block whose parameters are communicated in the compute dtype.
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
    """Build the stage with the layers from number ``layers[0]`` up to, but not including, ``layers[1]``, and
    distribute it over the ranks. Parameters are not initialised."""
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
    """Compile a whole block, or attention and MLP separately. With tensor parallelism, compile them separately:
    FSDP's hooks on attention and MLP are not compiled, and a DTensor that passes through one of these hooks inside a
    compiled block loses the layout of its gradient."""
    if whole:
        block.compile()
        return
    for name in _MATRICES:
        module = getattr(block, name)
        module.forward = torch.compile(module.forward)


def shard(stage: Stage, group: ProcessGroup, zero: int) -> None:
    """Shard parameters, gradients and optimizer states over the data-parallel ranks, as the ZeRO stage requires
    (Rajbhandari et al. 2020, arXiv 1910.02054).

    Matrices are communicated in the compute dtype. Norms, embeddings and all gradients are communicated in fp32. The
    loss is divided by the total number of tokens on all ranks before the backward pass, so gradients are summed and
    never averaged.
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
    if zero == 3 and stage.begins and not stage.model.shape.tied_embeddings:  # the last layer also reads a tied one
        embedding = fully_shard(stage.model.embedding, mesh=mesh, reshard_after_forward=True, mp_policy=others)
        embedding.set_unshard_in_backward(False)  # the backward pass does not read the embedding
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=others)
    for unit in units(stage):
        # Sum gradients without dividing. Gloo cannot divide in the same operation.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(stage: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP gathers and shards, each as a unit."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def pieces(stage: Stage) -> list[Piece]:
    """Return this process's pieces of the stage's parameters. Both the first and the last stage have a tied
    embedding; the first stage owns it."""
    return [
        piece_of(name, parameter, owned=stage.begins or name != "embedding.weight")
        for name, parameter in stage.model.named_parameters()
    ]


@torch.no_grad()
def initialise(held: list[Piece], table: ParameterTable, seed: int) -> None:
    """Fill this process's pieces of the parameters with initial values. The values are the same as in a run with a
    single process."""
    for piece in held:
        row = table[piece.name]
        fill(piece.local, row.name, row.init_mean, row.init_std, seed, shape=piece.shape, offset=piece.offset)
