"""The part of a tensor that a process holds. Every element is owned by exactly one process of a run.

Norms are sums over owned elements, and checkpoints contain these: no layout counts or writes an element twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from leaven.distributed.compat import local_place


@dataclass(frozen=True)
class Place:
    """The position of a block in a whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # of the block's first element


@dataclass(frozen=True)
class Piece:
    """The block of a tensor that this process holds."""

    name: str  # of the parameter
    local: Tensor  # the block; shares its memory with the model
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # of the block's first element in it
    owned: bool = True  # whether this process counts and saves the block

    @property
    def whole(self) -> bool:
        """Whether the block is the whole tensor."""
        return tuple(self.local.shape) == self.shape

    @property
    def place(self) -> Place:
        """The position of the block."""
        return Place(self.shape, self.offset)


def piece_of(name: str, tensor: Tensor, owned: bool = True) -> Piece:
    """Return this process's piece of a tensor. Of replicas, the first on each axis of the mesh owns it."""
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), owned)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process holds nothing of it"
    first = all(place == 0 for place, how in zip(coordinate, placements, strict=True) if isinstance(how, Replicate))
    _, offset = local_place(tensor)
    return Piece(name, tensor.to_local(), tuple(tensor.shape), offset, owned and first)


def whole(model: nn.Module) -> list[Piece]:
    """Return this process's pieces of a model's parameters."""
    return [piece_of(name, parameter) for name, parameter in model.named_parameters()]


def cut(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return a view of the block of ``shape`` at ``offset``."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length) if length else tensor.narrow(dim, 0, 0)
    return tensor
