"""Measures the metrics of an optimizer step without making the device wait for the host."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.distributed.sharded_model import ShardedModel
from leaven.model.kernels import subtract_, widened
from leaven.planning.flops import flops_per_token
from leaven.planning.memory import GIB
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterTable
from leaven.training.checkpoint import Progress
from leaven.training.device import Peak, peak_memory
from leaven.training.loop import StepResult


@dataclass(frozen=True)
class Step(StepResult):
    """The metrics of a step: a line of metrics.jsonl. The norms cover all parameters."""

    lr: float  # lr of the hidden weights (mlp.out of the first block)
    grad_norm: float
    update_norm: float
    tokens_per_second: float
    tflops: float  # model FLOPs per second of one device, in 10^12
    mfu: float | None  # tflops divided by the device's peak; None if the peak is unknown
    memory_gib: float  # peak memory use so far
    skipped: bool  # not applied, because the loss or gradient norm was not finite or too high
    loss_scale: float | None  # None except in fp16
    modules: dict[str, tuple[float, float]]  # by module: norms of (update, parameters) over all blocks
    noise_scale: float | None = None  # gradient noise scale, tokens; None if not measured or not positive

    @property
    def seconds(self) -> float:
        """The number of seconds that the step took on its device."""
        return self.batch_tokens / self.tokens_per_second

    @property
    def diverged(self) -> bool:
        """Whether the step was skipped because its loss or gradient is not finite. A gradient overflow does not
        count if the fp16 loss scale was too large."""
        overflow = not math.isfinite(self.grad_norm) and self.loss_scale in {None, 1.0}
        return self.skipped and (not math.isfinite(self.loss) or overflow)


class Telemetry:
    """Measures steps without making the device wait for the host. In each step, the trainer calls :meth:`begin`,
    :meth:`remember_parameters` and :meth:`measure_later`, in this order."""

    def __init__(self, recipe: Recipe, table: ParameterTable, model: ShardedModel) -> None:
        self._model, self._device = model, model.device
        self.peak: Peak | None = None  # peak speed of the device; without it, the MFU is not computed
        self._flops_per_token = flops_per_token(recipe.model)
        self._shown_lr = table["layers.0.mlp.out.weight"].lr
        self._modules = list(dict.fromkeys(row.module for row in table.rows))
        owners = [self._modules.index(row.module) for row in table.rows]
        self._owners = torch.tensor(owners, device=self._device)
        self._began = 0.0
        self._started: torch.cuda.Event | None = None
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Start timing a step."""
        self._began, self._started = time.perf_counter(), self._mark()

    def remember_parameters(self) -> None:
        """Copy the parameters, so that :meth:`measure_later` can measure their update."""
        self._before = [leaf.detach().clone() for leaf in self._model.leaves]

    @torch.no_grad()
    def measure_later(
        self,
        progress: Progress,
        batch_tokens: int,
        lr_factor: float,
        measured: Sequence[Tensor | None],
    ) -> Callable[[], Step]:
        """Start copying the measurements of a step to the host.

        The measurements are the norms of the parameters and of their updates, and the scalars in ``measured``: loss,
        gradient norm, whether the step was applied, loss scale and noise scale.

        Return a function that waits for the measurements and returns the metrics.
        """
        subtract_(self._before, self._model.leaves)
        updates, sizes = map(self._per_module, self._model.norms(self._before, self._model.leaves))
        self._before = []
        total = updates.norm()
        absent = torch.full_like(total, torch.nan)
        head = torch.stack([widened(absent if value is None else value) for value in (*measured, total)])
        values, ready = self._to_host(torch.cat((head, widened(updates), widened(sizes))))
        began, host_seconds = self._started, time.perf_counter() - self._began  # on a CPU the whole step

        def read() -> Step:
            seconds = host_seconds
            if began is not None and ready is not None:
                ready.synchronize()
                seconds = began.elapsed_time(ready) / 1000
            loss, grad_norm, applied, scale, noise_scale, update_norm, *by_module = values.tolist()
            speed, count = batch_tokens / seconds, len(self._modules)
            flops = speed * self._flops_per_token / self._model.group.size  # of one device
            norms_by_module = zip(by_module[:count], by_module[count:], strict=True)
            return Step(
                step=progress.step,
                tokens=progress.tokens,
                loss=loss,
                batch_tokens=batch_tokens,
                lr=self._shown_lr * lr_factor,
                grad_norm=grad_norm,
                update_norm=update_norm,
                tokens_per_second=speed,
                tflops=flops / 1e12,
                mfu=flops / self.peak.flops if self.peak else None,
                memory_gib=peak_memory(self._device) / GIB,
                skipped=not applied,
                loss_scale=scale if math.isfinite(scale) else None,
                modules=dict(zip(self._modules, norms_by_module, strict=True)),
                noise_scale=noise_scale if math.isfinite(noise_scale) else None,
            )

        return read

    def _per_module(self, sizes: Tensor) -> Tensor:
        """Return the 2-norms of the modules, given the 2-norms of the parameters."""
        return sizes.new_zeros(len(self._modules)).index_add_(0, self._owners, sizes**2).sqrt()

    def _to_host(self, values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start a copy to the host. Return the copy, and the CUDA event that marks its completion (None on other
        devices). Waiting for this event does not wait for later steps."""
        if not values.is_cuda:
            return values.cpu(), None  # on mps this waits for the step
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host, self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        """Record a timing event in the queue of a CUDA device, and return it; None on other devices."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
