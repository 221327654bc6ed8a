"""Measures the time and memory of training steps, in a run (:class:`RunProfile`) or on random tokens
(:func:`measure`). The results are added to the calibration history (:mod:`leaven.planning.calibration`)."""

import json
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from leaven import __version__, storage
from leaven.data.shards import ShardedTokens, Shards
from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement
from leaven.planning.calibration import CalibrationRecord, StepCost, predicted, remember
from leaven.planning.flops import flops_per_token
from leaven.planning.hardware import parse_cluster
from leaven.planning.memory import GIB
from leaven.planning.training_codes import LEAVEN_BF16
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.storage import write_text
from leaven.training.checkpoint import Progress
from leaven.training.device import (
    DTYPES,
    accelerator_of,
    best_matmul,
    default_device,
    device_name,
    free_memory,
    held_memory,
    peak_memory,
    reset_peak_memory,
    unless_out_of_memory,
)
from leaven.training.engine import StopRequested, Training
from leaven.training.loop import Callback
from leaven.training.metrics import Step
from leaven.training.micro_batch import SHARE, needed_memory, rule_of_thumb
from leaven.training.run_folder import IDENTITY, RunFolder

WARM_UP = 3  # first steps of each batch size, not measured: they compile, fill caches and allocate memory
KEPT = 1_000  # the median step time covers at most so many of the latest steps
ENOUGH = 10  # steps that a measurement needs to be added to the calibration history


