"""Reads any part of a tensor from the files of a checkpoint. A file contains whole tensors or blocks of tensors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from leaven import storage
from leaven.distributed.pieces import Piece, cut

Span = tuple[int, int]


@dataclass(frozen=True)
class SavedBlock:
    """A block of a tensor, as stored in a file. The file stores the block under the name of the whole tensor."""

    file: str  # name of the file in the folder of the checkpoint
    offset: tuple[int, ...]  # of the block's first element in the whole tensor
    shape: tuple[int, ...]  # of the block

    @property
    def spans(self) -> tuple[Span, ...]:
        return _spans(self.offset, self.shape)


@dataclass(frozen=True)
class SavedTensor:
    """The location of a tensor in the files of a checkpoint."""

    dtype: str  # name of the dtype in torch, such as "float32"
    shape: tuple[int, ...]  # of the whole tensor
    blocks: tuple[SavedBlock, ...]  # the parts of the tensor, each with its file

    def to_json(self) -> dict[str, Any]:
        blocks = [[block.file, block.offset, block.shape] for block in self.blocks]
        return {"dtype": self.dtype, "shape": self.shape, "blocks": blocks}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SavedTensor":
        blocks = tuple(SavedBlock(file, tuple(offset), tuple(shape)) for file, offset, shape in values["blocks"])
        return cls(values["dtype"], tuple(values["shape"]), blocks)


def merged(parts: Sequence[Mapping[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Return the whole tensors by name. ``parts`` has the blocks that each process has written. Raise ValueError if
    the blocks of a tensor overlap, leave a gap, or disagree about its dtype or shape."""
    found: dict[str, list[SavedTensor]] = {}
    for part in parts:
        for name, saved in part.items():
            found.setdefault(name, []).append(saved)
    whole = {}
    for name, pieces in found.items():
        first, *others = pieces
        for other in others:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                there = " and ".join(f"{each.dtype} {each.shape}" for each in (first, other))
                raise ValueError(f"{name}: the blocks of this tensor differ in dtype or shape: {there}")
        blocks = tuple(block for each in pieces for block in each.blocks)
        if fault := _fault(tuple(block.spans for block in blocks), first.shape):
            raise ValueError(f"{name}: {fault}")
        whole[name] = replace(first, blocks=blocks)
    return whole


@lru_cache(1024)  # many tensors are split the same way
def _fault(blocks: tuple[tuple[Span, ...], ...], shape: tuple[int, ...]) -> str | None:
    """Return why the blocks do not form a whole tensor, or None if they do. The block edges form a grid, and
    each cell must be in exactly one block."""
    for block in blocks:
        if len(block) != len(shape) or not all(
            0 <= a <= b <= most for (a, b), most in zip(block, shape, strict=True)
        ):
            return f"block {block} is not within {shape}"
    edges = [sorted({0, most}.union(*(block[dim] for block in blocks))) for dim, most in enumerate(shape)]
    cell_at = [{edge: cell for cell, edge in enumerate(along)} for along in edges]
    count = np.zeros([len(along) - 1 for along in edges], np.int32)
    for block in blocks:
        count[tuple(slice(cell[a], cell[b]) for cell, (a, b) in zip(cell_at, block, strict=True))] += 1
    if (count > 1).any():
        return "a part of this tensor is saved twice"
    return "a part of this tensor is saved by no process" if (count == 0).any() else None


