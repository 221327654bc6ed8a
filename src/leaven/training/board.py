"""TensorBoard scalars, over tokens.

Written record by record: torch's SummaryWriter hands them to a thread, whose errors (a full disk) nobody can catch.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.training.trainer import Step


class Board:
    """Scalars of one stretch of a run. A disk that is full costs the curves, not the run: ``failed`` says so."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.failed = False
        self._event: Any = Event
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.leaven").open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # What was written beyond the checkpoint will be written again: let TensorBoard forget it.
        self._write(step=tokens, session_log=SessionLog(status=SessionLog.START))

    def step(self, step: "Step") -> None:
        values = {key: value for key, value in asdict(step).items() if key not in {"step", "tokens"}}
        self._scalars(step.tokens, {f"train/{key}": value for key, value in values.items() if value is not None})

    def validation(self, tokens: int, loss: float) -> None:
        self._scalars(tokens, {"validation/loss": loss})

    def close(self) -> None:
        if not self.failed:
            self._records.close()

    def _scalars(self, tokens: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(step=tokens, summary=summary)

    def _write(self, **fields: Any) -> None:
        if self.failed:
            return
        try:
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._records.flush()
        except OSError:
            self.failed = True
