"""Writes a run's curves to TensorBoard, W&B or trackio, in addition to metrics.jsonl.

If a writer fails (full disk, service down), the run continues without it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe

if TYPE_CHECKING:
    from leaven.training.step_metrics import Step

WRITERS = ("tensorboard", "wandb", "trackio")


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


def writers(names: Sequence[str] | None) -> tuple[str, ...]:
    """Check and return the names given with ``--log-to``. If ``names`` is None, return TensorBoard if it is
    installed.

    Raises:
        InputError: if a name is unknown or its package is not installed.
    """
    if names is None:
        return ("tensorboard",) if find_spec("tensorboard") else ()
    for name in names:
        if name not in WRITERS:
            raise InputError(f"--log-to {name}: unknown; choose from {', '.join(WRITERS)} or none")
        if find_spec(name) is None:
            raise InputError(f"--log-to {name}: {name} is not installed: pip install {name}")
    return tuple(dict.fromkeys(names))


class Curves:
    """Sends values to all writers of a run. The run continues from ``tokens`` trained tokens. If a writer fails, it
    is removed, and ``lost`` is called with its name and the error."""

    def __init__(
        self, names: Sequence[str], folder: Path, recipe: Recipe, tokens: int, lost: Callable[[str, str], None]
    ) -> None:
        self._lost = lost
        self._open: dict[str, TensorBoard | Tracker] = {}
        for name in names:
            with self._lost_if_it_fails(name):
                self._open[name] = (
                    TensorBoard(folder, tokens)
                    if name == "tensorboard"
                    else Tracker(import_module(name), folder, recipe)
                )

    def step(self, step: "Step") -> None:
        values = {key: value for key, value in asdict(step).items() if key not in {"step", "tokens", "modules"}}
        scalars = {f"train/{key}": float(value) for key, value in values.items() if value is not None}
        for module, (update, size) in step.modules.items():
            scalars |= {f"update_norm/{module}": update, f"parameter_norm/{module}": size}
        self._all(step.step, step.tokens, scalars)

    def validation(self, step: int, tokens: int, values: dict[str, float | None]) -> None:
        self._all(step, tokens, {f"validation/{key}": value for key, value in values.items() if value is not None})

    def close(self) -> None:
        for name, writer in list(self._open.items()):
            with self._lost_if_it_fails(name):
                writer.close()

    def _all(self, step: int, tokens: int, values: dict[str, float]) -> None:
        for name, writer in list(self._open.items()):
            with self._lost_if_it_fails(name):
                writer.write(step, tokens, values)

    @contextmanager
    def _lost_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # writers raise errors of any class
            self._open.pop(name, None)
            self._lost(name, f"{type(error).__name__}: {error}")
