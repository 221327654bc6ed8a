"""Applies a function to whole matrices that are sharded over processes.

Each matrix has an owner process. The owner receives the matrix, applies the function, and sends the
blocks of the result back. A process owns at most one matrix at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaven.distributed.compat import blocks
from leaven.distributed.pieces import cut
from leaven.distributed.process_group import ProcessGroup

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""The index of a block's first element in the whole matrix, and the shape of the block."""


@dataclass(frozen=True)
class SplitMatrix:
    """A matrix whose blocks are stored by the processes of a group."""

    shape: tuple[int, ...]  # of the whole matrix
    blocks: Sequence[Block]  # the block of each rank of the group; several ranks may store the same block

    def senders(self, owner: int) -> dict[int, Block]:
        """Return the blocks that together make the matrix for ``owner``, by the rank that sends them. If several
        ranks have the same block, only one sends it: ``owner`` if it has the block, else the lowest rank."""
        first: dict[Block, int] = {}
        for rank in (owner, *range(len(self.blocks))):
            first.setdefault(self.blocks[rank], rank)
        return {rank: block for block, rank in first.items()}


class WholeMatrices:
    """Gathers matrices that are sharded over the processes of a pipeline rank, and applies functions to them. These
    processes must call :meth:`map` together."""

    def __init__(self, parameters: dict[str, Tensor], group: ProcessGroup) -> None:
        """Prepare the sharded ones of ``parameters``, given by name. All processes must call this together."""
        assert group.mesh is not None
        ranks = group.mesh.mesh.flatten(1)  # by pipeline rank
        self._group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            ranks.tolist()
        )[0]
        self._rank, self._size = dist.get_rank(self._group), ranks.shape[1]
        self._matrices = {
            name: SplitMatrix(tuple(parameter.shape), blocks(parameter))
            for name, parameter in parameters.items()
            if isinstance(parameter, DTensor)
        }

    def map(
        self, function: Callable[[Tensor], Tensor], names: Iterable[str], mine: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """Apply ``function``, which keeps shape and dtype, to the matrix of each name. ``mine`` has this process's
        block of each matrix. Yield this process's block of each result."""
        pairs = zip(names, mine, strict=True)
        while some := list(islice(pairs, self._size)):
            yield from self._round(function, [self._matrices[name] for name, _ in some], [block for _, block in some])

    def _round(
        self, function: Callable[[Tensor], Tensor], matrices: Sequence[SplitMatrix], mine: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield this process's block of ``function(matrix)`` for each of ``matrices``, at most one for each rank:
        rank r collects the blocks of ``matrices[r]`` and applies ``function``."""
        rank, size = self._rank, self._size
        sent = [
            block if rank in matrix.senders(r) else block[:0]
            for r, (matrix, block) in enumerate(zip(matrices, mine, strict=True))
        ]
        owned = matrices[rank] if rank < len(matrices) else SplitMatrix((0, 0), [((0, 0), (0, 0))] * size)
        senders = owned.senders(rank)
        received = self._exchange(sent, [senders[r][1] if r in senders else (0, 0) for r in range(size)])
        whole = mine[0].new_empty(owned.shape)
        for r, (offset, shape) in senders.items():
            cut(whole, offset, shape).copy_(received[r])
        result = function(whole) if rank < len(matrices) else whole
        back = [cut(result, *block) for block in owned.blocks]
        return iter(self._exchange(back, [tuple(block.shape) for block in mine])[: len(mine)])

    def _exchange(self, sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """For each rank r, send ``sent[r]`` to it, and receive a matrix of shape ``shapes[r]`` from it. Return the
        received matrices. Both lists may be shorter than the group; the ranks without an entry exchange nothing."""

        def sizes(elements: Iterable[int]) -> list[int]:
            found = list(elements)
            return found + [0] * (self._size - len(found))

        outgoing = sizes(matrix.numel() for matrix in sent)
        incoming = sizes(torch.Size(shape).numel() for shape in shapes)
        flat = torch.cat([matrix.reshape(-1) for matrix in sent])
        received = flat.new_empty(sum(incoming))
        dist.all_to_all_single(received, flat, incoming, outgoing, group=self._group)
        return [part.view(shape) for part, shape in zip(torch.split(received, incoming), shapes, strict=False)]
