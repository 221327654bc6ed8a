"""A model over the processes of a run, as the training sees it: the same in every layout.

Optimiser, clipping and norms work on the pieces that a process holds, as plain tensors. A norm is the root of a sum
of squares over pieces that are owned, over all processes: each element counts once, and every process gets the same
bits, so that what is decided by them is decided alike everywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leaven.distributed.parallelise import build_stage, initialise, pieces, units
from leaven.distributed.pieces import Piece
from leaven.distributed.pipeline import MicroBatch, Pipeline, stage_numbers
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.model.kernels import norms
from leaven.planning.stages import stage_layers
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import ParameterRow, ParameterTable

T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """A parameter of which this process holds a piece. ``parameter`` is the model's, ``leaf`` its local memory as a
    parameter of its own; without other processes they are one."""

    row: ParameterRow
    piece: Piece
    parameter: nn.Parameter
    leaf: nn.Parameter


class ShardedModel:
    """Stages, their parameters in the order of the table, and what is done to all of them together."""

    def __init__(
        self,
        shape: ModelShape,
        table: ParameterTable,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.layout, self.group, self.device = layout, group, device
        layers = stage_layers(shape, layout.pp * layout.stages_per_rank)
        self.stages = [
            build_stage(
                shape,
                table,
                (sum(layers[:number]), sum(layers[: number + 1])),
                layout=layout,
                dtype=dtype,
                device=device,
                group=group,
            )
            for number in stage_numbers(layout, group.rank_along("pp"))
        ]
        self.held = self._take_hold(table)
        if device.type != "meta":  # where there is only to see what a process would hold
            initialise(self.pieces, table, seed)
        self.rows = [held.row for held in self.held]
        self.leaves = [held.leaf for held in self.held]
        self._table_rows = len(table.rows)
        place = {row.name: number for number, row in enumerate(table.rows)}
        self.of_held = torch.tensor([place[row.name] for row in self.rows], device=device)
        self._owned = torch.tensor([held.piece.owned for held in self.held], device=device)
        self._pipeline = Pipeline(self.stages, layout, group, device) if layout.pp > 1 else None
        self._both_ends = _both_ends(group) if layout.pp > 1 and shape.tied_embeddings else None
        # Of the processes that have the same loss, one counts it.
        self._tells_loss = self.stages[-1].ends and group.rank_along("tp") == 0

    def _take_hold(self, table: ParameterTable) -> list[Held]:
        found: dict[str, Held] = {}
        for stage in self.stages:
            parameters = dict(stage.model.named_parameters())
            for piece in pieces(stage):
                parameter = parameters[piece.name]
                leaf = parameter if piece.local is parameter else nn.Parameter(piece.local)
                row = table[piece.name]
                # A rank with both ends of a tied pipeline would have the embedding twice.
                assert piece.name not in found
                found[piece.name] = Held(row, piece, parameter, leaf)
        return [found[row.name] for row in table.rows if row.name in found]

    @property
    def pieces(self) -> list[Piece]:
        return [held.piece for held in self.held]

    def schedulable(self, micro_batches: int) -> int:
        """As many micro-batches, or the next larger number that the pipeline's schedule can do."""
        return self._pipeline.schedulable(micro_batches) if self._pipeline else micro_batches

    def train(self, mode: bool) -> None:
        for stage in self.stages:
            stage.train(mode)

    def forward_backward(
        self,
        micro_batches: Iterable[MicroBatch],
        factor: Tensor | float,
        after_first: Callable[[], None] | None = None,
    ) -> Tensor:
        """Add to the gradients; ``factor`` x the sum of the losses of this process, (), as :meth:`total` wants it.

        ``after_first`` is called when the gradients are those of the first micro-batch; not in a pipeline, where
        there is no such moment.
        """
        for stage in self.stages:
            stage.factor = factor
        if self._pipeline:
            loss = self._pipeline.forward_backward(list(micro_batches))
        else:
            stage, loss = self.stages[0], torch.zeros((), device=self.device)
            for last, (inputs, targets, documents) in _with_last(micro_batches):
                self._expect(last)
                part = stage(inputs, targets, documents)[0]
                part.backward()
                loss += part.detach()
                if after_first is not None:
                    after_first()
                    after_first = None
        self._gather_gradients()
        return loss

    @torch.no_grad()
    def forward(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """The sum of the losses of this process in nats, ()."""
        self.train(False)
        for stage in self.stages:
            stage.factor = 1.0
        if self._pipeline:
            loss = self._pipeline.forward(list(micro_batches))
        else:
            losses = [self.stages[0](*micro_batch)[0].double() for micro_batch in micro_batches]
            loss = torch.stack(losses).sum()
        self.train(True)
        return loss

    def total(self, loss: Tensor) -> Tensor:
        """The sum over all processes of a loss that each has of its own samples, ()."""
        return (
            loss
            if self.group is SINGLE_PROCESS
            else self.group.all_reduce_(loss if self._tells_loss else torch.zeros_like(loss))
        )

    def norms(self, *groups: Sequence[Tensor]) -> list[Tensor]:
        """2-norms by row of the table, over all processes, of each group of tensors that go with the leaves."""
        mine = [norms(tensors) for tensors in groups]
        if self.group is SINGLE_PROCESS:
            return mine
        squares = torch.where(self._owned, torch.stack(mine).double() ** 2, 0)
        by_row = squares.new_zeros(len(groups), self._table_rows).index_copy_(1, self.of_held, squares)
        return list(self.group.all_reduce_(by_row).sqrt().to(mine[0].dtype))

    def gradient_norms(self) -> Tensor:
        """2-norms by row of the table of the gradients so far, wherever they have been exchanged."""
        gradients = [held.parameter.grad for held in self.held]
        return self.norms([g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None])[0]

    def drop_gradients(self) -> None:
        for held in self.held:
            held.parameter.grad = held.leaf.grad = None

    def _expect(self, last: bool) -> None:
        """Of the micro-batches of a step ZeRO 0 and 1 exchange gradients after the last only, and so do replicas in
        every stage; below 3, parameters stay until then."""
        zero, stage = self.layout.zero, self.stages[0]
        if units(stage):
            stage.set_requires_gradient_sync(last or zero >= 2)  # type: ignore[operator]
            stage.set_requires_all_reduce(last)  # type: ignore[operator]
            stage.set_reshard_after_backward(last or zero == 3)  # type: ignore[operator]

    def _gather_gradients(self) -> None:
        """Gradients of pieces to their leaves; those of a tied embedding from both ends of the pipeline."""
        for held in self.held:
            if held.leaf is not held.parameter:
                grad = held.parameter.grad
                assert isinstance(grad, DTensor), f"no gradient of {held.row.name}"
                held.leaf.grad, held.parameter.grad = grad.to_local(), None
        tied = next((held for held in self.held if held.row.name == "embedding.weight"), None)
        if self._both_ends is not None and tied is not None:
            dist.all_reduce(tied.leaf.grad, group=self._both_ends)


def _with_last(items: Iterable[T]) -> Iterator[tuple[bool, T]]:
    """Each with whether it is the last; one is made when the one before it is asked for."""
    items = iter(items)
    for ahead in items:
        item = ahead
        for following in items:
            yield False, item
            item = following
        yield True, item


def _both_ends(group: ProcessGroup) -> dist.ProcessGroup | None:
    """This process and the one at the other end of its pipeline; None between the ends."""
    assert group.mesh is not None
    ranks = group.mesh.mesh
    pairs = torch.stack((ranks[0].flatten(), ranks[-1].flatten()), dim=1)
    mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        pairs.tolist()
    )[0]
    return mine