class Tensors(Mapping[str, Tensor]):
    """A mapping from names to tensors, which are read on access. Copy a tensor before you write to it."""

    def __init__(self, folder: Path, saved: Mapping[str, SavedTensor]) -> None:
        self._folder, self._saved = folder, saved
        self._files: dict[str, Any] = {}

    @classmethod
    def of_file(cls, path: Path) -> "Tensors":
        """Return the tensors of a file that contains only whole tensors."""
        saved: dict[str, SavedTensor] = {}
        tensors = cls(path.parent, saved)
        file = tensors._opened(path.name)
        for name in file.keys():  # noqa: SIM118  # not a mapping
            tensor = file.get_tensor(name)
            shape = tuple(tensor.shape)
            saved[name] = SavedTensor(dtype_name(tensor), shape, (SavedBlock(path.name, (0,) * len(shape), shape),))
        return tensors

    def require_whole(self, files: Sequence[str], headers: Sequence[str]) -> None:
        """Raise ValueError if a recorded shape, offset or dtype is invalid, if a block is in none of ``files`` or not
        as recorded in one of ``headers``, which are opened, or if a tensor's blocks do not form the whole tensor."""
        known, compared = set(files), set(headers)
        for name, saved in self._saved.items():
            lengths = [*saved.shape, *(length for block in saved.blocks for length in (*block.offset, *block.shape))]
            if not all(type(length) is int and length >= 0 for length in lengths):
                raise ValueError(f"{name}: a shape or an offset is not a whole number")
            if not isinstance(getattr(torch, saved.dtype, None), torch.dtype):
                raise ValueError(f"{name}: {saved.dtype} is not a dtype of torch")
            if fault := _fault(tuple(block.spans for block in saved.blocks), saved.shape):
                raise ValueError(f"{name}: {fault}")
            for block in saved.blocks:
                if block.file not in known:
                    raise ValueError(f"{name}: {block.file} is no file of this checkpoint")
                if block.file in compared:
                    there = self._opened(block.file).get_tensor(name)  # a view of the file, so nothing is read
                    if (dtype_name(there), tuple(there.shape)) != (saved.dtype, block.shape):
                        raise ValueError(f"{name}: its dtype or shape in {block.file} is not the recorded one")

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless all tensors named in ``shapes`` exist, in fp32 or fp64, with these shapes."""
        for name, shape in shapes.items():
            saved = self._saved.get(name)
            if saved is None or saved.dtype not in {"float32", "float64"} or saved.shape != shape:
                there = "missing" if saved is None else f"{saved.dtype} {saved.shape}"
                raise ValueError(f"{name}: {there}, but the recipe needs float32 {shape}")

    def __getitem__(self, name: str) -> Tensor:
        shape = self._saved[name].shape
        return self.piece(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __contains__(self, name: object) -> bool:
        return name in self._saved  # Mapping's own would read the tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._saved[name].shape

    def piece(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the block of a tensor that begins at ``offset`` and has the shape ``shape``."""
        saved, wanted = self._saved[name], _spans(offset, shape)
        assert len(wanted) == len(saved.shape), f"{name} is {saved.shape}, not {tuple(shape)}"
        assert all(0 <= start <= end <= length for (start, end), length in zip(wanted, saved.shape, strict=True))
        parts = [(block, _common(wanted, block.spans)) for block in saved.blocks]
        for block, common in parts:
            if common == wanted:
                return self._read(name, block, common)
        found = torch.empty(tuple(shape), dtype=getattr(torch, saved.dtype))
        for block, common in parts:
            if _size(common):
                at = tuple(start - first for (start, _), (first, _) in zip(common, wanted, strict=True))
                cut(found, at, tuple(end - start for start, end in common)).copy_(self._read(name, block, common))
        return found

    def _read(self, name: str, block: SavedBlock, spans: Sequence[Span]) -> Tensor:
        file = self._opened(block.file)
        if tuple(spans) == block.spans:
            whole: Tensor = file.get_tensor(name)
            return whole
        slices = [slice(start - first, end - first) for (start, end), first in zip(spans, block.offset, strict=True)]
        part: Tensor = file.get_slice(name)[tuple(slices)]
        return part

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            storage.require_file(self._folder / file)
            try:
                self._files[file] = safe_open(self._folder / file, "pt")
            except RuntimeError as error:  # torch opens the file a second time, and it may have been removed
                raise OSError(str(error)) from None
        return self._files[file]


def part(tensors: Mapping[str, Tensor], name: str, piece: Piece) -> Tensor:
    """Return the part of a saved tensor that ``piece`` describes. A scalar is returned whole."""
    if isinstance(tensors, Tensors):
        if not tensors.shape(name):
            return tensors[name]
        return tensors.piece(name, piece.offset, piece.local.shape)
    return cut(tensors[name], piece.offset, piece.local.shape) if tensors[name].dim() else tensors[name]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spans(offset: Sequence[int], shape: Sequence[int]) -> tuple[Span, ...]:
    return tuple((start, start + length) for start, length in zip(offset, shape, strict=True))


def _common(one: Sequence[Span], other: Sequence[Span]) -> tuple[Span, ...]:
    """Return the intersection of two blocks. Its size is 0 if they do not overlap."""
    both = zip(one, other, strict=True)
    return tuple((max(a, b), max(a, b, min(c, d))) for (a, c), (b, d) in both)


def _size(spans: Sequence[Span]) -> int:
    return math.prod(end - start for start, end in spans)
