"""The names of torch.distributed that it does not promise to keep, in one place; tests/distributed/test_compat.py
tests each."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import _backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Every rank's tensors one after the other, and their sums cut up again; torch 2.13 has other names for them.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

stage_backward = _backward.stage_backward  # of a stage's inputs, where torch's own would also set FSDP's ways


def all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensors (N, ...) of all ranks one after the other, (ranks x N, ...)."""
    everything = mine.new_empty((dist.get_world_size(group) * len(mine), *mine.shape[1:]))
    _gather(everything, mine.contiguous(), group=group)
    return everything


def reduce_scatter(everything: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part (N, ...) of the sum of all ranks' tensors (ranks x N, ...)."""
    mine = everything.new_empty((len(everything) // dist.get_world_size(group), *everything.shape[1:]))
    _scatter(mine, everything, group=group)
    return mine


def quiet_about_views() -> None:
    """A tensor-parallel module's output is a view of a DTensor. FSDP warns of in-place operations on views at each of
    them; there are none in the model."""
    warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module .* returned a view tensor")


def local_place(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of what this process holds of a tensor, and where in the whole it begins."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def pretend(rank: int, size: int) -> None:
    """Be one of so many processes, of which no other is there, to see what it would hold: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's tests are not for a training

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextmanager
def resizes_seen(told: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Say which storage has another size now: so FSDP gives up what it has gathered, and gets it again."""
    resize = torch.UntypedStorage.resize_

    def seen(self: torch.UntypedStorage, size: int) -> Any:
        found = resize(self, size)
        told(self)
        return found

    torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def shapes_apart(apart: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Do inside of ``apart()`` what a DTensor does to learn the shape of a result: the operation, on a fake of the
    whole tensor."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def outside(self: ShardingPropagator, schema: Any) -> Any:
        with apart():
            return propagate(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = outside  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
