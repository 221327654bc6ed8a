"""A stage of a pipeline that holds what it needs now, and not what the whole step needs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from leaven.distributed.compat import stage_backward


class LeanStage(PipelineStage):
    """torch's stage makes a buffer for what it receives of every micro-batch of the step before the first one comes,
    and keeps parameters gathered and gradients whole, in fp32, until the last one has gone: ZeRO 2 and 3 hold what
    ZeRO 1 does. Here a buffer lives from its receive to the end of its backward pass, and with ``zero`` 2 gradients
    are shared out after each micro-batch, with 3 parameters too.

    The price is a reduce-scatter, and of 3 an all-gather, for each micro-batch. A backward pass in two halves
    (zero-bubble) cannot: the second one needs what the first would give up, and a layout with both is refused.
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
            info.buffer = _anew(info.buffer, self.device)
        return super()._get_recv_ops(recv_infos)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in received(infos.get(bwd_chunk_id, ())):
                info.buffer = _anew(info.buffer, torch.device("meta"))

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        stage = self.submod
        if self.zero < 2 or not isinstance(stage, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full"
        stage.set_is_last_backward(True)
        stage.set_reshard_after_backward(self.zero == 3)
        stage.set_requires_gradient_sync(True)
        stage.set_requires_all_reduce(last_backward)  # between replicas, once a step
        of = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        return stage_backward(*of), None


def received(infos: Iterable[Any]) -> list[Any]:
    """Those that come over a wire. What a first stage is given has no buffer; in torch 2.11 not even the name."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _anew(buffer: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
