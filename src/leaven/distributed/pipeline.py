"""Runs batches through the stages of a pipeline with torch's schedules.

Every process reads the samples of its data-parallel rank itself. Stages send only activations and their gradients.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from leaven.distributed.compat import reduce_with_backward, stage_backward
from leaven.distributed.process_group import ProcessGroup
from leaven.model.transformer import Stage
from leaven.planning.arrangement import scheduled
from leaven.recipe.layout import Layout

SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}

MicroBatch = tuple[Tensor, Tensor, Tensor | None]
"""Inputs, targets, and document numbers, each (sequences, seq_len). With document numbers, a token attends only to
earlier tokens of its document. If they are None, it attends to all earlier tokens."""


def stage_numbers(layout: Layout, rank: int) -> list[int]:
    """Return the stages of a pipeline rank: rank, rank + pp, ... (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    return [rank + layout.pp * turn for turn in range(layout.stages_per_rank)]


class Pipeline:
    """Runs micro-batches through the stages of this process, and exchanges activations with other pipeline ranks."""

    def __init__(self, stages: Sequence[Stage], layout: Layout, group: ProcessGroup, device: torch.device) -> None:
        assert group.mesh is not None
        self.stages, self.layout, self.device = stages, layout, device
        self.rank = group.rank_along("pp")
        self.count = layout.pp * layout.stages_per_rank
        self.numbers = stage_numbers(layout, self.rank)
        self.group = group.mesh.get_group("pp")
        self._built_for: tuple[int, torch.Size] | None = None
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None

    def schedulable(self, micro_batches: int) -> int:
        """Return ``micro_batches``, rounded up to a number that the schedule supports."""
        least = self.count if self.layout.schedule == "1f1b" else 1
        return max(scheduled(self.layout, micro_batches), least)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate gradients of all micro-batches. Return the loss sum, or 0 on ranks without the last stage."""
        inputs, targets, documents = (
            None if parts[0] is None else torch.cat(parts) for parts in zip(*micro_batches, strict=True)
        )
        assert inputs is not None
        assert targets is not None
        losses: list[Tensor] = []
        schedule = self._schedule_for(len(micro_batches), micro_batches[0][0].shape)
        arguments: dict[str, Any] = {"targets_BT": targets}
        if documents is not None:
            arguments["documents_BT"] = documents
        tokens = [inputs] if 0 in self.numbers else []
        target = targets if self.count - 1 in self.numbers else None
        schedule.step(*tokens, target=target, losses=losses, return_outputs=False, **arguments)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._nothing()

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the sum of the losses, as :meth:`forward_backward` does, but without gradients. ``eval`` of torch's
        schedules is not called, because it would change state that training needs."""
        total = self._nothing().double()
        for inputs, targets, documents in micro_batches:
            x = inputs
            for number in range(self.count):
                owner, before = number % self.layout.pp, (number - 1) % self.layout.pp
                if owner != self.rank:
                    continue
                if number and before != self.rank:
                    x = torch.empty(self._passed_on(inputs.shape), device=self.device)
                    dist.recv(x, group=self.group, group_src=before)
                x = self.stages[self.numbers.index(number)](x, targets, documents)
                if number == self.count - 1:
                    total += x[0]
                elif (number + 1) % self.layout.pp != self.rank:
                    dist.send(x.contiguous(), group=self.group, group_dst=(number + 1) % self.layout.pp)
        return total

    def _schedule_for(self, count: int, shape: torch.Size) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return the schedule for ``count`` micro-batches of a shape. A new schedule replaces the old one, because
        two schedules with the same stages would silently lose gradients."""
        if self._built_for != (count, shape):
            passed_on = torch.empty(self._passed_on(shape), device="meta")
            tokens, loss = torch.empty(shape, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
            stages = [
                LeanStage(
                    stage,
                    number,
                    self.count,
                    self.device,
                    input_args=tokens if stage.begins else passed_on.requires_grad_(),
                    output_args=loss.requires_grad_() if stage.ends else passed_on.requires_grad_(),
                    group=self.group,
                    zero=self.layout.zero,
                )
                for number, stage in zip(self.numbers, self.stages, strict=True)
            ]
            schedule = SCHEDULES[self.layout.schedule]
            single = issubclass(schedule, PipelineScheduleSingle)
            self._schedule = schedule(
                stages[0] if single else stages,
                n_microbatches=count,
                loss_fn=lambda loss, _: loss.sum(),
                scale_grads=False,
            )
            self._built_for = count, shape
        assert self._schedule is not None
        return self._schedule

    def _passed_on(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return the shape of the activations that stages send: (B, positions of this tensor-parallel rank, D)."""
        return shape[0], shape[1] // self.layout.tp, self.stages[0].model.shape.d_model

    def _nothing(self) -> Tensor:
        return torch.zeros((), device=self.device)


class LeanStage(PipelineStage):
    """A :class:`PipelineStage` that frees memory after each backward pass, not at the end of a step. It frees the
    receive buffers, reduce-scatters the gradients with ``zero`` 2 and 3, and reshards the parameters with ``zero`` 3.
    With torch's PipelineStage, ZeRO 2 and 3 need as much memory as ZeRO 1."""

    def __init__(self, *arguments: Any, zero: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.zero = zero

    @contextmanager
    def _only_shapes(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._only_shapes():
            return super()._prepare_forward_infra(*arguments, **named)

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        with self._only_shapes():
            return super()._create_grad_recv_info(act_send_info)

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[P2POp]:
        for info in received(recv_infos):
            info.buffer = _reallocated(info.buffer, self.device)
        return super()._get_recv_ops(recv_infos)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in received(infos.get(bwd_chunk_id, ())):
                info.buffer = _reallocated(info.buffer, torch.device("meta"))

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        stage = self.submod
        if self.zero < 2 or not isinstance(stage, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full"  # Layout refuses zero-bubble with ZeRO 2 and 3
        reduce_with_backward(stage, True)
        stage.set_reshard_after_backward(self.zero == 3)
        stage.set_requires_gradient_sync(True)
        stage.set_requires_all_reduce(last_backward)  # between replicas, once a step
        of = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        return stage_backward(*of), None

    def start_gradient_reduction(self) -> None:
        # Only torch 2.15 and later call this method, at the end of a step.
        assert isinstance(self.submod, FSDPModule)
        reduce_with_backward(self.submod, False)
        super().start_gradient_reduction()  # type: ignore[misc]


def received(infos: Iterable[Any]) -> list[Any]:
    """Return torch's receive infos that have a buffer. Inputs of the first stage have no buffer."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _reallocated(buffer: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
