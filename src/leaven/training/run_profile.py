"""Measures the time and memory of a run's steps. The measurements are written to the run's ``plan.json``, next to
the planner's predictions, and added to the calibration history (:mod:`leaven.planning.calibration`)."""

import json
import time
from collections import Counter, deque
from contextlib import suppress
from importlib.metadata import version
from statistics import median
from typing import Any, Literal

import torch
from pydantic import ValidationError

from leaven import __version__
from leaven.planning.arrangement import Arrangement
from leaven.planning.calibration import CalibrationRecord, StepCost, predicted, remember
from leaven.planning.memory import GIB
from leaven.recipe.errors import InputError
from leaven.recipe.files import write_text
from leaven.recipe.recipe import Recipe
from leaven.training.device import (
    accelerator_of,
    device_name,
)
from leaven.training.engine import Training
from leaven.training.loop import Callback
from leaven.training.run_folder import RunFolder
from leaven.training.step_metrics import Step

WARM_UP = 3
"""After each start of a run, this many first steps of each batch size are not measured: they compile, fill caches and
allocate memory."""

KEPT = 1_000
"""The median step time covers at most this many of the latest steps of a batch size."""

ENOUGH = 10
"""A measurement is added to the calibration history if it covers at least this many steps."""


class RunProfile(Callback):
    """Measures the step time and peak memory of a run, from a start (or resumption) of the run to its next stop.

    ``plan.json`` gets a row for each batch size. A new row replaces the row that an earlier start has written for the
    same settings (:func:`_key`), but only if the new row covers at least as many steps.
    """

    def __init__(self, run: RunFolder, training: Training, memory_before: int, keep_history: bool) -> None:
        self._run, self._training, self._keep_history = run, training, keep_history
        self._memory_before = memory_before  # bytes in use before the model was built
        self._seen: Counter[int] = Counter()
        self._seconds: dict[int, deque[float]] = {}
        self._memory: dict[int, float] = {}
        self.highest_memory = 0.0  # GiB, of the process that uses the most
        self._batch_tokens = 0
        self._before = _rows(run) if run.writes else []

    def after_step(self, step: Step) -> None:
        size = self._batch_tokens = step.batch_tokens
        self._seen[size] += 1
        if self._seen[size] > WARM_UP:
            self._seconds.setdefault(size, deque(maxlen=KEPT)).append(step.seconds)
            self._memory[size] = step.memory_gib

    def write(self) -> list[CalibrationRecord]:
        """Write the rows of this and all earlier starts to ``plan.json``. Return the records of this start: one for
        each batch size that was trained, and one for the batch size of the next step if that size is new. If the file
        cannot be written, the run continues without it."""
        if not self._run.writes:
            return []
        sizes = dict.fromkeys((*self._seen, self._training.next_batch_tokens))
        records, rows = list(map(self._record, sizes)), {_key(record): record for record in self._before}
        for record in records:
            older = rows.get(_key(record))
            if older is None or record.steps >= older.steps:
                rows[_key(record)] = record
        document = {"rows": [_row(record) for record in rows.values()]}
        with suppress(InputError):
            write_text(self._run.plan_file, json.dumps(document, indent=1))
        return records

    def close(self) -> None:
        """Write the rows. Add the record of the last batch size to the calibration history if it covers at least
        :data:`ENOUGH` steps."""
        for record in self.write():
            if self._keep_history and record.batch_tokens == self._batch_tokens and record.steps >= ENOUGH:
                remember(record)

    def _record(self, batch_tokens: int) -> CalibrationRecord:
        training, seconds = self._training, self._seconds.get(batch_tokens)
        held = max(self._memory.get(batch_tokens, 0.0), self.highest_memory) - self._memory_before / GIB
        measured = StepCost(step_seconds=median(seconds), memory_gib=held if held > 0 else None) if seconds else None
        size, forwards = training.forwards(batch_tokens // training.recipe.model.seq_len)
        how, steps = Arrangement(training.recipe.layout, size, forwards), len(seconds or ())
        return record_of(training.recipe, training.device, batch_tokens, how, measured, by="run", steps=steps)


def record_of(
    recipe: Recipe,
    device: torch.device,
    batch_tokens: int,
    how: Arrangement,
    measured: StepCost | None,
    *,
    by: Literal["run", "measurement"],
    steps: int,
) -> CalibrationRecord:
    """Return a record of the predicted and the measured cost of a step. The ``measured`` time is the median over
    ``steps`` steps."""
    accelerator = accelerator_of(device)
    return CalibrationRecord(
        by=by,
        device=device_name(device),
        accelerator=accelerator.name if accelerator else None,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        compute=recipe.precision.compute,
        model=recipe.model,
        layout=recipe.layout,
        batch_tokens=batch_tokens,
        micro_batch=how.micro_batch,
        grad_accumulation=how.grad_accumulation,
        predicted=predicted(recipe.model, how, accelerator.name, recipe.precision.compute) if accelerator else None,
        measured=measured,
        steps=steps,
        torch=version("torch"),
        leaven=__version__,
        seconds=round(time.time(), 3),
    )


def _key(record: CalibrationRecord) -> tuple[object, ...]:
    """Return the values that identify a row of ``plan.json``. Records with equal values share one row."""
    return record.device, record.threads, record.layout, record.compute, record.batch_tokens, record.micro_batch


def _row(record: CalibrationRecord) -> dict[str, Any]:
    predicted, measured = record.predicted, record.measured
    ratio: dict[str, float | None] | None = None
    if predicted is not None and measured is not None:
        memory = None
        if measured.memory_gib and predicted.memory_gib:
            memory = measured.memory_gib / predicted.memory_gib
        ratio = {"step_seconds": measured.step_seconds / predicted.step_seconds, "memory_gib": memory}
    return record.model_dump(mode="json") | {"params": record.model.params, "measured_over_predicted": ratio}


def _rows(run: RunFolder) -> list[CalibrationRecord]:
    """Return the records in ``plan.json`` from earlier starts of the run. If this file is missing or damaged, the
    list is empty."""
    try:
        return [
            CalibrationRecord.model_validate_json(json.dumps(row))
            for row in json.loads(run.plan_file.read_bytes())["rows"]
        ]
    except (OSError, ValueError, TypeError, KeyError, ValidationError):
        return []
