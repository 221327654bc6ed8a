"""Describes a piece: the block of a tensor that a process stores.

Several processes may store the same element, but exactly one owns it. Norms and checkpoints use only owned elements.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from leaven.distributed.compat import local_offset


@dataclass(frozen=True)
class Place:
    shape: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]  # index of the block's first element in the whole tensor


@dataclass(frozen=True)
class Piece:
    name: str  # name of the parameter
    local: Tensor  # the block; shares its memory with the model
    shape: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]  # index of the block's first element in the whole tensor
    owned: bool = True  # whether this process counts the block in norms and saves it in checkpoints

    @property
    def whole(self) -> bool:
        return tuple(self.local.shape) == self.shape


def piece_of(name: str, tensor: Tensor, owned: bool = True) -> Piece:
    """Return the block of a tensor that this process stores. A plain tensor is one block. If several processes store
    the same block, only the first can own it. With ``owned=False``, none does."""
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), owned)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process is not in the mesh of the tensor"
    first = all(place == 0 for place, how in zip(coordinate, placements, strict=True) if isinstance(how, Replicate))
    return Piece(name, tensor.to_local(), tuple(tensor.shape), local_offset(tensor), owned and first)


def cut(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return a view of the block of ``tensor`` that begins at ``offset`` and has the given shape."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length) if length else tensor.narrow(dim, 0, 0)
    return tensor