class RunProfile(Callback):
    """Measures the step time and peak memory of a run, from a start to the next stop, for each batch size. A row in
    ``plan.json`` replaces an older one of the same batch size and setup, unless that has more steps."""

    def __init__(
        self,
        run: RunFolder,
        training: Training,
        memory_before: int,
        keep_history: bool,
        on_event: Callable[[str, dict[str, Any]], None] = lambda event, values: None,
    ) -> None:
        self._run, self._training, self._keep_history, self._on_event = run, training, keep_history, on_event
        self._memory_before = memory_before  # bytes in use before the model was built
        self._seen: Counter[int] = Counter()
        self._seconds: dict[int, deque[float]] = {}
        self._memory: dict[int, float] = {}
        self.highest_memory = 0.0  # GiB, of the process that uses the most
        self._batch_tokens = 0
        self._before: list[CalibrationRecord] | None = None  # rows of earlier starts; None until they are read

    def after_step(self, step: Step) -> None:
        size = self._batch_tokens = step.batch_tokens
        self._seen[size] += 1
        if self._seen[size] > WARM_UP:
            self._seconds.setdefault(size, deque(maxlen=KEPT)).append(step.seconds)
            self._memory[size] = step.memory_gib

    def write(self) -> list[CalibrationRecord]:
        """Write the measurements of this and earlier starts of the run to ``plan.json``. Ignore a failed write.
        Return the records of this start, one for each batch size, or [] if this process writes no files."""
        if not (self._run.writes and self._run.identity):  # without an identifier, the start was refused
            return []
        if self._before is None:
            self._before = _rows(self._run)
        sizes = dict.fromkeys((*self._seen, self._training.next_batch_tokens))
        records, rows = list(map(self._record, sizes)), {_key(record): record for record in self._before}
        for record in records:
            older = rows.get(_key(record))
            if older is None or record.steps >= older.steps:
                rows[_key(record)] = record
        document = {IDENTITY: self._run.identity, "rows": [_row(record) for record in rows.values()]}
        with suppress(InputError):
            write_text(self._run.plan_file, json.dumps(document, indent=1))
        return records

    def close(self) -> None:
        """Write plan.json. With ``keep_history``, add the last batch size's measurement to the calibration history,
        if it has at least ``ENOUGH`` steps. If the history cannot be written, report the event ``history_lost``."""
        for record in self.write():
            add = self._keep_history and record.batch_tokens == self._batch_tokens and record.steps >= ENOUGH
            named = record.model_copy(update={"run": self._run.identity})
            if add and (why := remember(named)) is not None:
                self._on_event("history_lost", {"tokens": self._training.tokens, "why": why})

    def _record(self, batch_tokens: int) -> CalibrationRecord:
        training, seconds = self._training, self._seconds.get(batch_tokens)
        held = max(self._memory.get(batch_tokens, 0.0), self.highest_memory) - self._memory_before / GIB
        measured = StepCost(step_seconds=median(seconds), memory_gib=held if held > 0 else None) if seconds else None
        split = training.split(batch_tokens // training.recipe.model.seq_len)
        how, steps = Arrangement(training.recipe.layout, *split), len(seconds or ())
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
    """Return a record of a step: the predicted cost, and the measured cost (the median of ``steps`` steps)."""
    accelerator, shape, compute = accelerator_of(device), recipe.model, recipe.precision.compute
    uses: dict[str, Any] = {
        "ns_steps": recipe.hyperparameters.ns_steps,
        "averages": recipe.average is not None,
        "documents": recipe.data.documents,
    }
    planned = predicted(shape, how, accelerator.name, compute, **uses) if accelerator else None
    return CalibrationRecord(
        by=by,
        device=device_name(device),
        accelerator=accelerator.name if accelerator else None,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        compute=compute,
        model=shape,
        layout=recipe.layout,
        batch_tokens=batch_tokens,
        micro_batch=how.micro_batch,
        grad_accumulation=how.grad_accumulation,
        **uses,
        predicted=planned,
        measured=measured,
        steps=steps,
        torch=str(torch.__version__),
        leaven=__version__,
        seconds=round(time.time(), 3),
    )


def _key(record: CalibrationRecord) -> tuple[object, ...]:
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
    """Return the rows of plan.json. Return [] if the file is missing, damaged or of another run."""
    try:
        document = json.loads(storage.read(run.plan_file))
        rows = document["rows"] if document[IDENTITY] == run.identity else []
        return [CalibrationRecord.model_validate_json(json.dumps(row)) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # a ValidationError is a ValueError
        return []


UNTIMED_STEPS, TIMED_STEPS = 2, 3  # steps of a measurement, the untimed ones first
FORWARDS = 2  # most forward passes of a measured step; with one, the optimizer has too large a share of the time
SHORT_SECONDS = 10.0  # if a step is estimated to take longer, the model is measured with fewer layers
USUAL_SHARE = 0.5  # a step is first assumed to reach this share of the best matmul speed


@dataclass(frozen=True)
class Measurement:
    record: CalibrationRecord  # time and memory at the recipe's depth
    layers: tuple[int, ...]  # the depths that were measured: that of the recipe, or two smaller ones
    matmul_tflops: float  # speed of the fastest matmul on this device in the recipe's dtype
    unsaved: str | None  # why the record is not in the calibration history; None if it is


def measure(
    recipe: Recipe,
    gpus: str,
    *,
    on_step: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Measurement | None:
    """Measure a few steps of a recipe's model on random tokens, and add the result to the calibration history.
    Return the result, or None if ``stop`` has returned True.

    A model that is too large or too slow is measured at two smaller depths, and extrapolated linearly.
    ``gpus`` is the plan's cluster, such as "8xH100". Raise InputError if this machine lacks its accelerator,
    or if not even two layers fit into memory.
    """
    device = default_device()
    _require_accelerator(device, gpus)
    memory_before = held_memory(device)
    flops = best_matmul(device, DTYPES[recipe.precision.compute], torch.get_num_threads())
    recipe, how = _short(recipe, device, flops)
    full = recipe.model.n_layers
    shortest, deepest = min(2, full), full
    while deepest and not _fits(recipe.replace({"model.n_layers": deepest}), how, device, flops):
        deepest -= 1

    def at_depths(depths: tuple[int, ...]) -> list[StepCost]:
        done, total = count(1), len(depths) * (UNTIMED_STEPS + TIMED_STEPS)
        shallow = [recipe.replace({"model.n_layers": depth}) for depth in depths]
        found = [
            _measure_steps(each, device, memory_before, stop, lambda: on_step(next(done), total)) for each in shallow
        ]
        return [cost for cost in found if cost is not None]

    depths: tuple[int, ...] = (full,)
    costs: list[StepCost] = []
    try:
        while len(costs) < len(depths):
            if deepest < shortest:
                raise InputError(
                    f"not even {shortest} layers of this model fit on {device_name(device)}, which has "
                    f"{free_memory(device) / GIB:.3g} GiB free; use a smaller model or a shorter [model] seq_len"
                )
            depths = (full,) if deepest == full else (deepest // 2, deepest)
            costs = at_depths(depths)
            deepest //= 2
    except StopRequested:
        return None
    took = costs[0] if depths == (full,) else _extrapolated(depths, costs, full)
    record = record_of(recipe, device, recipe.batch.tokens, how, took, by="measurement", steps=TIMED_STEPS)
    return Measurement(record, depths, flops / 1e12, remember(record))


def _require_accelerator(device: torch.device, gpus: str) -> None:
    wanted, here = parse_cluster(gpus).accelerator, accelerator_of(device)
    if here is None or here.name != wanted.name:
        name = "a processor (--gpus cpu)" if device.type == "cpu" else device_name(device)
        raise InputError(
            f"--measure takes steps on this machine, which has {name} but no {wanted.name}; "
            f"use a machine with {wanted.name}, or leave out --measure"
        )


def _short(recipe: Recipe, device: torch.device, flops: float) -> tuple[Recipe, Arrangement]:
    """Return the recipe changed to run short steps on one device, and their arrangement: two micro-batches, or only
    one if the batch is too small or two would take too long."""
    seq_len, layout = recipe.model.seq_len, recipe.layout
    sequences = max(recipe.batch.tokens // seq_len // layout.dp, 1)
    size = min(rule_of_thumb(recipe, device.type), sequences)
    forwards = min(FORWARDS, sequences // size)
    if _seconds(recipe, size * forwards, flops) > SHORT_SECONDS:
        forwards = 1
    layout = Layout(recompute=layout.recompute, compile=layout.compile)
    changes = {
        "layout": layout.model_dump(),
        "batch": {"tokens": size * forwards * seq_len, "micro_batch": size},
        "scaling.base": None,  # hyperparameters do not matter here
        "start": {},
        "stability": {},
    }
    return recipe.replace(changes), Arrangement(layout, size, forwards)


def _seconds(recipe: Recipe, sequences: int, flops: float) -> float:
    return sequences * recipe.model.seq_len * flops_per_token(recipe.model) / (USUAL_SHARE * flops)


def _fits(recipe: Recipe, how: Arrangement, device: torch.device, flops: float) -> bool:
    """Return whether a step should fit into memory and, above two layers, take at most ``SHORT_SECONDS`` seconds."""
    needed = needed_memory(recipe, how.micro_batch, device.type) + LEAVEN_BF16.weights * recipe.model.params
    quick = _seconds(recipe, how.micro_batch * how.grad_accumulation, flops) <= SHORT_SECONDS
    return needed <= SHARE[device.type] * free_memory(device) and (quick or recipe.model.n_layers <= 2)


def _extrapolated(depths: tuple[int, ...], costs: list[StepCost], full: int) -> StepCost:
    def line(low: float, high: float) -> float:
        return high + (full - depths[1]) * max(high - low, 0.0) / (depths[1] - depths[0])

    low, high = costs
    held = line(low.memory_gib, high.memory_gib) if low.memory_gib and high.memory_gib else None
    return StepCost(step_seconds=line(low.step_seconds, high.step_seconds), memory_gib=held)


def _measure_steps(
    recipe: Recipe, device: torch.device, memory_before: int, stop: Callable[[], bool], on_step: Callable[[], None]
) -> StepCost | None:
    def work() -> list[float]:
        training = Training(recipe, random_tokens(recipe))
        training.stop = stop
        seconds = []
        for _ in range(UNTIMED_STEPS + TIMED_STEPS):
            training.progress = Progress()
            seconds.append(training.issue()().seconds)
            on_step()
        return seconds

    reset_peak_memory(device)
    seconds = unless_out_of_memory(work, device)
    if seconds is None:
        return None
    held = (peak_memory(device) - memory_before) / GIB
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return StepCost(step_seconds=median(seconds[UNTIMED_STEPS:]), memory_gib=held if held > 0 else None)


def random_tokens(recipe: Recipe) -> TokenSet:
    """Return one batch of random tokens. They suffice to time steps: the text does not matter."""
    model = recipe.model
    length = recipe.batch.tokens + 1
    ids = ShardedTokens([np.random.default_rng(0).integers(model.vocab_size, size=length, dtype=np.uint32)])
    return TokenSet(
        names=("random",),
        proportions=(Fraction(1),),
        sources=(Shards(ids, ids, length, length, "random", ()),),
        vocab_size=model.vocab_size,
        end_of_text=0,
        fingerprint="random",
        tokenizer_path=Path(),
    )
