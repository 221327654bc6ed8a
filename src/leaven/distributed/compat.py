"""The names of torch.distributed that it does not promise to keep, in one place; tests/distributed/test_compat.py
tests each."""

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_place(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of what this process holds of a tensor, and where in the whole it begins."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)
