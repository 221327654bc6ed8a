"""What of a tensor a process holds: every element is owned by exactly one process of a run.

Norms are sums over what is owned, and checkpoints are made of it: no layout counts or writes an element twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from leaven.distributed.compat import local_place


@dataclass(frozen=True)
class Place:
    """Where a block lies: from ``offset`` on in a tensor of ``shape``."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A block of a tensor of ``shape`` from ``offset`` on. ``local`` shares its memory with what the model computes
    with; ``owned``: no other process counts or saves it."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owned: bool = True

    @property
    def whole(self) -> bool:
        return tuple(self.local.shape) == self.shape

    @property
    def place(self) -> Place:
        return Place(self.shape, self.offset)


def piece_of(name: str, tensor: Tensor, owned: bool = True) -> Piece:
    """What this process holds of a tensor. Of replicas, the first on each axis of the mesh owns."""
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), owned)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process holds nothing of it"
    first = all(place == 0 for place, how in zip(coordinate, placements, strict=True) if isinstance(how, Replicate))
    _, offset = local_place(tensor)
    return Piece(name, tensor.to_local(), tuple(tensor.shape), offset, owned and first)


def whole(model: nn.Module) -> list[Piece]:
    """The parameters of a model, or what this process holds of them."""
    return [piece_of(name, parameter) for name, parameter in model.named_parameters()]


def cut(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The block of ``shape`` from ``offset`` on, a view."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length) if length else tensor.narrow(dim, 0, 0)
    return tensor
