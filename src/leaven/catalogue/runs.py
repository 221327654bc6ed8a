"""Published training runs: one TOML file each in ``runs/``, with the tables of :mod:`leaven.catalogue.groups`.

The file's name is the run's id. Runs that leaven tuned itself have a table ``[tuning]``.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from leaven.catalogue import groups
from leaven.catalogue.groups import NormPlacement, Optimizer
from leaven.documents.catalogue import DifferenceRow, RunSummary
from leaven.errors import InputError
from leaven.recipe.base import Part
from leaven.recipe.recipe import differing, flatten
from leaven.recipe.schedule import Decay
from leaven.recipe.units import listed

FOLDER = Path(__file__).parent / "runs"
Kind = Literal["dense", "moe", "vlm"]
_DECAYS: dict[str, Decay] = {
    "cosine": "cosine",
    "cosine_then_constant": "cosine",
    "linear": "linear",
    "wsd": "wsd",
    "multi_step": "wsd",  # constant, then steps down late: the nearest of leaven's shapes
    "constant_then_rsqrt": "inverse_sqrt",
    "constant": "constant",
}
# Keys of sources and of free text, which are not values of the run.
_NOT_VALUES = {"source", "confidence", "evidence", "exceptions", "derived", "notes", "instabilities"}
# Spellings of 1 / sqrt(number of residual branches). L and N are the number of layers, each with two branches.
_BY_DEPTH = ("1/sqrt(2L)", "1/sqrt(2N)", "1/sqrt(number of residual layers)")


def same_lr_meaning(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers whose lrs are comparable to the lrs of ``optimizer``."""
    return ("adam", "adamw") if optimizer in ("adam", "adamw") else (optimizer,)


class Stack(NamedTuple):
    """Norm placement, QK-norm and optimizer. In the stack of a run, None means unknown; in a wanted stack, it means
    any value."""

    norm_placement: NormPlacement | None = None
    qk_norm: bool | None = None
    optimizer: Optimizer | None = None

    def fits(self, other: "Stack") -> bool:
        """Return whether ``other`` has the values of this stack that are not None. Adam counts as AdamW."""
        return (
            self.norm_placement in (None, other.norm_placement)
            and self.qk_norm in (None, other.qk_norm)
            and (self.optimizer is None or other.optimizer in same_lr_meaning(self.optimizer))
        )

    @property
    def text(self) -> str:
        """Return the known values in one line, for example ``output, qk-norm, adamw``."""
        qk_norm = {True: "qk-norm", False: "no qk-norm", None: None}[self.qk_norm]
        return ", ".join(part for part in (self.norm_placement, qk_norm, self.optimizer) if part)


