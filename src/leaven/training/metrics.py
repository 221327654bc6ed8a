"""Writers of a run's curves beside metrics.jsonl: TensorBoard, W&B, trackio.

A writer that fails (a full disk, a service that is down) costs its curves, not the run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe

if TYPE_CHECKING:
    from leaven.training.step import Step

WRITERS = ("tensorboard", "wandb", "trackio")


class Writer(Protocol):
    def write(self, step: int, tokens: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars over tokens, written record by record: torch's SummaryWriter hands them to a thread, whose errors (a
    full disk) nobody can catch."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.leaven").open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # What was written beyond the checkpoint will be written again: let TensorBoard forget it.
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
    """A run of W&B or of trackio, which has the same interface. Their own settings (WANDB_MODE, TRACKIO_DIR, ...)
    apply; a resumed run continues the same curves."""

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


def writers(asked: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the writers of a ``--log-to``; without one, TensorBoard where it is installed.

    Raises:
        InputError: if a name is not known or its package not there.
    """
    if asked is None:
        return ("tensorboard",) if find_spec("tensorboard") else ()
    for name in asked:
        if name not in WRITERS:
            raise InputError(f"--log-to {name}: there are {', '.join(WRITERS)} and none")
        if find_spec(name) is None:
            raise InputError(f"--log-to {name}: {name} is not installed: pip install {name}")
    return tuple(dict.fromkeys(asked))


class Curves:
    """All writers of a run, from ``tokens`` trained on. ``lost`` is called once for each that fails, with its name
    and error."""

    def __init__(
        self, names: Sequence[str], folder: Path, recipe: Recipe, tokens: int, lost: Callable[[str, str], None]
    ) -> None:
        self._lost = lost
        self._open: dict[str, Writer] = {}
        for name in names:
            try:
                self._open[name] = (
                    TensorBoard(folder, tokens)
                    if name == "tensorboard"
                    else Tracker(import_module(name), folder, recipe)
                )
            except Exception as error:  # theirs may be of any class
                self._fail(name, error)

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
            try:
                writer.close()
            except Exception as error:
                self._fail(name, error)

    def _all(self, step: int, tokens: int, values: dict[str, float]) -> None:
        for name, writer in list(self._open.items()):
            try:
                writer.write(step, tokens, values)
            except Exception as error:
                self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        self._lost(name, f"{type(error).__name__}: {error}")
