"""What runs and measurements on this machine took, a line each, beside what the planner had said.

The history lies in leaven's cache (``LEAVEN_CACHE``) and is for every run of the user. It is written at the end of a
run, which it must never harm: a disk without room or a folder that is read-only costs the line. Lines that are not of
this version of leaven are passed over.
"""

import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leaven import storage
from leaven.planning.arrangement import Arrangement
from leaven.planning.asked import in_precision
from leaven.planning.hardware import parse_cluster
from leaven.planning.memory import GIB, worst_stage
from leaven.planning.timing import step_time
from leaven.recipe.files import cache_folder
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

LIMIT_BYTES = 512 * 1024
"""Of a file of the history, about 400 lines. A full one takes the place of the one before it, which is given up."""

LOCK_SECONDS = 5.0
"""A line that has to wait for longer is given up."""


class Cost(BaseModel):
    """Of one optimiser step: seconds, and the most that tensors hold on a rank."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    step_seconds: float = Field(gt=0)
    memory_gib: float | None = Field(default=None, gt=0)


class Record(BaseModel):
    """One batch size of one start of a run, or a measurement.

    ``device`` is what its driver calls it, of a processor its kind; ``accelerator`` its name in the planner's table,
    None where it is not there, as then is ``predicted``. ``steps`` were measured, and ``seconds`` since 1970 is when.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    by: Literal["run", "measurement"]
    device: str
    accelerator: str | None
    threads: int | None = None
    compute: str
    model: ModelShape
    layout: Layout
    batch_tokens: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    grad_accumulation: int = Field(gt=0)
    predicted: Cost | None
    measured: Cost | None
    steps: int = Field(ge=0)
    torch: str
    leaven: str
    seconds: float

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.layout, self.micro_batch, self.grad_accumulation)


def predicted(model: ModelShape, how: Arrangement, accelerator: str, compute: str) -> Cost | None:
    """What the planner says of leaven's own step; None where it has no number.

    What can be measured of memory is what tensors hold, not the context and what fragments: neither is in it. What
    is said beside a run may not stop the run, whatever is wrong with it.
    """
    try:
        cluster = parse_cluster("cpu" if accelerator == "cpu" else f"{how.layout.ranks}x{accelerator}")
        cluster, code = in_precision(cluster, compute)
        memory = worst_stage(model, how, replace(code, fixed_gib=0.0, slack=0.0)).total / GIB
        return Cost(step_seconds=step_time(model, how, cluster, code).step, memory_gib=memory)
    except Exception:
        return None


def remember(record: Record, folder: Path | None = None) -> bool:
    """Add a line to the history; whether that could be done."""
    folder = folder or cache_folder()
    path = folder / "history.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with storage.lock(folder / ".history.lock", seconds=LOCK_SECONDS):
            storage.append(path, record.model_dump_json(exclude_defaults=True).encode() + b"\n")
            if path.stat().st_size > LIMIT_BYTES:
                path.replace(_before(path))
    except OSError:
        return False
    return True


def _before(path: Path) -> Path:
    return path.with_name("history-before.jsonl")


def history(folder: Path | None = None) -> list[Record]:
    """The records of this user, the oldest first."""
    path = (folder or cache_folder()) / "history.jsonl"
    return [*_records(_before(path)), *_records(path)]


def _records(path: Path) -> Iterator[Record]:
    with suppress(OSError):
        for line in storage.read_json_lines(path).documents:
            with suppress(ValidationError):
                yield Record.model_validate(line)


def processor() -> str:
    """The kind of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
