"""Search for the fastest layout that the model, the batch and the memory allow.

Every layout of :func:`layouts` is tried. If a micro-batch size does not fit into memory, its multiples are skipped.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from pydantic import ValidationError

from leaven.documents.planning import CalibrationRow, CandidateRow
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement, pipeline_refusal, tensor_degrees
from leaven.planning.blueprint import Model, blueprint
from leaven.planning.hardware import Cluster
from leaven.planning.memory import GIB, Memory, worst_stage
from leaven.planning.timing import StepTime, step_time
from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode
from leaven.recipe.batch import Batch
from leaven.recipe.layout import Layout, Recompute
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import listed

# Share of an accelerator's memory that a layout may need: on published runs, the planner underestimates memory by up
# to 16% (docs/evidence/planner-accuracy.md).
USABLE = 0.85
# Up to this many tokens per forward pass, a larger micro-batch saves kernel launches; above, it gains nothing.
_ENOUGH_TOKENS = 8192
# Largest micro-batch that is searched, in tokens: the largest of 131 published runs of MPT. These have up to 64
# sequences, but the host of a small model with short sequences needs less time for a micro-batch of more.
_MOST_TOKENS = 65_536
_LEAST_CONTEXT = 4096  # tokens of a sequence that context parallelism leaves each rank at least
_STAGES_PER_RANK = (1, 2, 4, 8)  # more stages send too many messages
_EXPERT_DEGREES = (2, 4, 8, 16, 32, 64, 128, 256)
FILLS = 4  # micro-batches per pipeline rank that keep the bubble small: a rule of thumb (Narayanan et al. 2021)
EQUAL = 0.01  # times that differ by less than this share count as equal
# A layout that leaven cannot train is mentioned if faster by this share than all layouts that leaven can train.
_MENTIONED_IF_FASTER_BY = 0.02


@dataclass(frozen=True)
class Job:
    """The input of a layout search."""

    model: Model
    batch: Batch  # global batch and its ramp; if its micro-batch is "auto", the search chooses the micro-batch
    cluster: Cluster
    code: TrainingCode = LEAVEN_BF16  # the program that trains
    by_leaven: bool = True  # choose only layouts that leaven can train
    compile: bool = False  # blocks are compiled in every layout
    calibration: CalibrationRow | None = None  # correction of planned times by earlier runs on this accelerator

    @property
    def slower(self) -> float:
        return self.calibration.time if self.calibration else 1.0

    @property
    def micro_batch(self) -> int | None:
        """The required micro-batch size in sequences, or None if the search chooses the size."""
        return None if self.batch.micro_batch == "auto" else self.batch.micro_batch

    def with_micro_batch(self, micro_batch: int | Literal["auto"]) -> "Job":
        return replace(self, batch=self.batch.model_copy(update={"micro_batch": micro_batch}))

    def arrangements(self, layout: Layout) -> list[Arrangement]:
        """Return one arrangement of the layout for each possible micro-batch size, the smallest first.

        Without a required size, sizes up to 65,536 tokens are tried. A size must divide the sequences of a rank, and
        even the smallest batch must give each rank at least pp micro-batches. Raise InputError if no size can.
        """
        seq_len, given = self.model.seq_len, self.micro_batch
        sequences = self.batch.tokens // seq_len
        share, rest = divmod(sequences, layout.dp)
        most = max(1, _MOST_TOKENS // seq_len)
        sizes = [size for size in range(1, min(share, most) + 1) if share % size == 0]
        if rest or share % (given or 1):
            unit, over = layout.dp * (given or 1), f"dp {layout.dp}" + (f" x micro-batch {given}" if given else "")
            would = f"a batch of {max(round(sequences / unit), 1) * unit * seq_len:,} tokens"
            would += "" if rest else f" or micro-batch {listed(sizes)}"
            raise InputError(
                f"a batch of {sequences:,} sequences cannot be split evenly over {over}; {would} would work"
            )
        sizes = [given] if given else sizes
        refusals = [pipeline_refusal(layout, seq_len, self.batch.smallest_tokens, size) for size in sizes]
        if refusals[0] is not None:  # even the smallest micro-batch does not fill the pipeline
            raise InputError(f"layout {refusals[0]}")
        fills = [size for size, refusal in zip(sizes, refusals, strict=True) if refusal is None]
        return [Arrangement(layout, size, share // size) for size in fills]

    def time(self, how: Arrangement) -> StepTime:
        """Return the time of a step, corrected by the calibration if there is one."""
        return step_time(self.model, how, self.cluster, self.code).times(self.slower)


def worth_compiling(model: ModelShape, cluster: Cluster) -> bool:
    """Return whether a new recipe compiles its blocks: yes on GPUs, but never if the blocks have experts."""
    return cluster.accelerator.name != "cpu" and model.experts is None


@dataclass(frozen=True)
class LayoutCandidate:
    """An arrangement that a layout search considers. Its memory and time are computed when they are first used."""

    job: Job
    arrangement: Arrangement

    @cached_property
    def memory(self) -> Memory:
        return worst_stage(self.job.model, self.arrangement, self.job.code)

    @cached_property
    def time(self) -> StepTime:
        return self.job.time(self.arrangement)

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE * self.job.cluster.accelerator.memory_gib * GIB

    @property
    def trained(self) -> bool:
        """Whether leaven can train with the arrangement. It does not support context parallelism (cp above 1)."""
        return self.arrangement.layout.cp == 1

    def row(self) -> CandidateRow:
        return CandidateRow(
            layout=self.arrangement.to_json(), gib=self.memory.total / GIB, step_seconds=self.time.step
        )


@dataclass(frozen=True)
class Exploration:
    """The result of a layout search."""

    job: Job
    fitting: tuple[LayoutCandidate, ...]  # candidates that fit into memory, the best first
    # For each layout with candidates that do not fit, the one with the smallest micro-batch; the least memory first.
    too_large: tuple[LayoutCandidate, ...]
    refusal: InputError | None  # the error of the first layout that the batch does not allow; None: all are allowed

    @property
    def misfits(self) -> tuple[LayoutCandidate, ...]:
        return tuple(each for each in self.too_large if each.trained or not self.job.by_leaven)

    @cached_property
    def choices(self) -> tuple[LayoutCandidate, ...]:
        """The candidates that fit, the best first; with ``job.by_leaven``, only those that leaven can train."""
        if not self.job.by_leaven:
            return self.fitting
        return tuple(ranked([candidate for candidate in self.fitting if candidate.trained]))

    @cached_property
    def layouts(self) -> tuple[LayoutCandidate, ...]:
        """The best candidate in ``choices`` for each layout, the best layout first."""
        best: dict[Layout, LayoutCandidate] = {}
        for candidate in self.choices:
            best.setdefault(candidate.arrangement.layout, candidate)
        return tuple(best.values())

    @cached_property
    def pareto(self) -> tuple[LayoutCandidate, ...]:
        """The candidates in ``choices`` on the Pareto front of time and memory, the fastest first."""
        front: list[LayoutCandidate] = []
        for candidate in sorted(self.choices, key=lambda each: (each.time.step, each.memory.total)):
            if not front or candidate.memory.total < front[-1].memory.total:
                front.append(candidate)
        return tuple(front)

    @property
    def untrained(self) -> LayoutCandidate | None:
        """The fastest layout that fits but that leaven cannot train, if it is over 2% faster than ``choices[0]``.

        If ``choices`` is empty, any speed is enough. None if there is no such layout, or ``job.by_leaven`` is false.
        """
        beyond = next((candidate for candidate in self.fitting if not candidate.trained), None)
        if beyond is None or not self.job.by_leaven:
            return None
        worth = not self.choices or beyond.time.step < (1 - _MENTIONED_IF_FASTER_BY) * self.choices[0].time.step
        return beyond if worth else None


def layouts(job: Job, fixed: Mapping[str, Any] | None = None) -> Iterator[Layout]:
    """Yield every layout that the search evaluates for a job. ``fixed`` has values that all layouts must have."""
    fixed, model = fixed or {}, job.model
    gpus, node, n_layers, seq_len = job.cluster.gpus, job.cluster.accelerator.node_size, model.n_layers, model.seq_len
    experts = blueprint(model).experts
    # A flash kernel recomputes the attention core anyway, so "selective" saves nothing with it.
    recomputes: tuple[Recompute, ...] = (
        ("none", "full") if job.code.flash_attention else ("none", "selective", "full")
    )

    def values(key: str, free: Iterable[Any]) -> Iterable[Any]:
        return (fixed[key],) if key in fixed else free

    def divisors(number: int, most: int) -> list[int]:
        return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]

    # A rank gets one chunk of each half of the sequence, so that causal attention is equal work for all ranks.
    most = seq_len // _LEAST_CONTEXT
    contexts = {1, *(cp for cp in range(2, most + 1) if seq_len % (2 * cp) == 0)}
    degrees = [
        (dp, tp, pp, cp)
        for tp in values("tp", [tp for tp in tensor_degrees(model) if in_a_node(tp, gpus, node)])
        for pp in values("pp", divisors(gpus // tp, n_layers))
        for cp in values("cp", [cp for cp in divisors(gpus // (tp * pp), seq_len) if cp in contexts])
        for dp in values("dp", (gpus // (tp * pp * cp),))
        if dp * tp * pp * cp == gpus
    ]
    for dp, tp, pp, cp in degrees:
        zeros = (0,) if dp * cp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
        per_rank = [v for v in _STAGES_PER_RANK if pp > 1 and pp * v <= n_layers] or [1]
        eps = [1, *(ep for ep in _EXPERT_DEGREES if experts and math.gcd(dp * cp, experts) % ep == 0)]
        # Numbers of ZeRO 3 replicas: one, or such that 1, 2, 4 or 8 nodes share a copy of the model.
        shared_by = [max(1, node // (tp * cp)) * nodes for nodes in (1, 2, 4, 8)]
        replicas = sorted({1, *(dp // ranks for ranks in shared_by if ranks > 1 and dp % ranks == 0)})
        free = {"zero": zeros, "stages_per_rank": per_rank, "recompute": recomputes, "ep": eps}
        for zero, v, recompute, ep in product(*(values(key, some) for key, some in free.items())):
            if pp * v > n_layers:
                continue
            for replicate in values("dp_replicate", replicas if zero == 3 else (1,)):
                try:
                    yield Layout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=ep,
                        zero=zero,
                        dp_replicate=replicate,
                        schedule=fixed.get("schedule", "interleaved" if v > 1 else "1f1b"),
                        stages_per_rank=v,
                        recompute=recompute,
                        compile=fixed.get("compile", job.compile),
                    )
                except ValidationError:  # a value in ``fixed`` cannot be combined with the others
                    assert fixed


def in_a_node(tp: int, gpus: int, node: int) -> bool:
    """Return whether the GPUs can be divided into groups of ``tp`` such that no group spans two nodes."""
    return gpus % tp == 0 and tp <= node and (node % tp == 0 or gpus <= node)


def explore(job: Job, fixed: Mapping[str, Any] | None = None) -> Exploration:
    """Try every layout with every micro-batch size. ``fixed`` has values that all layouts must have."""
    fitting: list[LayoutCandidate] = []
    too_large: list[LayoutCandidate] = []
    refusal: InputError | None = None
    for layout in layouts(job, fixed):
        try:
            possible = job.arrangements(layout)
        except InputError as error:  # the batch does not allow this layout, but it may allow another
            refusal = refusal or error
            continue
        too_much: list[int] = []
        for how in possible:
            if any(how.micro_batch % size == 0 for size in too_much) or not _can_interleave(job, how):
                continue
            candidate = LayoutCandidate(job, how)
            if candidate.fits:
                fitting.append(candidate)
            else:
                too_large += [] if too_much else [candidate]
                too_much.append(how.micro_batch)
    too_large.sort(key=lambda misfit: misfit.memory.total)
    return Exploration(job, tuple(ranked(fitting)), tuple(too_large), refusal)


def _can_interleave(job: Job, how: Arrangement) -> bool:
    layout, stages = how.layout, how.layout.pp * how.layout.stages_per_rank
    if layout.stages_per_rank == 1 or not job.code.even_stages:
        return True
    return how.grad_accumulation % layout.pp == 0 and job.model.n_layers % stages == 0


def ranked(candidates: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the candidates sorted by speed, the fastest first.

    If the times of two candidates are equal within about 1%, these criteria decide, the most important first:

    1. the time of the step without the wait for the host is shorter; about 1% counts as equal;
    2. leaven can train the layout;
    3. the pipeline has enough micro-batches (:func:`thin_pipeline`);
    4. the ZeRO stage is lower;
    5. dp_replicate x stages_per_rank is smaller;
    6. the micro-batch is larger; all sizes from 8,192 tokens on count as equal;
    7. the memory is smaller.
    """

    def slower(seconds: Callable[[StepTime], float]) -> Callable[[LayoutCandidate], int]:
        least = min((seconds(candidate.time) for candidate in candidates), default=0.0)
        return lambda candidate: int(math.log(seconds(candidate.time) / least) / math.log(1 + EQUAL))

    step, without_host = slower(lambda time: time.step), slower(lambda time: time.step - time.host)

    def rank(candidate: LayoutCandidate) -> tuple[int, int, bool, bool, int, int, int, float]:
        how = candidate.arrangement
        return (
            step(candidate),
            without_host(candidate),
            not candidate.trained,
            thin_pipeline(how),
            how.layout.zero,
            how.layout.dp_replicate * how.layout.stages_per_rank,
            -min(how.micro_batch * candidate.job.model.seq_len, _ENOUGH_TOKENS),
            candidate.memory.total,
        )

    return sorted(candidates, key=rank)


def thin_pipeline(how: Arrangement) -> bool:
    return how.layout.pp > 1 and how.grad_accumulation < FILLS * how.layout.pp
