"""Builds a process's part of a model, and runs forward and backward passes. The interface is the same for
every layout.

The optimizer, clipping and norms use plain tensors: the blocks of the parameters that this process
stores. A norm is computed over all processes, and is bit-identical on all of them. So all processes make
the same decisions, for example whether to clip.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from leaven.distributed.expert_parallel import distribute_experts
from leaven.distributed.pieces import Piece, piece_of
from leaven.distributed.pipeline import MicroBatch, Pipeline, stage_numbers
from leaven.distributed.process_group import AXES, SINGLE_PROCESS, ProcessGroup
from leaven.distributed.tensor_parallel import shard_tensors
from leaven.distributed.whole_matrices import WholeMatrices
from leaven.model.experts import MixtureOfExperts
from leaven.model.initialisation import fill
from leaven.model.kernels import norms, widened
from leaven.model.loss import ZLoss
from leaven.model.transformer import Stage, Transformer
from leaven.planning.stages import stage_layers
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import ParameterRow, ParameterTable

T = TypeVar("T")


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of the model, of which this process stores the whole or a block."""

    row: ParameterRow  # row of the parameter table: name, lr, init and so on
    piece: Piece  # the stored block, with its position in the parameter
    parameter: nn.Parameter  # the parameter of the model; a DTensor if it is sharded
    local: nn.Parameter  # the tensor that the optimizer updates: ``parameter`` or, if sharded, its local block