class PublishedRun(Part):
    """A published run, or a run that leaven tuned itself (with :attr:`tuning`).

    Fields have the values that the source states. Properties have leaven's names and units. None means unknown.
    """

    id: str
    family: str
    organisation: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$")]  # month of the model's release or of the run's start
    kind: Kind
    status: Literal["succeeded", "succeeded-with-interventions"]
    params_total: int
    params_active: int
    lineage: groups.Lineage
    params: groups.Params
    arch: groups.PublishedArchitecture
    data: groups.PublishedData | None = None
    batch: groups.PublishedBatch | None = None
    optim: groups.Optim | None = None
    schedule: groups.PublishedSchedule | None = None
    init: groups.PublishedInit | None = None
    precision: groups.PublishedPrecision | None = None
    parallel: groups.Parallel | None = None
    hardware: groups.Hardware | None = None
    throughput: groups.PublishedThroughput | None = None
    tuning: groups.TunedBase | None = None  # only for runs that leaven tuned itself
    instabilities: Annotated[tuple[groups.Instability, ...], Field(strict=False)] = ()
    notes: groups.Texts = ()

    @property
    def tokens(self) -> int | None:
        return self.data.tokens_total if self.data else None

    @property
    def seq_len(self) -> int | None:
        return self.data.seq_len if self.data else None

    @property
    def batch_tokens(self) -> int | None:
        """Return the final global batch in tokens."""
        return self.batch.global_batch_tokens if self.batch else None

    @property
    def constant_batch(self) -> bool:
        """Return whether the source states that the batch did not grow."""
        return bool(self.batch and self.batch.rampup and self.batch.rampup.kind == "none")

    @property
    def ramp(self) -> groups.BatchRamp | None:
        """Return how the batch grew, or None if it did not grow or if this is unknown."""
        return self.batch.rampup if self.batch and not self.constant_batch else None

    @property
    def batch_grew(self) -> bool | None:
        """Return whether the last batch was larger than the first; None if this is not known."""
        if self.ramp is None:
            return False if self.constant_batch else None
        stages = [stage["tokens"] for stage in self.ramp.stages or () if "tokens" in stage]
        return stages[-1] > stages[0] if stages else True

    @property
    def ramp_start_tokens(self) -> int | None:
        ramp = self.ramp
        if ramp is None:
            return None
        if ramp.stages:
            return ramp.stages[0].get("tokens")
        samples = ramp.start_samples
        return ramp.start_tokens or (samples * self.seq_len if samples and self.seq_len else None)

    @property
    def ramp_start(self) -> float | None:
        """Return (first batch of the ramp) / (final batch), if known."""
        start = self.ramp_start_tokens
        return start / self.batch_tokens if start and self.batch_tokens else None

    @property
    def ramp_tokens(self) -> int | None:
        """Return the tokens after which the batch has its full size, if known."""
        if self.ramp is None:
            return None
        return self.ramp.stages[-1].get("from_tokens") if self.ramp.stages else self.ramp.over_tokens

    @property
    def stage_begins(self) -> list[float] | None:
        """Return the token counts at which the batch-size stages begin. Without stages: [0]. Unknown: None."""
        begins, steps = [0.0], 0
        for before, stage in pairwise((self.ramp and self.ramp.stages) or ()):
            if "from_tokens" in stage:
                begins.append(stage["from_tokens"])
            elif "from_fraction" in stage and self.tokens:
                begins.append(stage["from_fraction"] * self.tokens)
            elif "from_step" in stage:
                begins.append(begins[-1] + (stage["from_step"] - steps) * before["tokens"])
                steps = stage["from_step"]
            else:
                return None
        return begins

    @property
    def optimizer(self) -> Optimizer | None:
        return self.optim.optimizer if self.optim else None

    @property
    def peak_lr(self) -> float | None:
        return self.schedule.peak_lr if self.schedule else None

    @property
    def lr_sources(self) -> tuple[str, ...]:
        return self.schedule.provenance("peak_lr").sources if self.schedule else ()

    @property
    def lr_comparable(self) -> bool:
        return self.comparable_lr(same_lr_meaning("adamw"))

    def comparable_lr(self, optimizers: tuple[Optimizer, ...]) -> bool:
        """Return whether the lr is known, the optimizer is one of ``optimizers``, and the run does not use muP."""
        schedule = self.schedule
        return bool(schedule and schedule.peak_lr and not schedule.parametrisation) and self.optimizer in optimizers

    @property
    def min_lr_ratio(self) -> float | None:
        schedule = self.schedule
        if schedule is None:
            return None
        if schedule.min_lr_ratio is None and schedule.min_lr is not None and schedule.peak_lr:
            return schedule.min_lr / schedule.peak_lr
        return schedule.min_lr_ratio

    @property
    def warmup_fraction(self) -> float | None:
        schedule, tokens, batch = self.schedule, self.tokens, self.batch_tokens
        if schedule is None:
            return None
        if schedule.warmup_tokens is not None and tokens:
            return schedule.warmup_tokens / tokens
        if schedule.warmup_steps is not None and tokens and batch and self.ramp is None:
            return schedule.warmup_steps * batch / tokens
        return schedule.warmup_fraction

    @property
    def warmup_tokens(self) -> float | None:
        """Return the warm-up in tokens. Steps are converted with the batch of each step."""
        if self.warmup_fraction is not None and self.tokens:
            return self.warmup_fraction * self.tokens
        steps, begins = self.schedule.warmup_steps if self.schedule else None, self.stage_begins
        start, full, over = self.ramp_start_tokens, self.batch_tokens, self.ramp_tokens
        if steps and self.ramp and self.ramp.kind == "linear" and start and full and over and full > start:
            rate = (full - start) / over  # the growth of the batch for each token
            within = min(steps, math.log(full / start) / rate)  # steps of the warm-up within the ramp
            return start / rate * math.expm1(rate * within) + (steps - within) * full
        if not (steps and begins and self.ramp and self.ramp.stages):
            return None
        total, left = 0.0, float(steps)
        for stage, begin, end in zip(self.ramp.stages, begins, [*begins[1:], math.inf], strict=True):
            taken = min(left, (end - begin) / stage["tokens"])
            total, left = total + taken * stage["tokens"], left - taken
        return total

    @property
    def cooldown_share(self) -> float | None:
        """Return the share of the run that the final cooldown took; None if unknown or the schedule is not wsd."""
        schedule = self.schedule
        if schedule is None or schedule.shape != "wsd":
            return None
        if schedule.decay_fraction is not None:
            return schedule.decay_fraction
        if schedule.decay_steps and schedule.total_steps:
            return schedule.decay_steps / schedule.total_steps
        return schedule.decay_tokens / self.tokens if schedule.decay_tokens and self.tokens else None

    @property
    def decay(self) -> Decay | None:
        return _DECAYS[self.schedule.shape] if self.schedule and self.schedule.shape else None

    @property
    def init_std(self) -> float | None:
        return self.init.std if self.init else None

    @property
    def init_scale(self) -> float | None:
        """Return init std x sqrt(d_model), which can be compared between widths."""
        return self.init_std * math.sqrt(self.arch.d_model) if self.init_std and self.arch.d_model else None

    @property
    def residual_init_std(self) -> float | None:
        """Return the init std of the matrices that write to the residual stream."""
        init, n_layers = self.init, self.arch.n_layers
        if init is None or init.residual_std is not None or init.std is None:
            return init.residual_std if init else None
        if init.residual_scaling in _BY_DEPTH and n_layers:
            return init.std / math.sqrt(2 * n_layers)
        return init.std if init.residual_scaling == "none" else None

    @property
    def tokens_per_parameter(self) -> float | None:
        return self.tokens / self.params_active if self.tokens else None

    @property
    def aspect(self) -> float | None:
        return self.arch.d_model / self.arch.n_layers if self.arch.d_model and self.arch.n_layers else None

    @property
    def mlp_ratio(self) -> float | None:
        return self.arch.d_ff / self.arch.d_model if self.arch.d_ff and self.arch.d_model else None

    @property
    def expert_ratio(self) -> float | None:
        arch = self.arch
        if not (arch.d_expert and arch.experts_per_token and arch.d_model):
            return None
        return (arch.experts_per_token + (arch.n_shared_experts or 0)) * arch.d_expert / arch.d_model

    @property
    def experts(self) -> tuple[int, int] | None:
        """Return (experts in a layer, experts that a token uses), or None for a dense model."""
        number, active = self.arch.n_experts, self.arch.experts_per_token
        return (number, active) if number and active else None

    @property
    def query_groups(self) -> float | None:
        return self.arch.n_heads / self.arch.n_kv_heads if self.arch.n_heads and self.arch.n_kv_heads else None

    @property
    def stack(self) -> Stack:
        """Return norm placement, QK-norm and optimizer. The best lr depends more on them than on the size."""
        return Stack(self.arch.norm_placement, self.arch.qk_norm, self.optimizer)

    def summary(self) -> RunSummary:
        """Return the row of ``leaven recipes list`` for this run."""
        return RunSummary(
            id=self.id,
            params=self.params_total,
            tokens=self.tokens,
            peak_lr=self.peak_lr,
            batch_tokens=self.batch_tokens,
            source="; ".join(self.lr_sources),
            params_active=self.params_active,
            kind=self.kind,
            optimizer=self.optimizer,
            decay=self.decay,
            lineage=self.lineage.name,
            lr_comparable=self.lr_comparable,
        )

    def flat(self) -> dict[str, Any]:
        """Return every known value by its dotted path, without sources and free text."""
        values = flatten(self.model_dump(exclude_none=True))
        return {path: value for path, value in values.items() if _NOT_VALUES.isdisjoint(path.split("."))}


