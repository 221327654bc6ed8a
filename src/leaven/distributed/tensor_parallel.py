"""Splits each module over tensor-parallel ranks, and computes the loss over slices of the vocabulary.
Routed experts are split in :mod:`leaven.distributed.expert_parallel`.

This is tensor parallelism with sequence parallelism (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti
et al. 2022, arXiv 2205.05198). Matrices whose output is heads or d_ff are split by output. Matrices
whose input is heads or d_ff are split by input. The embedding and the unembedding are split by the
vocabulary.

Between these modules, every rank has a part of the sequence. Before attention, MLP and unembedding,
these parts are all-gathered. The outputs of embedding, attention and MLP are reduce-scattered.
"""

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

from leaven.distributed.compat import all_gather, quiet_about_views, reduce_scatter
from leaven.model.experts import MixtureOfExperts
from leaven.model.loss import IGNORED, WholeVocabulary, ZLoss, cross_entropy
from leaven.model.transformer import Stage

SEQUENCE = 1  # the dimension T of (B, T, D)


class PositionTable(ParallelStyle):
    """The parallel style of learned positions. Each rank has the whole table and returns rows for its positions."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def stretch(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.redistribute(mesh, [Shard(output.dim() - 2)]).to_local()

        return distribute_module(module, mesh, input_fn=whole, output_fn=stretch)


class VocabularySlice(ParallelStyle):
    """The parallel style of an embedding. Each rank has a slice of the vocabulary, and returns the embeddings of its
    part of the sequence. torch's own style would allocate a gradient of the whole vocabulary on every rank."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
        first = mesh.get_local_rank() * (module.num_embeddings // mesh.size())

        def forward(tokens_BT: Tensor) -> Tensor:
            table_VD: Tensor = module.weight.to_local()  # type: ignore[attr-defined]
            place_BT = tokens_BT - first
            others_BT = (place_BT < 0) | (place_BT >= len(table_VD))
            x_BTD = F.embedding(place_BT.masked_fill(others_BT, 0), table_VD).masked_fill(others_BT[..., None], 0)
            whole = DTensor.from_local(x_BTD, mesh, [Partial()], run_check=False)
            stretch_BtD: Tensor = whole.redistribute(mesh, [Shard(SEQUENCE)]).to_local()
            return stretch_BtD

        module.forward = forward  # type: ignore[method-assign, assignment]
        return module


class Local(ParallelStyle):
    """A parallel style: each rank computes the module with plain tensors, from its own parts of the parameters, which
    ``placements`` defines by name. Gradients of replicated parameters are summed over the ranks. Norms use this
    style, because torch's ``SequenceParallel`` needs much memory on a CPU."""

    def __init__(self, placements: Mapping[str, Sequence[Placement]]) -> None:
        self.placements = placements

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        alone, summed = deepcopy(module), {}
        for name, parameter in list(module.named_parameters()):
            placements = self.placements[name]
            inside, _, last = name.rpartition(".")
            distributed = nn.Parameter(distribute_tensor(parameter, mesh, placements))
            module.get_submodule(inside).register_parameter(last, distributed)
            summed[name] = [Partial() if how.is_replicate() else how for how in placements]

        def forward(*inputs: Tensor) -> Any:
            own = {
                name: parameter.to_local(grad_placements=summed[name])  # type: ignore[attr-defined]
                for name, parameter in module.named_parameters()
            }
            return functional_call(alone, own, inputs)

        module.forward = forward
        return module


REPLICATED = Local({"weight": [Replicate()], "bias": [Replicate()]})


class LocalBranch(ParallelStyle):
    """The parallel style of a branch that computes on plain tensors. Ranks hold parts of the sequence: the branch's
    input is all-gathered over the sequence, and its output is reduce-scattered."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gathered(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BtD = DTensor.from_local(inputs[0], mesh, [Shard(SEQUENCE)], run_check=False)
            x_BTD = x_BtD.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            return (x_BTD, *inputs[1:])

        def scattered(_: nn.Module, __: Any, y_BTD: Tensor) -> Tensor:
            y_BTD = DTensor.from_local(y_BTD, mesh, [Partial()], run_check=False)
            return y_BTD.redistribute(mesh, [Shard(SEQUENCE)]).to_local()

        module.register_forward_pre_hook(gathered)
        module.register_forward_hook(scattered)
        return module


def _gathered_first(arguments: int) -> ParallelStyle:
    rest = (None,) * (arguments - 1)
    return PrepareModuleInput(input_layouts=(Shard(SEQUENCE), *rest), desired_input_layouts=(Replicate(), *rest))


BLOCK: dict[str, ParallelStyle] = {
    "norm.attention": REPLICATED,
    "attention": _gathered_first(3),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
    "norm.query": REPLICATED,
    "norm.key": REPLICATED,
    "norm.attention_out": REPLICATED,
    "norm.mlp": REPLICATED,
    "norm.mlp_out": REPLICATED,
}

MLP: dict[str, ParallelStyle] = {
    "mlp": _gathered_first(1),
    "mlp.gate": ColwiseParallel(),
    "mlp.in": ColwiseParallel(),
    "mlp.out": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
}

# In place of MLP in a block with experts. The routed experts are split by leaven.distributed.expert_parallel.
MIXTURE: dict[str, ParallelStyle] = {
    "mlp": LocalBranch(),
    "mlp.router": REPLICATED,
    "mlp.shared": Local({"gate.weight": [Shard(0)], "in.weight": [Shard(0)], "out.weight": [Shard(1)]}),
}

ENDS: dict[str, ParallelStyle] = {
    "embedding": VocabularySlice(),
    "positions": PositionTable(),
    "norm.embedding": REPLICATED,
    "norm.final": REPLICATED,
    "unembedding": ColwiseParallel(),  # splits the rows, that is, the vocabulary, as the loss expects
}


def shard_tensors(stage: Stage, mesh: DeviceMesh) -> None:
    """Split the modules of a stage over tensor-parallel ranks. The stage must be on the meta device."""
    quiet_about_views()
    model = stage.model
    per_head = Local({"weight": [Shard(0)]})
    by_head = dict.fromkeys(("norm.query", "norm.key"), per_head) if model.shape.qk_norm_per_head else {}
    for block in stage.layers:
        if isinstance(block.mlp, MixtureOfExperts):
            _apply(block, mesh, BLOCK | MIXTURE | by_head)
            block.mlp.counts_losses = mesh.get_local_rank() == 0
        else:
            _apply(block, mesh, BLOCK | MLP | by_head)
        if model.shape.positions == "alibi":
            _slice_bias(block, mesh)
    _apply(model, mesh, ENDS)
    stage.loss = partial(sharded_cross_entropy, group=mesh.get_group())


def _apply(module: nn.Module, mesh: DeviceMesh, table: dict[str, ParallelStyle]) -> None:
    there = dict(module.named_modules())
    parallelize_module(module, mesh, {name: style for name, style in table.items() if name in there})


def _slice_bias(block: nn.Module, mesh: DeviceMesh) -> None:
    """Make a block's attention use the slice of the ALiBi masks that belongs to this rank's heads."""

    def mine(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, norm, positions = arguments
        sliced = copy(positions)
        sliced.masks = {
            window: mask_HTT.chunk(mesh.size(), dim=-3)[mesh.get_local_rank()]
            for window, mask_HTT in positions.masks.items()
        }
        return x, norm, sliced

    block.attention.register_forward_pre_hook(mine)  # type: ignore[union-attr]


def sharded_cross_entropy(
    hidden_BtD: Tensor, weight: DTensor, targets_BT: Tensor, *, group: dist.ProcessGroup, **how: Any
) -> Tensor:
    """Return the result of :func:`leaven.model.loss.cross_entropy` for the tokens of all ranks, on every rank.

    ``hidden_BtD`` has this rank's positions, ``targets_BT`` all positions. ``weight`` is the unembedding, sharded by
    rows. ``how`` has further arguments of ``cross_entropy``. For each token, ranks exchange only the maximum, the
    normaliser and the target's logit.
    """
    # Each rank has consecutive positions, so the gathered order is (rank, B, t).
    targets_BRt = targets_BT.view(len(targets_BT), dist.get_world_size(group), -1)
    vocabulary = SlicedVocabulary(group)
    return cross_entropy(hidden_BtD, weight.to_local(), targets_BRt.transpose(0, 1), vocabulary=vocabulary, **how)


@dataclass(frozen=True)
class SlicedVocabulary(WholeVocabulary):
    """Computes the loss of a chunk of tokens when each rank has a slice of the vocabulary."""

    group: dist.ProcessGroup

    def gather(self, hidden_ND: Tensor) -> Tensor:
        return all_gather(hidden_ND, self.group)

    def scatter(self, grad_ND: Tensor) -> Tensor:
        return reduce_scatter(grad_ND, self.group)  # each rank has the gradient from its slice of the vocabulary

    def loss(
        self, logits_nV: Tensor, targets_n: Tensor, weight: Tensor, learns: bool, z_loss: ZLoss | None = None
    ) -> tuple[Tensor, Tensor | None]:
        compute, size = logits_nV.dtype, logits_nV.shape[1]
        logits_nV = logits_nV.to(weight.dtype)
        highest_n = logits_nV.amax(-1)
        dist.all_reduce(highest_n, dist.ReduceOp.MAX, self.group)
        # The target's logit is on one rank; the others add 0.
        place_n1 = (targets_n - dist.get_rank(self.group) * size)[:, None]
        mine_n1 = (place_n1 >= 0) & (place_n1 < size)
        place_n1 = place_n1.clamp(0, size - 1)
        target_n = torch.where(mine_n1, logits_nV.gather(1, place_n1), 0)[:, 0]
        p_nV = logits_nV.sub_(highest_n[:, None]).exp_()  # in place: logits are by far the largest tensors
        sums_2n = torch.stack((p_nV.sum(-1), target_n))
        dist.all_reduce(sums_2n, group=self.group)
        normaliser_n, target_n = sums_2n
        counts_n = targets_n != IGNORED
        log_z_n = normaliser_n.log() + highest_n
        loss = torch.where(counts_n, log_z_n - target_n, 0).sum()
        if not learns:
            return loss, None
        if z_loss is not None:
            normaliser_n = normaliser_n / z_loss.add(log_z_n, counts_n)
        g_nV = p_nV.div_(normaliser_n[:, None]).scatter_add_(1, place_n1, -mine_n1.to(weight.dtype))
        return loss, g_nV.mul_((counts_n * weight)[:, None]).to(compute)