class ShardedModel:
    """This process's stages and parameters of a model. A single process has the whole model. ``dtype`` is that of
    matrix products; parameters are fp32. ``z_loss`` is the coefficient of the z-loss."""

    def __init__(
        self,
        shape: ModelShape,
        table: ParameterTable,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        group: ProcessGroup = SINGLE_PROCESS,
        z_loss: float = 0.0,
    ) -> None:
        self.layout, self.group, self.device = layout, group, device
        layers = stage_layers(shape, layout.pp * layout.stages_per_rank)
        self.stages = [
            build_stage(
                shape,
                table,
                (sum(layers[:number]), sum(layers[: number + 1])),
                layout=layout,
                dtype=dtype,
                device=device,
                group=group,
            )
            for number in stage_numbers(layout, group.rank_along("pp"))
        ]
        self.parameters: list[StoredParameter] = []
        with torch.no_grad():
            for stage in self.stages:
                for name, parameter in stage.model.named_parameters():
                    # Both the first and the last stage have a tied embedding; the first stage owns it.
                    piece = piece_of(name, parameter, owned=stage.begins or name != "embedding.weight")
                    local = parameter if piece.local is parameter else nn.Parameter(piece.local)
                    self.parameters.append(StoredParameter(table[name], piece, parameter, local))
        row_numbers = {row.name: number for number, row in enumerate(table.rows)}
        self.parameters.sort(key=lambda each: row_numbers[each.row.name])
        if device.type != "meta":  # meta tensors have no values
            initialise_pieces(self.pieces, table, seed)
        self.local_parameters = [each.local for each in self.parameters]
        self._table_rows = len(table.rows)
        self.row_numbers = torch.tensor([row_numbers[each.row.name] for each in self.parameters], device=device)
        self._owned = torch.tensor([each.piece.owned for each in self.parameters], device=device)
        self._pipeline = Pipeline(self.stages, layout, group, device) if layout.pp > 1 else None
        self._both_ends = _both_ends(group) if layout.pp > 1 and shape.tied_embeddings else None
        # All tensor-parallel ranks compute the same loss, so only the first counts it.
        self._counts_loss = self.stages[-1].ends and group.rank_along("tp") == 0
        self._z_loss = self.stages[-1].z_loss = ZLoss(z_loss) if z_loss else None

    @property
    def pieces(self) -> list[Piece]:
        return [each.piece for each in self.parameters]

    def schedulable(self, micro_batches: int) -> int:
        """Return ``micro_batches``, rounded up to a number that the pipeline's schedule supports."""
        return self._pipeline.schedulable(micro_batches) if self._pipeline else micro_batches

    def train(self, mode: bool) -> None:
        for stage in self.stages:
            stage.train(mode)

    def forward_backward(
        self,
        micro_batches: Iterable[MicroBatch],
        factor: Tensor | float,
        after_first: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run all micro-batches forward and backward, and add up the gradients. Return the sum of this process's
        losses. Losses and gradients are multiplied by ``factor``. ``after_first`` is called after the first
        micro-batch, but not with pipeline parallelism."""
        for stage in self.stages:
            stage.factor = factor
        if self._z_loss:
            self._z_loss.total = 0.0
        for mixture in self.mixtures.values():
            mixture.tally.load_E = mixture.tally.balance = 0.0
        if self._pipeline:
            loss = self._pipeline.forward_backward(list(micro_batches))
        else:
            stage, loss = self.stages[0], torch.zeros((), device=self.device)
            for last, (inputs, targets, documents) in _with_last(micro_batches):
                self._set_communication(last)
                part = stage(inputs, targets, documents)[0]
                part.backward()
                loss += part.detach()
                if after_first is not None:
                    after_first()
                    after_first = None
        self._gather_gradients()
        return loss

    @torch.no_grad()
    def forward(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """Return this process's summed loss in nats, a scalar. No gradients are computed."""
        self.train(False)
        for stage in self.stages:
            stage.factor = 1.0
        if self._pipeline:
            loss = self._pipeline.forward(list(micro_batches))
        else:
            losses = [widened(self.stages[0](*micro_batch)[0]) for micro_batch in micro_batches]
            loss = torch.stack(losses).sum()
        self.train(True)
        return loss

    def total(self, loss: Tensor) -> Tensor:
        """Return the total loss of all data-parallel ranks, in every process."""
        if self.group is SINGLE_PROCESS:
            return loss
        return self.group.all_reduce_(loss if self._counts_loss else torch.zeros_like(loss))

    def total_z_loss(self) -> Tensor | None:
        """Return the last step's z-loss in nats, summed over all tokens, or None for models without z-loss."""
        return self.total(torch.as_tensor(self._z_loss.total, device=self.device)) if self._z_loss else None

    @property
    def mixtures(self) -> dict[int, MixtureOfExperts]:
        """The mixtures of experts of this process, by the number of the layer in the whole model."""
        layers = (pair for stage in self.stages for pair in enumerate(stage.model.layers))
        mlps = ((layer, getattr(block, "mlp", None)) for layer, block in layers)
        return {layer: mlp for layer, mlp in mlps if isinstance(mlp, MixtureOfExperts)}

    def total_tally(self, tally: Tensor) -> Tensor:
        """Fill ``tally``, zeros (layers, experts + 1), with this step's router tallies over all processes, and return
        it: the tokens sent to each expert and, in the last column, the balance loss."""
        for layer, mixture in self.mixtures.items():
            tally[layer, :-1] += mixture.tally.load_E
            tally[layer, -1] += mixture.tally.balance
        return tally if self.group is SINGLE_PROCESS else self.group.all_reduce_(tally)

    def norms(self, *groups: Sequence[Tensor]) -> list[Tensor]:
        """Return 2-norms over all processes, one for each row of the parameter table, for each of ``groups``: local
        tensors, such as the gradients, of all ``local_parameters``."""
        mine = [norms(tensors) for tensors in groups]
        if self.group is SINGLE_PROCESS:
            return mine
        squares = torch.where(self._owned, torch.stack(mine).double() ** 2, 0)
        by_row = squares.new_zeros(len(groups), self._table_rows).index_copy_(1, self.row_numbers, squares)
        return list(self.group.all_reduce_(by_row).sqrt().to(mine[0].dtype))

    def gradient_norms(self) -> Tensor:
        """Return the 2-norms of the gradients, one for each row of the parameter table. The last backward pass must
        have reduced the gradients over the data-parallel ranks."""
        gradients = [each.parameter.grad for each in self.parameters]
        return self.norms([g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None])[0]

    def whole_matrices(self) -> WholeMatrices | None:
        if self.group is SINGLE_PROCESS:
            return None
        return WholeMatrices({each.row.name: each.parameter for each in self.parameters}, self.group)

    def drop_gathered(self) -> None:
        """Free gathered parameters, so that the next forward pass gathers the current values of all blocks."""
        for stage in self.stages:
            for unit in units(stage):
                unit.reshard()

    def drop_gradients(self) -> None:
        for each in self.parameters:
            each.parameter.grad = each.local.grad = None

    def _set_communication(self, last: bool) -> None:
        """Set what FSDP communicates after the next micro-batch. ``last``: it is the last micro-batch of the step."""
        zero, stage = self.layout.zero, self.stages[0]
        if units(stage):
            stage.set_requires_gradient_sync(last or zero >= 2)  # type: ignore[operator]
            stage.set_requires_all_reduce(last)  # type: ignore[operator]
            stage.set_reshard_after_backward(last or zero == 3)  # type: ignore[operator]

    def _gather_gradients(self) -> None:
        """Move gradients to ``local_parameters``. Sum a tied embedding's gradient over the first and last stage."""
        for each in self.parameters:
            if each.local is not each.parameter:
                grad = each.parameter.grad
                assert isinstance(grad, DTensor), f"{each.row.name} has no gradient"
                each.local.grad, each.parameter.grad = grad.to_local(), None
        tied = next((each for each in self.parameters if each.row.name == "embedding.weight"), None)
        if self._both_ends is not None and tied is not None:
            dist.all_reduce(tied.local.grad, group=self._both_ends)


def _with_last(items: Iterable[T]) -> Iterator[tuple[bool, T]]:
    """Yield (whether this is the last item, item)."""
    items = iter(items)
    for ahead in items:
        item = ahead
        for following in items:
            yield False, item
            item = following
        yield True, item


def _both_ends(group: ProcessGroup) -> dist.ProcessGroup | None:
    """Return the process group of the first and last rank of this process's pipeline, or None for another rank. All
    processes must make this call."""
    assert group.mesh is not None
    ranks = group.mesh.mesh
    pairs = torch.stack((ranks[0].flatten(), ranks[-1].flatten()), dim=1)
    mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        pairs.tolist()
    )[0]
    return mine


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
    """Build the stage with the layers ``layers[0]`` to ``layers[1] - 1``. Its parameters have no values yet."""
    first, last = layers
    with torch.device("meta"):
        model = Transformer(shape, table.multipliers, table.attention_scale, table.router_losses)
        stage = Stage(model, first, last, dtype, splits_backward=layout.schedule == "zero-bubble")
    if layout.tp > 1:
        assert group.mesh is not None
        shard_tensors(stage, group.mesh["tp"])
    distribute_experts(stage, group)
    if layout.recompute == "full":
        for block in stage.layers:
            forward = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = forward  # type: ignore[method-assign]
    if layout.compile:
        for block in stage.layers:
            # Experts are not compiled, because their numbers of rows change in every step.
            experts = isinstance(block.mlp, MixtureOfExperts)
            if layout.tp == 1 and not experts:
                block.compile()
                continue
            # FSDP's hooks on attention and MLP are not compiled, and a DTensor that passes through one of these hooks
            # inside a compiled block loses the layout of its gradient.
            for name in ("attention",) if experts else _MATRICES:
                module = getattr(block, name)
                module.forward = torch.compile(module.forward)
    if group.mesh is not None:
        shard(stage, group, layout.zero)
    stage.to_empty(device=device)
    return stage