def load_runs() -> tuple[PublishedRun, ...]:
    """Return all published runs, from small to large, without the runs that leaven tuned itself."""
    return tuple(run for run in _load(FOLDER) if run.tuning is None)


def own_runs() -> tuple[PublishedRun, ...]:
    """Return the small runs that leaven tuned itself, from small to large."""
    return tuple(run for run in _load(FOLDER) if run.tuning is not None)


def find_run(id: str) -> PublishedRun:
    """Return the published run with this id. Raise InputError if there is none."""
    known = [file.stem for file in FOLDER.glob("*.toml")]
    if id not in known:
        raise InputError(f"no published run {id!r}; did you mean {listed(closest(id, known))}?")
    return _read(FOLDER / f"{id}.toml")


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the three known names most similar to ``name``."""
    return difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.0)


def diff(run_a: PublishedRun, run_b: PublishedRun) -> list[DifferenceRow]:
    """Return the values in which two runs differ, one row for each dotted path. An unknown value is None."""
    return [
        DifferenceRow(path=path, a=own, b=other)
        for path, own, other in differing(run_a.flat(), run_b.flat())
        if path != "id"
    ]


@cache  # the checks of a single recipe load the runs hundreds of times
def _load(folder: Path) -> tuple[PublishedRun, ...]:
    return tuple(sorted((_read(path) for path in folder.glob("*.toml")), key=lambda run: (run.params_total, run.id)))


@cache
def _read(path: Path) -> PublishedRun:
    try:
        return PublishedRun.model_validate(tomllib.loads(path.read_text(encoding="utf-8")) | {"id": path.stem})
    except ValueError as error:  # not TOML, or a wrong value
        error.add_note(f"the wrong file is {path.name}; leaven.catalogue.groups lists the allowed tables and keys")
        raise
