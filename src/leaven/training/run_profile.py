"""Run profile: what the planner predicted beside what was measured, in ``plan.json`` and the calibration history."""

import json
import time
from collections import Counter, deque
from contextlib import suppress
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from pydantic import ValidationError

from leaven import __version__
from leaven.planning.arrangement import Arrangement
from leaven.planning.calibration import CalibrationRecord, StepCost, predicted, remember
from leaven.planning.memory import GIB
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_text
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.loop import Callback
from leaven.training.run_folder import RunFolder
from leaven.training.step import Step
from leaven.training.throughput import accelerator_of, device_name

WARM_UP = 3
"""First steps of a start, and of a batch size, that are not measured: they compile, fill caches and get memory."""

KEPT = 1_000
"""Steps of a batch size that the median is of: the last ones."""

ENOUGH = 10
"""Steps from which a run says something to the history."""


class RunProfile(Callback[Step]):
    """Of one start of a run, for every size of its batch: a row of ``plan.json``.

    A start that measured a row longer than the one before puts its own in the place. ``footing``: bytes that were
    held before the model was there, which on a processor are those of the whole process.
    """

    def __init__(self, run: RunFolder, training: Training, footing: int, keep_history: bool) -> None:
        self._run, self._training, self._footing, self._keep_history = run, training, footing, keep_history
        self._seen: Counter[int] = Counter()
        self._seconds: dict[int, deque[float]] = {}
        self._memory: dict[int, float] = {}
        self._elsewhere = 0.0
        self._batch_tokens = 0
        self._before = _rows(run) if run.writes else []

    def after_step(self, step: Step) -> None:
        size = self._batch_tokens = step.batch_tokens
        self._seen[size] += 1
        if self._seen[size] > WARM_UP:
            self._seconds.setdefault(size, deque(maxlen=KEPT)).append(size / step.tokens_per_second)
            self._memory[size] = step.memory_gib

    def fullest(self, memory_gib: float) -> None:
        """Take in what that process holds which holds most."""
        self._elsewhere = memory_gib

    def write(self) -> None:
        """Write what is known so far; a disk without room costs the file and not the run."""
        if self._run.writes:
            self._write(self._records())

    def close(self) -> None:
        """At the end of a start, however it comes: the last batch size goes into the history."""
        if not self._run.writes:
            return
        self._write(records := self._records())
        for record in records:
            if self._keep_history and record.batch_tokens == self._batch_tokens and record.steps >= ENOUGH:
                remember(record)

    def _write(self, records: list[CalibrationRecord]) -> None:
        rows = {_key(record): record for record in self._before}
        for record in records:
            older = rows.get(_key(record))
            if older is None or record.steps >= older.steps:
                rows[_key(record)] = record
        document = {"rows": [_row(record) for record in rows.values()]}
        with suppress(InputError):
            write_text(self._run.plan_file, json.dumps(document, indent=1))

    def _records(self) -> list[CalibrationRecord]:
        """Of the batch sizes so far, and of the one that is next."""
        training = self._training
        following = training.recipe.batches.batch_at(training.progress.tokens)
        return [self._record(size) for size in dict.fromkeys((*self._seen, following))]

    def _record(self, batch_tokens: int) -> CalibrationRecord:
        training, seconds = self._training, self._seconds.get(batch_tokens)
        held = max(self._memory.get(batch_tokens, 0.0), self._elsewhere) - self._footing / GIB
        took = StepCost(step_seconds=median(seconds), memory_gib=held if held > 0 else None) if seconds else None
        size, forwards = training.forwards(batch_tokens // training.recipe.model.seq_len)
        how = Arrangement(training.recipe.layout, size, forwards)
        record = record_of(training.recipe, training.device, batch_tokens, how)
        return record.model_copy(update={"measured": took, "steps": len(seconds or ())})


def record_of(recipe: Recipe, device: torch.device, batch_tokens: int, how: Arrangement) -> CalibrationRecord:
    """What is known of a step before one is measured."""
    name, accelerator = device_name(device), accelerator_of(device)
    return CalibrationRecord(
        by="run",
        device=name,
        accelerator=accelerator.name if accelerator else None,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        compute=recipe.precision.compute,
        model=recipe.model,
        layout=recipe.layout,
        batch_tokens=batch_tokens,
        micro_batch=how.micro_batch,
        grad_accumulation=how.grad_accumulation,
        predicted=predicted(recipe.model, how, accelerator.name, recipe.precision.compute) if accelerator else None,
        measured=None,
        steps=0,
        torch=version("torch"),
        leaven=__version__,
        seconds=round(time.time(), 3),
    )


def _key(record: CalibrationRecord) -> tuple[object, ...]:
    """What makes two starts measure the same."""
    return record.device, record.threads, record.layout, record.compute, record.batch_tokens, record.micro_batch


def _row(record: CalibrationRecord) -> dict[str, Any]:
    said, took = record.predicted, record.measured
    ratio: dict[str, float | None] | None = None
    if said is not None and took is not None:
        memory = took.memory_gib / said.memory_gib if took.memory_gib and said.memory_gib else None
        ratio = {"step_seconds": took.step_seconds / said.step_seconds, "memory_gib": memory}
    return record.model_dump(mode="json") | {"params": record.model.params, "measured_over_predicted": ratio}


def _rows(run: RunFolder) -> list[CalibrationRecord]:
    """Of the starts before; what is damaged is measured again."""
    try:
        return [
            CalibrationRecord.model_validate_json(json.dumps(row))
            for row in json.loads(run.plan_file.read_bytes())["rows"]
        ]
    except (OSError, ValueError, TypeError, KeyError, ValidationError):
        return []
