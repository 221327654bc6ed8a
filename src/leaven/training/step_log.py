"""Logs the steps of a run: a line of metrics.jsonl for each step, and the curves in TensorBoard, W&B or trackio."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.loop import Callback
from leaven.training.step_metrics import Step

if TYPE_CHECKING:
    from leaven.training.trainer import RunTrainer

WRITERS = ("tensorboard", "wandb", "trackio")


class StepLog(Callback):
    """Logs the steps of a run.

    Before each step, it records which step this process has reached (a heartbeat for the other processes), and logs
    an event if the batch size has changed. After each step, it writes a line to metrics.jsonl, adds a point to each
    curve, and calls ``on_step``. If a writer of curves such as W&B fails (full disk, service down), the run continues
    without it.
    """

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
        self.trainer.run.record(line)
        values = {key: value for key, value in line.items() if key not in {"step", "tokens", "modules"}}
        scalars = {f"train/{key}": float(value) for key, value in values.items() if value is not None}
        for module, (update, size) in step.modules.items():
            scalars |= {f"update_norm/{module}": update, f"parameter_norm/{module}": size}
        self._write(step.step, step.tokens, scalars)
        self._on_step(step)

    def batch(self) -> dict[str, int]:
        """Return the batch size in tokens and the number of sequences in each forward pass, for the log."""
        size, _ = self.training.forwards(self.batch_tokens // self.training.recipe.model.seq_len)
        return {"batch_tokens": self.batch_tokens, "micro_batch": size}

    def validation(self, values: Mapping[str, float | None]) -> None:
        """Add the results of a validation to the curves."""
        scalars = {f"validation/{key}": value for key, value in values.items() if value is not None}
        self._write(self.training.progress.step, self.training.tokens, scalars)

    def restore(self, state: Mapping[str, Any]) -> None:
        run, training = self.trainer.run, self.training
        self.batch_tokens = training.next_batch_tokens
        run.truncate_metrics(training.progress.step)
        self.close()
        for name in self._names:
            with self._lost_if_it_fails(name):
                self._writers[name] = (
                    TensorBoard(run.path, training.tokens)
                    if name == "tensorboard"
                    else Tracker(import_module(name), run.path, training.recipe)
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
            yield
        except Exception as error:  # writers raise errors of any class
            self._writers.pop(name, None)
            self.trainer.event("curves_lost", writer=name, why=f"{type(error).__name__}: {error}")


def writers(log_to: str | None) -> tuple[str, ...]:
    """Return the names of the writers in ``log_to``, the value of ``--log-to``: names separated by commas, or "none".
    If ``log_to`` is None, the result is TensorBoard if it is installed, else no writer.

    Raises:
        InputError: if a name is unknown or its package is not installed.
    """
    if log_to is None:
        return ("tensorboard",) if find_spec("tensorboard") else ()
    names = [] if log_to == "none" else log_to.split(",")
    for name in names:
        if name not in WRITERS:
            raise InputError(f"--log-to {name}: unknown; choose from {', '.join(WRITERS)} or none")
        if find_spec(name) is None:
            raise InputError(f"--log-to {name}: {name} is not installed; run: pip install {name}")
    return tuple(dict.fromkeys(names))


class TensorBoard:
    """Writes scalars to TensorBoard, with tokens on the x axis. torch's SummaryWriter is not used because it writes
    in a thread, and errors in that thread (a full disk) cannot be caught."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.leaven").open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # Later points will be written again: TensorBoard then discards the old ones.
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
    """Writes scalars to W&B or trackio, which have the same interface. The settings of these services (WANDB_MODE,
    TRACKIO_DIR, ...) apply. A resumed run continues its curves."""

    def __init__(self, module: Any, folder: Path, recipe: Recipe) -> None:
        self._module = module
        name = folder.resolve().name
        known: dict[str, Any] = {"project": recipe.name, "name": name, "config": recipe.model_dump(mode="json")}
        if module.__name__ == "wandb":
            known |= {"id": f"{recipe.name}-{name}", "dir": str(folder)}
        module.init(resume="allow", **known)

    def write(self, step: int, tokens: int, values: dict[str, float]) -> None:
        self._module.log({"tokens": tokens, **values}, step=step)

    def close(self) -> None:
        self._module.finish()
