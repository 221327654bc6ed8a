"""Record the measured step time and memory of runs in the calibration history, and use them to correct later plans.

The history is two JSON Lines files in leaven's cache folder (``LEAVEN_CACHE``): the current file, and the previous
file, which is full. A record that cannot be written is dropped, and :func:`remember` returns why.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leaven import storage
from leaven.documents.planning import CalibrationRow
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement
from leaven.planning.hardware import parse_cluster
from leaven.planning.memory import GIB, worst_stage
from leaven.planning.this_machine import processor
from leaven.planning.timing import step_time
from leaven.planning.training_codes import in_precision
from leaven.recipe.files import cache_folder
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

# File names: the file that records are appended to, and the previous, full file.
_NAME, _FULL = "history.jsonl", "history-before.jsonl"
# Factors between the numbers of parameters of a past run and a plan; see :func:`calibration`.
NEAR, FAR = 4.0, 16.0
NEWEST = 100  # only so many runs correct a plan, because older runs may have used other versions of leaven
LIMIT_BYTES = 512 * 1024  # size of a full history file, about 400 lines; it replaces the previous full file
LOCK_SECONDS = 5.0  # how long to wait for the lock before the record is dropped


class StepCost(BaseModel):
    """The time and memory of one optimizer step."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    step_seconds: float = Field(gt=0)
    memory_gib: float | None = Field(default=None, gt=0)  # peak memory of the tensors on a rank


class CalibrationRecord(BaseModel):
    """A line of the calibration history: the predicted and the measured cost of a step at one batch size."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    by: Literal["run", "measurement"]  # written by a training run, or by ``leaven plan --measure``
    device: str  # the name that the driver reports, or the processor's model
    accelerator: str | None  # name in the planner's table of accelerators; None if not in the table
    threads: int | None = None  # threads of torch on a CPU; None on a GPU
    compute: str  # dtype of the computation
    model: ModelShape
    layout: Layout
    batch_tokens: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    grad_accumulation: int = Field(gt=0)
    ns_steps: int = 0  # Newton-Schulz iterations of Muon in a step; 0: without Muon
    averages: bool = False  # whether the run kept an average of its weights
    documents: str = "packed"  # ``data.documents`` of the run
    predicted: StepCost | None  # None for an accelerator that is not in the table
    measured: StepCost | None  # None if no step was measured
    steps: int = Field(ge=0)  # number of measured steps
    torch: str  # version of torch
    leaven: str  # version of leaven
    seconds: float  # time of writing, in seconds since 1970
    run: str = ""  # identifier of the run, each start of which writes a record

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.layout, self.micro_batch, self.grad_accumulation)


def predicted(
    model: ModelShape,
    how: Arrangement,
    accelerator: str,
    compute: str,
    *,
    ns_steps: int = 0,
    averages: bool = False,
    documents: str = "packed",
) -> StepCost | None:
    """Return the planned time and memory of a step of leaven's trainer, or None if the step cannot be planned."""
    try:
        cluster = parse_cluster("cpu" if accelerator == "cpu" else f"{how.layout.ranks}x{accelerator}")
        cluster, code = in_precision(cluster, compute)
        code = code.with_muon(ns_steps).averaging(averages).isolating(documents)
        memory = worst_stage(model, how, code.tensors_only()).total / GIB
        return StepCost(step_seconds=step_time(model, how, cluster, code).step, memory_gib=memory)
    except Exception:  # a failed prediction must not stop a training run
        return None


def remember(record: CalibrationRecord) -> str | None:
    """Append a record to the calibration history. Return None, or why the record was not written."""
    folder = cache_folder()
    path = folder / _NAME
    try:
        storage.require_target(folder, "bring it back, or set LEAVEN_CACHE")
        folder.mkdir(parents=True, exist_ok=True)
        with storage.lock(folder / ".history.lock", seconds=LOCK_SECONDS):
            storage.append(path, record.model_dump_json(exclude_defaults=True).encode() + b"\n")
            if path.stat().st_size > LIMIT_BYTES:
                path.replace(folder / _FULL)
    except InputError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return None


def history(on_fault: Callable[[str], None] = lambda fault: None) -> list[CalibrationRecord]:
    """Return the records in this user's calibration history, the oldest first.

    Records of other versions of leaven that this version cannot read are left out. ``on_fault`` is called with a
    sentence about each file that cannot be read or has damaged lines.
    """
    found, faults = [], []
    for path in (cache_folder() / _FULL, cache_folder() / _NAME):
        try:
            storage.require_target(path, "bring it back, because the earlier runs in it correct planned times")
            read = storage.read_json_lines(path)
        except InputError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{path}: cannot be read: {error.strerror}; make it readable to use its runs")
        else:
            if skipped := read.skipped(path):
                faults.append(
                    f"{skipped}; the other lines are used to correct planned times; remove the damaged lines"
                )
            for line in read.documents:
                with suppress(ValidationError):
                    found.append(CalibrationRecord.model_validate(line))
    for fault in dict.fromkeys(faults):  # both files may be behind the same link
        on_fault(fault)
    return found


