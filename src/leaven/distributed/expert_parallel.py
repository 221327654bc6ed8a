"""Distributes the experts of a layer over the data-parallel ranks: tokens are sent to the ranks that store
their experts, and the outputs are sent back (Lepikhin et al. 2020, arXiv 2006.16668).

Tensor parallelism splits each expert as it splits an MLP. Only ranks with the same tensor-parallel
index exchange tokens.

Shape suffixes: P expert-parallel ranks, E experts of this rank, R rows, D d_model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Placement, Shard

from leaven.distributed.process_group import ProcessGroup
from leaven.distributed.tensor_parallel import Local
from leaven.model import kernels
from leaven.model.experts import MixtureOfExperts, copied_rows
from leaven.model.transformer import Stage


def distribute_experts(stage: Stage, group: ProcessGroup) -> None:
    """Distribute routed experts over expert- and tensor-parallel ranks. The stage must be on the meta device."""
    axes = [axis for axis in ("ep", "tp") if group.degree(axis) > 1]
    mesh = group.expert_mesh or group.mesh
    for block in stage.layers:
        if axes and isinstance(block.mlp, MixtureOfExperts):
            assert mesh is not None
            inner, outer = ({"ep": Shard(0), "tp": Shard(dim)} for dim in (1, 2))
            placements: dict[str, list[Placement]] = {
                f"{name}.weight": [(outer if name == "out" else inner)[axis] for axis in axes]
                for name, _ in block.mlp.experts.named_children()
            }
            experts = Local(placements)._apply(block.mlp.experts, mesh[tuple(axes)])
            if "ep" in axes:
                experts.forward = ExpertExchange(experts.forward, mesh.get_group("ep"))


class ExpertExchange:
    """Computes the experts of this rank, with the arguments of :meth:`leaven.model.experts.RoutedExperts.forward`,
    for the rows of all ranks of ``group``. Rank r stores the r-th part of all experts."""

    def __init__(self, experts: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup) -> None:
        self.experts, self.group = experts, group

    def __call__(self, x_RD: Tensor, load: Tensor) -> Tensor:
        """Return the experts' outputs (R, D) for the rows ``x_RD``. The rows must be sorted by expert. ``load``
        counts rows for each expert of the group."""
        to_PE = load.view(dist.get_world_size(self.group), -1)
        from_PE = torch.empty_like(to_PE)
        dist.all_to_all_single(from_PE, to_PE, group=self.group)
        rows = kernels.on_host(torch.stack((to_PE.sum(1), from_PE.sum(1))).flatten(), 2 * len(x_RD))
        to, of = rows[: len(to_PE)], rows[len(to_PE) :]
        x_RD = exchanged(x_RD, of, to, self.group)
        # Rows arrive by rank, and within a rank by expert.
        expert_R = torch.arange(to_PE.shape[1], device=load.device).repeat(len(to_PE))
        expert_R = expert_R.repeat_interleave(from_PE.flatten(), output_size=len(x_RD))
        by_expert_R = expert_R.argsort(stable=True)
        place_R = by_expert_R.argsort()
        y_RD = self.experts(copied_rows(x_RD, by_expert_R, place_R), from_PE.sum(0))
        y_RD = copied_rows(y_RD, place_R, by_expert_R)
        return exchanged(y_RD, to, of, self.group)


def exchanged(x_RD: Tensor, of: list[int], to: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``to[r]`` rows to each rank r of ``group`` and receive ``of[r]`` rows from it. Both ``x_RD`` and the
    result have the rows in the order of ranks."""
    y_RD: Tensor = _Exchange.apply(x_RD, of, to, group)  # type: ignore[no-untyped-call]
    return y_RD


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, of: list[int], to: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = to, of, group
        return _sent(x_RD, of, to, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:
        return _sent(g_RD, *ctx.arguments), None, None, None


def _sent(x_RD: Tensor, of: list[int], to: list[int], group: dist.ProcessGroup) -> Tensor:
    y_RD = x_RD.new_empty(sum(of), x_RD.shape[1])
    dist.all_to_all_single(y_RD, x_RD.contiguous(), of, to, group=group)
    return y_RD