def shard(stage: Stage, group: ProcessGroup, zero: int) -> None:
    """Shard parameters, gradients and optimizer states over the data-parallel ranks, as the ZeRO stage requires
    (Rajbhandari et al. 2020, arXiv 1910.02054).

    Parameters of attention, MLPs and experts are communicated in the compute dtype. All other parameters and all
    gradients are communicated in fp32. Gradients are summed, not averaged, because the loss is already divided by the
    tokens of all ranks.
    """
    assert group.mesh is not None
    mesh = replicas(group.mesh)
    lower = None if stage.dtype == torch.float32 else stage.dtype
    matrices = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False)
    others = MixedPrecisionPolicy(cast_forward_inputs=False)
    if lower is None:
        matrices = others
    for block in stage.layers:
        if isinstance(block.mlp, MixtureOfExperts):
            # The router chooses in fp32.
            fully_shard(block.mlp.router, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=others)
            if group.expert_mesh is not None:
                among = replicas(group.expert_mesh)
                fully_shard(block.mlp.experts, mesh=among, reshard_after_forward=zero == 3, mp_policy=matrices)
        for name in _MATRICES:
            fully_shard(getattr(block, name), mesh=mesh, reshard_after_forward=zero == 3, mp_policy=matrices)
    # The last stage also reads a tied embedding.
    if zero == 3 and stage.begins and not stage.model.shape.tied_embeddings:
        embedding = fully_shard(stage.model.embedding, mesh=mesh, reshard_after_forward=True, mp_policy=others)
        embedding.set_unshard_in_backward(False)  # the backward pass does not read the embedding
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=others)
    for unit in units(stage):
        # Sum gradients without dividing. Gloo cannot divide in the same operation.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data-parallel part of the mesh: ("replicate", "shard"), or only "shard" if there is one replica."""
    return mesh["replicate", "shard"] if mesh.size(AXES.index("replicate")) > 1 else mesh["shard"]


def units(stage: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP gathers and shards separately."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def initialise_pieces(pieces: list[Piece], table: ParameterTable, seed: int) -> None:
    """Fill the pieces of this process with the same initial values as in a run with a single process."""
    for piece in pieces:
        row = table[piece.name]
        fill(piece.local, row.name, row.init_mean, row.init_std, seed, shape=piece.shape, offset=piece.offset)
