"""Measure the memory of one rank of any parallel layout, by running two training steps in one process on the CPU.

Model, layout, optimizer and step are those of real training, except for attention (:class:`_Flash`). Tensors have
shapes but no values (torch's fake tensors), and collectives do not wait for other ranks (torch's fake process group).
Every expert gets the same number of tokens.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable

from leaven.distributed import sharded_model
from leaven.distributed.compat import pretend
from leaven.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from leaven.distributed.sharded_model import build_stage
from leaven.model import kernels, transformer
from leaven.model.loss import CHUNK_ELEMENTS
from leaven.model.transformer import Stage
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.verification.allocation_tracker import AllocationTracker, BytesByPart


@dataclass(frozen=True)
class StepMemory:
    """The memory of a training step, in bytes by part (weights, gradients and so on)."""

    stays: BytesByPart  # allocated between steps
    peak: BytesByPart  # allocated at the moment of the step when most memory is allocated


def dry_run(recipe: Recipe, rank: int, device: str = "cuda") -> StepMemory:
    """Return the memory that one rank needs in a training step on ``device``, "cuda" or "cpu".

    Call this function only once in a process, and only in a process without a process group.
    """
    layout, group = recipe.layout, SINGLE_PROCESS
    if layout.ranks > 1:
        pretend(rank, layout.ranks)
        group = ProcessGroup.arranged(rank, layout, torch.device("cpu"))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = AllocationTracker()

    def build(*arguments: Any, device: torch.device, **named: Any) -> Stage:
        # A device mesh needs real numbers, so the model is sharded on the meta device before fake tensors exist.
        stage = build_stage(*arguments, device=torch.device("meta"), **named)
        with fake, tracker:
            return stage.to_empty(device=device)

    try:
        with (
            patch.object(sharded_model, "build_stage", build),
            patch.object(sharded_model, "initialise_pieces", lambda *_: None),
        ):
            text: Any = NoText(recipe.model.vocab_size)
            training = Training(recipe, text, device="cpu", group=group)
        with fake, tracker, patch.object(kernels, "on_host", _even), ExitStack() as of_device:
            if device != "cpu":
                of_device.enter_context(patch.object(transformer, "causal_attention", _flash))
                of_device.enter_context(patch.object(transformer, "prefers_causal_attention", lambda _: False))
                of_device.enter_context(patch.object(F, "scaled_dot_product_attention", _flash))
                of_device.enter_context(patch.object(kernels, "has_grouped_kernel", lambda _: device == "cuda"))
                of_device.enter_context(patch.dict(CHUNK_ELEMENTS, cpu=CHUNK_ELEMENTS[device]))
            return two_steps(training, tracker, training.issue)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def two_steps(training: Training, tracker: AllocationTracker, step: Callable[[], object]) -> StepMemory:
    """Return the memory of the second of two training steps. The first step creates the optimizer's state."""
    tracker.mark(training.sharded.local_parameters, "weights")
    for stage in training.sharded.stages:
        stage.loss = _within(tracker, "logits", stage.loss)

    def gradients(*_: Any) -> None:
        grads = (parameter.grad for parameter in training.sharded.local_parameters)
        tracker.mark((grad for grad in grads if grad is not None), "grads")

    training.optimizer.adam.register_step_pre_hook(gradients)
    step()
    averages = training.average.state_dict() if training.average else {}
    tracker.mark([*training.optimizer.state_dict().values(), *averages.values()], "optimizer")
    tracker.begin()
    step()
    return StepMemory(tracker.now(), tracker.peak())


def _within(tracker: AllocationTracker, part: str, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def counted(*arguments: Any, **how: Any) -> Tensor:
        with tracker.within(part):
            return loss(*arguments, **how)

    return counted


@dataclass(frozen=True)
class NoText:
    """A substitute for a corpus and its stream of sequences. All tokens are 0."""

    vocab_size: int
    seq_len: int = 0  # number of tokens in a sequence of the stream
    fingerprint: str = ""
    end_of_text: int = 0

    def epochs(self, tokens: int) -> dict[str, float]:
        return {}

    def stream(self, seq_len: int, seed: int) -> "NoText":
        return replace(self, seq_len=seq_len)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        return np.zeros((count, self.seq_len + 1), dtype=np.int64)

    def validation_windows(self, seq_len: int, limit_tokens: int) -> NDArray[np.int64]:
        return self.stream(seq_len, 0).batch(0, 1)


def _even(sizes: Tensor, total: int) -> list[int]:
    """Return ``len(sizes)`` whole numbers with the sum ``total``, as equal as possible."""
    count = len(sizes)
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _flash(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, **how: Any) -> Tensor:
    mask = how.get("attn_mask", how.get("allowed_B1TT"))
    y_BHTE: Tensor = _Flash.apply(q_BHTE, k_BKTE, v_BKTE, mask)  # type: ignore[no-untyped-call]
    return y_BHTE


class _Flash(torch.autograd.Function):
    """A substitute for flash attention that allocates the same memory without computing values.

    The backward pass needs the arguments, the output and one fp32 number per query and head (Dao et al. 2022, arXiv
    2205.14135, algorithm 1). With a mask, torch uses its memory-efficient kernel on CUDA, which also saves the mask.
    The mask is not copied if it has the queries' dtype and its rows have a multiple of 16 elements
    (pytorch/pytorch, ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, preprocess_mask).
    """

    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None) -> Tensor:
        y_BHTE = torch.empty_like(q_BHTE.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sums_BHT = q_BHTE.new_empty(q_BHTE.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q_BHTE, k_BKTE, v_BKTE, y_BHTE, sums_BHT, mask)
        return y_BHTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTE, k_BKTE, v_BKTE, *_ = ctx.saved_tensors
        return torch.empty_like(q_BHTE), torch.empty_like(k_BKTE), torch.empty_like(v_BKTE), None