def calibration(
    records: Iterable[CalibrationRecord],
    accelerator: str,
    params: int,
    layout: Layout,
    *,
    compute: str,
    step_seconds: float,
) -> CalibrationRow | None:
    """Return factors that correct the planned time and memory of a model, or None without usable records.

    A factor is the weighted median of measured / predicted over past runs. The current planner makes the predictions.
    A run has the weight 1 / (1 + log2(r) + d). Here r is the ratio of the parameter counts of run and model, the
    larger divided by the smaller, and d is the number of :func:`_features` in which their layouts differ. Three steps
    select the runs:

    1. Keep the runs with the same dtype and accelerator (on a CPU: the same processor) and with r up to 16. The step
       time of much smaller models depends on the host.
    2. If some of them have r up to 4 and d = 0, keep only these.
    3. Keep the newest 100.

    ``params``, ``layout`` and ``step_seconds`` (uncorrected, copied to the result) belong to the plan.
    """
    found: list[tuple[bool, float, CalibrationRecord, StepCost]] = []
    device = processor() if accelerator == "cpu" else None
    for record in records:
        ratio = max(record.model.params, params) / min(record.model.params, params)
        alike = record.accelerator == accelerator and device in {None, record.device} and record.compute == compute
        if alike and record.measured is not None and ratio <= FAR:
            differ = len(_features(record.layout) ^ _features(layout))
            found = [each for each in found if not record.run or each[2].run != record.run]  # its last start counts
            found.append((ratio <= NEAR and not differ, 1 / (1 + math.log2(ratio) + differ), record, record.measured))
    if any(near for near, *_ in found):
        found = [each for each in found if each[0]]
    times, memories = [], []
    found = found[-NEWEST:]
    for _, weight, record, took in found:
        expected = predicted(
            record.model,
            record.arrangement,
            accelerator,
            compute,
            ns_steps=record.ns_steps,
            averages=record.averages,
            documents=record.documents,
        )
        expected = expected or record.predicted  # if the current planner cannot plan the run
        if expected is None:
            continue
        times.append((took.step_seconds / expected.step_seconds, weight))
        if took.memory_gib is not None and expected.memory_gib is not None:
            memories.append((took.memory_gib / expected.memory_gib, weight))
    if not times:
        return None
    time, low, high = weighted_median(times), min(times)[0], max(times)[0]
    measurement = len(found) == 1 and found[0][2].by == "measurement"
    runs = "a measurement" if measurement else "1 run" if len(times) == 1 else f"{len(times)} runs"
    threads = sorted({record.threads for *_, record, _ in found if record.threads is not None})
    using = f" with {' or '.join(map(str, threads))} CPU thread{'s' * (threads[-1] > 1)}" if threads else ""
    spread = f" ({low:.3g} to {high:.3g})" if len(times) > 1 else ""
    return CalibrationRow(
        time=time,
        memory=weighted_median(memories) if memories else None,
        runs=len(times),
        low=low,
        high=high,
        measurement=measurement,
        uncalibrated_step_seconds=step_seconds,
        says=f"x{time:.3g} from {runs} on this accelerator{using}{spread}",
    )


def weighted_median(values: list[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs. If two values qualify, return their mean.

    >>> weighted_median([(1.0, 1.0), (9.0, 1.0)]), weighted_median([(1.0, 1.0), (2.0, 1.0), (9.0, 1.5)])
    (5.0, 2.0)
    """
    values = sorted(values)
    half, below = sum(weight for _, weight in values) / 2, 0.0
    for (value, weight), (following, _) in pairwise(values):
        below += weight
        if math.isclose(below, half):
            return (value + following) / 2
        if below > half:
            return value
    return values[-1][0]


def _features(layout: Layout) -> set[str]:
    """Return the layout's features that affect the planner's error, such as ``{"tp", "recompute"}``."""
    degrees = {key for key in ("dp", "tp", "pp", "cp") if getattr(layout, key) > 1}
    other = {"zero": layout.zero == 3, "recompute": layout.recompute == "full", "compile": layout.compile}
    return degrees | {key for key, there in other.items() if there}
