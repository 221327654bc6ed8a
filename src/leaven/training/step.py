"""One optimiser step: what is told of it, and one that is handed to the device and not read yet."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl. ``tokens`` are those consumed once the step is done; ``lr`` is the hidden weights'
    (mlp.out of the first block); norms are over all parameters; ``tflops`` are those of the model, ``mfu`` is their
    share of the device's peak, null where that is unknown; ``memory_gib`` is the most that was held so far.

    ``skipped``: loss or gradient were not finite or not below the limits, and the parameters are those of the step
    before. ``loss_scale`` is that of the step, null where there is none; ``modules`` holds the norms of update and
    parameters of each module, over all blocks. ``noise_scale`` is in tokens, null at a step that was not measured or
    while there is more noise than signal, and not in the file where it is not asked for.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    update_norm: float
    batch_tokens: int
    tokens_per_second: float
    tflops: float
    mfu: float | None
    memory_gib: float
    skipped: bool
    loss_scale: float | None
    modules: dict[str, tuple[float, float]]
    noise_scale: float | None = None

    @property
    def diverged(self) -> bool:
        """Whether it was skipped for what is no number, and not for a loss scale that was too large."""
        overflow = not math.isfinite(self.grad_norm) and self.loss_scale in {None, 1.0}
        return self.skipped and (not math.isfinite(self.loss) or overflow)


@dataclass(frozen=True)
class Issued:
    """A step that the device may still be working on; ``values`` are what it will have measured."""

    step: int
    tokens: int
    lr: float
    batch_tokens: int
    seconds: float  # of handing it over; on a processor it is done by then
    values: Tensor
    started: torch.cuda.Event | None
    ready: torch.cuda.Event | None
    read: "Callable[[Issued], Step]"

    def result(self) -> Step:
        """Wait for it, and for nothing that was issued since. Call once, in the order of the steps."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.read(self)
