"""Wraps functions of torch.distributed that are private or change between versions."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)

# torch 2.13 renames both functions.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

stage_backward = _backward.stage_backward  # unlike PipelineStage's method, this changes no FSDP settings


def all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, each (N, ...), concatenated in rank order: (ranks x N, ...)."""
    everything = mine.new_empty((dist.get_world_size(group) * len(mine), *mine.shape[1:]))
    _gather(everything, mine.contiguous(), group=group)
    return everything


def reduce_scatter(everything: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the tensors of all ranks: (ranks x N, ...). Return this rank's part of the sum: (N, ...)."""
    mine = everything.new_empty((len(everything) // dist.get_world_size(group), *everything.shape[1:]))
    _scatter(mine, everything, group=group)
    return mine


def reduce_with_backward(stage: FSDPModule, each: bool) -> None:
    """Let FSDP reduce a stage's gradients after every backward pass if ``each``, else once per step."""
    if hasattr(stage, "set_manual_backward_finalization"):  # from torch 2.15 on
        stage.set_manual_backward_finalization(not each)
    stage.set_is_last_backward(each)


def quiet_about_views() -> None:
    """Silence FSDP's warning about in-place operations on views. The model has no in-place operations."""
    warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module .* returned a view tensor")


def local_offset(tensor: DTensor) -> tuple[int, ...]:
    """Return the global index of the first element that this process stores."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def blocks(tensor: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (index of the first element, shape) of each rank's block of the tensor, in rank order."""
    mesh, found = tensor.device_mesh, []
    for coordinate in product(*(range(size) for size in mesh.shape)):
        shape, offset = _compute_local_shape_and_global_offset(
            tensor.shape, mesh.shape, list(coordinate), tensor.placements
        )
        found.append((tuple(offset), tuple(shape)))
    return found


def pretend(rank: int, size: int) -> None:
    """Initialise torch.distributed as if this were ``rank`` of ``size`` processes. Collectives then do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # part of torch's tests

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextmanager
def resizes_seen(on_resize: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """In the ``with`` block, call ``on_resize`` with every storage that FSDP resizes to allocate or free it."""
    resize = torch.UntypedStorage.resize_

    def seen(self: torch.UntypedStorage, size: int) -> Any:
        found = resize(self, size)
        on_resize(self)
        return found

    torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def shapes_apart(apart: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within the ``with`` block, enter the context ``apart()`` whenever DTensor infers shapes. DTensor then creates
    fake unsharded tensors, and ``apart`` can exclude them from a measurement of memory."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def outside(self: ShardingPropagator, schema: Any) -> Any:
        with apart():
            return propagate(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = outside  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
