"""Measures steps and the validation loss, and logs them: metrics.jsonl, events.jsonl and curves."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leaven.distributed.sharded_model import ShardedModel
from leaven.errors import InputError
from leaven.model.kernels import subtract_, widened
from leaven.planning.flops import flops_per_token
from leaven.planning.memory import GIB
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterTable
from leaven.training.checkpoint import Progress
from leaven.training.device import Peak, peak_memory, time_fixed_work
from leaven.training.loop import Callback, StepResult
from leaven.training.run_lines import METRICS, lines_digest

if TYPE_CHECKING:
    from leaven.training.run_folder import RunFolder
    from leaven.training.trainer import RunTrainer


@dataclass(frozen=True)
class Step(StepResult):
    """The metrics of a step, which become a line of metrics.jsonl."""

    lr: float  # lr of one hidden weight: attention.out of the first block
    grad_norm: float  # norm of the gradient before clipping
    update_norm: float  # norm of the change of the parameters in this step
    tokens_per_second: float  # of all processes together
    tflops: float  # model FLOPs per second of one device, in 10^12
    mfu: float | None  # tflops divided by the device's peak; None if the peak is unknown
    memory_gib: float  # peak memory use so far
    skipped: bool  # whether the update was left out: the loss or gradient norm was not finite or too high
    loss_scale: float | None  # None except in fp16
    modules: dict[str, tuple[float, float]]  # by module: norms of (update, parameters) over all blocks
    noise_scale: float | None = None  # gradient noise scale in tokens; None if not measured or not positive
    z_loss: float | None = None  # z-loss in nats per token, which is not part of ``loss``; None without a z-loss
    # The balance loss without its coefficient: mean over layers, 1 at an even load; None without experts.
    balance_loss: float | None = None
    max_load: float | None = None  # highest load of an expert / mean load of its layer; None without experts

    @property
    def seconds(self) -> float:
        return self.batch_tokens / self.tokens_per_second

    @property
    def diverged(self) -> bool:
        """Whether the step was skipped because the loss or the gradient norm was not finite. In fp16, the norm counts
        only at loss scale 1, because a larger scale can itself cause the overflow."""
        overflow = not math.isfinite(self.grad_norm) and self.loss_scale in {None, 1.0}
        return self.skipped and (not math.isfinite(self.loss) or overflow)


class Telemetry:
    """Measures steps without making the device wait for the host. In each step, call :meth:`begin`,
    :meth:`remember_parameters` and :meth:`measure_later`, in this order."""

    def __init__(self, recipe: Recipe, table: ParameterTable, model: ShardedModel) -> None:
        self._model, self._device = model, model.device
        self.peak: Peak | None = None  # peak speed of the device; without it, the MFU is not computed
        self._flops_per_token = flops_per_token(recipe.model)
        self._shown_lr = table["layers.0.attention.out.weight"].lr
        self._modules = list(dict.fromkeys(row.module for row in table.rows))
        owners = [self._modules.index(row.module) for row in table.rows]
        self._owners = torch.tensor(owners, device=self._device)
        self._began = 0.0
        self._started: torch.cuda.Event | None = None
        self._before: list[Tensor] = []

    def begin(self) -> None:
        self._began, self._started = time.perf_counter(), self._mark()

    def remember_parameters(self) -> None:
        """Copy the parameters, so that :meth:`measure_later` can measure their update."""
        self._before = [parameter.detach().clone() for parameter in self._model.local_parameters]

    @torch.no_grad()
    def measure_later(
        self,
        progress: Progress,
        batch_tokens: int,
        lr_factor: float,
        measured: Sequence[Tensor | None],
    ) -> Callable[[], Step]:
        """Start copying the measurements of a step to the host. Return a function that waits for them. ``measured``:
        loss, gradient norm, whether the update was applied, loss scale, noise scale, z-loss, balance loss and highest
        load, None if not measured."""
        subtract_(self._before, self._model.local_parameters)
        updates, sizes = map(self._per_module, self._model.norms(self._before, self._model.local_parameters))
        self._before = []
        total = updates.norm()
        absent = torch.full_like(total, torch.nan)
        head = torch.stack([widened(absent if value is None else value) for value in (*measured, total)])
        values, ready = self._to_host(torch.cat((head, widened(updates), widened(sizes))))
        began, host_seconds = self._started, time.perf_counter() - self._began  # the step's time on a CPU

        def read() -> Step:
            seconds = host_seconds
            if began is not None and ready is not None:
                ready.synchronize()
                seconds = began.elapsed_time(ready) / 1000
            loss, grad_norm, applied, scale, noise_scale, z_loss, balance, load, update_norm, *by_module = (
                values.tolist()
            )
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
                z_loss=z_loss if math.isfinite(z_loss) else None,
                balance_loss=balance if math.isfinite(balance) else None,
                max_load=load if math.isfinite(load) else None,
            )

        return read

    def _per_module(self, sizes: Tensor) -> Tensor:
        return sizes.new_zeros(len(self._modules)).index_add_(0, self._owners, sizes**2).sqrt()

    def _to_host(self, values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start copying ``values`` to the host. Return the copy and, on CUDA, an event after the copy."""
        if not values.is_cuda:
            return values.cpu(), None  # on mps this waits for the step
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host, self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


