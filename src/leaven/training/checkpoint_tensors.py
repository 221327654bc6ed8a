"""Tensors in the files of a checkpoint, whole or in blocks: any part of any of them, without the rest."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from leaven.distributed.pieces import Piece, cut

Span = tuple[int, int]


@dataclass(frozen=True)
class SavedBlock:
    """A part of a tensor, of ``shape`` and from ``offset`` on, in a file under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return _spans(self.offset, self.shape)


@dataclass(frozen=True)
class SavedTensor:
    """Where a tensor is. ``dtype`` is torch's name for it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[SavedBlock, ...]

    def to_json(self) -> dict[str, Any]:
        blocks = [[block.file, block.offset, block.shape] for block in self.blocks]
        return {"dtype": self.dtype, "shape": self.shape, "blocks": blocks}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SavedTensor":
        blocks = tuple(SavedBlock(file, tuple(offset), tuple(shape)) for file, offset, shape in values["blocks"])
        return cls(values["dtype"], tuple(values["shape"]), blocks)


def merged(parts: Sequence[Mapping[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Whole tensors from what each process has written of them.

    Raises:
        ValueError: naming a tensor of which an element is in no file, or in two, or whose blocks are of different
            tensors.
    """
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
                raise ValueError(f"{name}: its blocks are of different tensors, {there}")
        blocks = tuple(block for each in pieces for block in each.blocks)
        fault = _fault(tuple(block.spans for block in blocks), first.shape)
        if fault:
            raise ValueError(f"{name}: {fault}")
        whole[name] = replace(first, blocks=blocks)
    return whole


@lru_cache(1024)  # many tensors are cut alike
def _fault(blocks: tuple[tuple[Span, ...], ...], shape: tuple[int, ...]) -> str | None:
    """Why blocks do not make up a tensor."""
    for block in blocks:
        if len(block) != len(shape) or not all(
            0 <= a <= b <= most for (a, b), most in zip(block, shape, strict=True)
        ):
            return f"a block of it, {block}, is not within {shape}"
    times = _times(blocks, shape)
    return None if times <= {1} else f"a part of it is owned {'by nobody' if 0 in times else 'twice'}"


def _times(blocks: Sequence[Sequence[Span]], shape: Sequence[int]) -> set[int]:
    """How many blocks an element of a tensor is in: every number that there is."""
    if not shape:
        return {len(blocks)}
    edges = sorted({0, shape[0], *(edge for block in blocks for edge in block[0])})
    number = {edge: at for at, edge in enumerate(edges)}
    slabs: list[list[Sequence[Span]]] = [[] for _ in edges]
    for (start, end), *rest in blocks:
        for at in range(number[start], number[end]):
            slabs[at].append(rest)
    return set().union(*(_times(slab, shape[1:]) for slab in slabs[:-1]))


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, read when they are asked for. What is given may be a view of a file: copy it before writing
    to it. Files are opened when something of them is needed, and stay readable from then on, though deleted."""

    def __init__(self, folder: Path, saved: Mapping[str, SavedTensor]) -> None:
        self._folder, self._saved = folder, saved
        self._files: dict[str, Any] = {}

    @classmethod
    def of_file(cls, path: Path) -> "Tensors":
        """All that are in a file, whole."""
        saved: dict[str, SavedTensor] = {}
        tensors = cls(path.parent, saved)
        file = tensors._opened(path.name)
        for name in file.keys():  # noqa: SIM118  # no mapping
            tensor = file.get_tensor(name)
            shape = tuple(tensor.shape)
            saved[name] = SavedTensor(dtype_name(tensor), shape, (SavedBlock(path.name, (0,) * len(shape), shape),))
        return tensors

    def __getitem__(self, name: str) -> Tensor:
        shape = self._saved[name].shape
        return self.piece(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __contains__(self, name: object) -> bool:
        return name in self._saved  # that of Mapping would read it

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._saved[name].shape

    def piece(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block of ``shape`` from ``offset`` on; nothing else is read, nor held in memory."""
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
            self._files[file] = safe_open(self._folder / file, "pt")
        return self._files[file]


def part(tensors: Mapping[str, Tensor], name: str, piece: Piece) -> Tensor:
    """What of a tensor goes with a piece of a parameter; a number (), which goes with all of it, is whole."""
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
    """What two blocks share; its size is 0 if that is nothing."""
    both = zip(one, other, strict=True)
    return tuple((max(a, b), max(a, b, min(c, d))) for (a, c), (b, d) in both)


def _size(spans: Sequence[Span]) -> int:
    return math.prod(end - start for start, end in spans)
