"""Defines a pipeline stage that frees buffers, gradients and parameters after each micro-batch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from leaven.distributed.compat import reduce_with_backward, stage_backward


class LeanStage(PipelineStage):
    """A :class:`PipelineStage` with which ZeRO 2 and 3 need less memory than ZeRO 1.

    torch's PipelineStage keeps parameters gathered and gradients unsharded until the end of a step, so that ZeRO 2
    and 3 need the same memory as ZeRO 1. Before torch 2.15 it also allocates receive buffers for all micro-batches at
    the start. Here a receive buffer is freed at the end of its micro-batch's backward pass. With ``zero`` 2,
    gradients are reduce-scattered after each micro-batch. With ``zero`` 3, parameters are also resharded after each
    micro-batch. The cost is an additional reduce-scatter for each micro-batch, and with ``zero`` 3 also an additional
    all-gather.

    This class does not work with the zero-bubble schedule, because the second half of that schedule's backward pass
    needs memory that this class frees in the first half. Layouts with the zero-bubble schedule and ``zero`` 2 or 3
    are refused.
    """

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
        assert backward_type == "full"
        reduce_with_backward(stage, True)
        stage.set_reshard_after_backward(self.zero == 3)
        stage.set_requires_gradient_sync(True)
        stage.set_requires_all_reduce(last_backward)  # between replicas, once a step
        of = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        return stage_backward(*of), None

    def start_gradient_reduction(self) -> None:
        """Start the reduction of gradients at the end of a step. Only torch 2.15 and later call this method."""
        assert isinstance(self.submod, FSDPModule)
        reduce_with_backward(self.submod, False)
        super().start_gradient_reduction()  # type: ignore[misc]


def received(infos: Iterable[Any]) -> list[Any]:
    """Return those of torch's receive infos that have a buffer. The infos for the inputs of the first stage have
    none, because that stage receives no inputs."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _reallocated(buffer: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