WRITERS = ("tensorboard", "wandb", "trackio")


class StepLog(Callback):
    """Logs steps: lines of metrics.jsonl, points of the curves, and events when the batch size changes. If a writer
    of curves such as W&B fails, the run continues without it."""

    def __init__(self, trainer: "RunTrainer", writers: Sequence[str], on_step: Callable[[Step], None]) -> None:
        self.trainer, self.training, self._on_step = trainer, trainer.training, on_step
        self._names = writers if trainer.group.is_first else ()
        self._writers: dict[str, TensorBoard | Tracker] = {}
        self.batch_tokens = 0

    def before_step(self) -> None:
        if self.training.next_batch_tokens != self.batch_tokens:
            self.batch_tokens = self.training.next_batch_tokens
            self.trainer.event("ramp", **self.batch())
        self.trainer.group.heartbeat(f"in step {self.training.progress.step + 1}")

    def after_step(self, step: Step) -> None:
        line = asdict(step)
        if self.training.noise is None:
            del line["noise_scale"]
        if not self.training.recipe.hyperparameters.z_loss:
            del line["z_loss"]
        if not self.training.recipe.model.experts:
            del line["balance_loss"], line["max_load"]
        self.trainer.lines.record(line)
        values = {key: value for key, value in line.items() if key not in {"step", "tokens", "modules"}}
        scalars = {f"train/{key}": float(value) for key, value in values.items() if value is not None}
        for module, (update, size) in step.modules.items():
            scalars |= {f"update_norm/{module}": update, f"parameter_norm/{module}": size}
        self._write(step.step, step.tokens, scalars)
        self._on_step(step)

    def batch(self) -> dict[str, int]:
        """Return the batch size in tokens and the micro-batch in sequences, for the log."""
        size, _ = self.training.split(self.batch_tokens // self.training.recipe.model.seq_len)
        return {"batch_tokens": self.batch_tokens, "micro_batch": size}

    def validation(self, values: Mapping[str, float | None]) -> None:
        scalars = {f"validation/{key}": value for key, value in values.items() if value is not None}
        self._write(self.training.progress.step, self.training.tokens, scalars)

    def state(self) -> dict[str, Any]:
        return {METRICS: asdict(self.trainer.lines.metrics_digest())}

    def restore(self, state: Mapping[str, Any]) -> None:
        run, training = self.trainer.run, self.training
        self.batch_tokens = training.next_batch_tokens
        changed = self.trainer.lines.truncate_metrics(training.progress.step, lines_digest(state.get(METRICS)))
        if changed is not None:
            self.trainer.event("file_changed", file="metrics.jsonl", why=changed)
        self.close()
        for name in self._names:
            with self._lost_if_it_fails(name):
                self._writers[name] = (
                    TensorBoard(run.path, training.tokens)
                    if name == "tensorboard"
                    else Tracker(import_module(name), run, training.recipe)
                )

    def close(self) -> None:
        for name, writer in list(self._writers.items()):
            with self._lost_if_it_fails(name):
                writer.close()

    def _write(self, step: int, tokens: int, scalars: dict[str, float]) -> None:
        for name, writer in list(self._writers.items()):
            with self._lost_if_it_fails(name):
                writer.write(step, tokens, scalars)

    @contextmanager
    def _lost_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            # trackio prints to stdout, which may be a JSON document. W&B logs what is printed, so its stdout stays.
            with redirect_stdout(sys.stderr) if name == "trackio" else nullcontext():
                yield
        except Exception as error:  # writers raise errors of any class
            self._writers.pop(name, None)
            self.trainer.event("curves_lost", writer=name, why=f"{type(error).__name__}: {error}")


class Validation(Callback):
    """Computes the validation loss at a fixed interval in tokens. With several processes, also logs the slowest
    process and the one with the highest memory use."""

    def __init__(self, trainer: "RunTrainer", bits_per_byte_factor: float | None) -> None:
        self.trainer, self.training = trainer, trainer.training
        recipe = self.training.recipe
        self.every_tokens = recipe.evaluation.every_tokens or max(recipe.data.tokens // 10, 1)
        self._bits_per_byte_factor = bits_per_byte_factor
        self.owed = False  # whether a stop has interrupted a validation, which must be done after the resume

    def on_due(self) -> None:
        self.evaluate()

    def evaluate(self) -> dict[str, Any]:
        """Compute and log the validation loss. Return ``loss`` in nats per token and ``bits_per_byte`` (None if
        unknown). Once weights are averaged, also return their loss as ``averaged_loss``."""
        trainer, training, factor = self.trainer, self.training, self._bits_per_byte_factor
        trainer.group.heartbeat(f"in the validation after step {training.progress.step}")
        self.owed = True
        loss = training.evaluate()
        values = {"loss": loss, "bits_per_byte": loss * factor if factor else None}
        if training.average and training.average.begun:
            values["averaged_loss"] = training.evaluate(averaged=True)
        self.owed = False
        trainer.event("validation", **values)
        if trainer.group.size > 1:
            self._compare_processes()
        trainer.log.validation(values)
        return values

    def state(self) -> dict[str, Any]:
        return {"owes_validation": True} if self.owed and not self.training.finished else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.owed = state.get("owes_validation", False)

    def _compare_processes(self) -> None:
        device = self.training.device
        measured = self.trainer.group.all_gather([time_fixed_work(device), peak_memory(device) / GIB])
        seconds, memory = zip(*measured, strict=True)
        slowest, fullest = seconds.index(max(seconds)), memory.index(max(memory))
        ratio = max(seconds) / median(seconds)
        self.trainer.profile.highest_memory = max(memory)
        self.trainer.event("ranks", slowest=slowest, times_the_median=ratio, fullest=fullest, memory_gib=max(memory))


def writers(log_to: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of curve writers in ``log_to``, such as "tensorboard,wandb" or "none". For None, return
    "tensorboard" if it is installed. Raise InputError if a name is unknown or its package is not installed."""
    if log_to is None:
        return ("tensorboard",) if find_spec("tensorboard") else ()
    names = [] if log_to == "none" else list(map(str.strip, log_to.split(",") if isinstance(log_to, str) else log_to))
    for name in names:
        if name not in WRITERS:
            raise InputError(f"--log-to {name}: give none, or some of {', '.join(WRITERS)}, separated by commas")
        if find_spec(name) is None:
            raise InputError(f"--log-to {name}: {name} is not installed; run: pip install {name}")
    return tuple(dict.fromkeys(names))


class TensorBoard:
    """Writes scalars to TensorBoard, with tokens on the x axis. Unlike torch's SummaryWriter, it raises errors, for
    example of a full disk."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.leaven").open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # Points after these tokens will be written again; this makes TensorBoard discard the old ones.
        self._write(step=tokens + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, tokens: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(step=tokens, summary=summary)

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


class Tracker:
    """Writes scalars to W&B or trackio, which have the same interface. A resumed run continues its curves. W&B
    ignores a step that is smaller than its last one, so steps that are trained again get larger numbers there, and
    the x axis is the number of tokens."""

    def __init__(self, module: Any, run: "RunFolder", recipe: Recipe) -> None:
        self._module, self._of_wandb = module, module.__name__ == "wandb"
        name = run.path.resolve().name
        known: dict[str, Any] = {"project": recipe.name, "name": name, "config": recipe.model_dump(mode="json")}
        if self._of_wandb:
            known |= {"id": f"{recipe.name}-{name}-{run.identity}", "dir": str(run.path)}
        else:  # trackio continues the run of this name
            known["name"] = f"{name}-{run.identity[:8]}"
        module.init(resume="allow", **known)
        if self._of_wandb:
            module.define_metric("*", step_metric="tokens")
        self._last, self._later = int(getattr(getattr(module, "run", None), "step", 0)), 0

    def write(self, step: int, tokens: int, values: dict[str, float]) -> None:
        if self._of_wandb:
            if step + self._later < self._last:
                self._later = self._last + 1 - step
            self._last = step + self._later
        self._module.log({"tokens": tokens, "step": step, **values}, step=step + self._later)

    def close(self) -> None:
        self._module.finish()
