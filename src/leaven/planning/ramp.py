"""Plan a batch ramp (a batch size that grows in a run), by throughput or by the gradient noise scale.

:func:`noise_ramp` keeps the batch below m times the gradient noise scale. With a batch of m times the
noise scale, a run reaches a given loss after (1 + m) times the fewest possible tokens and (1 + 1/m) times
the fewest possible steps (McCandlish et al. 2018, arXiv 1812.06162). The noise scale may come from a smaller model at
the same number of tokens, because critical batch sizes hardly depend on the model size (Zhang et al.
2024, arXiv 2410.21676).
"""

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, linear_regression

from leaven.documents.planning import NoiseFitRow, RampChoice, RampDocument, RampMicroBatch, RampPlan, RampPoint
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement
from leaven.planning.flops import flops_per_token
from leaven.planning.layouts import Job
from leaven.recipe.batch import Batch, BatchSchedule
from leaven.recipe.batch import Ramp as BatchRamp
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity

SHARE = 0.7  # default of the least throughput at the start of a ramp, as a share of the full batch's throughput
OVER = 0.03  # length of a ramp as a share of the run, if the recipe has no ramp (GPT-3 1.3 to 4%, BLOOM 4%)
_MOST_INCREMENTS = 64
# Number of measurements that a fit skips at the start, because a running average of few values is noisy, and number
# of further measurements that it needs.
SETTLING, FEWEST = 10, 10


class RampThroughput:
    """Step times of a layout, computed once for each batch size."""

    def __init__(self, job: Job, full: Arrangement) -> None:
        self.job, self.full = job, full
        self._steps: dict[int, tuple[Arrangement, float]] = {}

    def step(self, sequences: int) -> tuple[Arrangement, float]:
        """Return (fastest arrangement, its seconds per step) for a batch of ``sequences`` in this layout."""
        if sequences not in self._steps:
            layout, most = self.full.layout, self.full.micro_batch
            share = -(-sequences // layout.dp)
            sizes = [most] if self.job.micro_batch else [*(2**n for n in range(most.bit_length())), most]
            counts = {-(-share // size) for size in sizes}
            ways = [Arrangement(layout, -(-share // count), count) for count in counts]
            self._steps[sequences] = min(((how, self.job.time(how).step) for how in ways), key=lambda found: found[1])
        return self._steps[sequences]

    def seconds(self, batch_tokens: int) -> float:
        return self.step(batch_tokens // self.job.model.seq_len)[1]

    def point(self, sequences: int) -> RampPoint:
        job = self.job
        (how, seconds), full = self.step(sequences), self.seconds(job.batch.tokens)
        rate = sequences * job.model.seq_len / seconds
        return RampPoint(
            global_batch=sequences,
            batch_tokens=sequences * job.model.seq_len,
            micro_batch=how.micro_batch,
            grad_accumulation=how.grad_accumulation,
            step_seconds=seconds,
            tokens_per_second=rate,
            tflops_per_gpu=rate * flops_per_token(job.model) / job.cluster.gpus / 1e12,
            share=rate / (job.batch.tokens / full),
            filled=how.grad_accumulation >= how.layout.pp,
        )

    def run_seconds(self, sizes: tuple[tuple[int, int], ...], tokens: int) -> float:
        """Return the seconds of a run; ``sizes`` has pairs (first token, batch in tokens)."""
        return sum(steps * self.seconds(size) for size, steps in _steps(sizes, tokens))

    def choice(self, sizes: tuple[tuple[int, int], ...], increment: int | None, over_tokens: int) -> RampChoice:
        """Return the cost of a batch ramp over the first ``over_tokens`` tokens of a run.

        ``sizes`` has pairs (first token, batch in tokens). ``increment``, in tokens, is only copied to the result.
        """
        job, steps = self.job, _steps(sizes, over_tokens)
        seconds = self.run_seconds(sizes, over_tokens)
        at_full = sum(size * n for size, n in steps) / job.batch.tokens * self.seconds(job.batch.tokens)
        return RampChoice(
            start_tokens=sizes[0][1],
            increment_tokens=increment,
            over_tokens=over_tokens,
            share=self.point(sizes[0][1] // job.model.seq_len).share,
            hours=seconds / 3600,
            extra_hours=(seconds - at_full) / 3600,
            steps=sum(n for _, n in steps),
            full_steps=-(-over_tokens // job.batch.tokens),
        )


def plan_ramp(job: Job, full: Arrangement, tokens: int, share: float = SHARE) -> RampPlan:
    """Return a plan of a batch ramp from a small batch to the full batch.

    The start is the smallest batch that has at least ``share`` of the full batch's throughput, and at least pp
    micro-batches per rank. All increments are equal, as in Megatron. ``full`` is the arrangement at the full batch,
    and ``tokens`` the length of the run.
    """
    throughput, seq_len = RampThroughput(job, full), job.model.seq_len
    sequences, dp = job.batch.tokens // seq_len, full.layout.dp
    increment = _increment(sequences, dp, full.micro_batch)
    below = {dp * 2**n for n in range((sequences // dp).bit_length())}
    grid = set(range(sequences, 0, -increment))
    points = {size: throughput.point(size) for size in sorted(grid | below) if dp <= size <= sequences}
    starts = [point for size, point in points.items() if size in grid and point.filled] or [points[sequences]]
    start = next((point for point in starts if point.share >= share), starts[-1])
    own, sizes = job.batch.ramp, job.batch.sizes
    over, own_choice = max(round(OVER * tokens), 1), None
    if len(sizes) > 1:
        over = min(own.over_tokens if own else sizes[-1][0], tokens)
        own_choice = throughput.choice(sizes, own.increment_tokens if own else None, over)
    choices = []
    for point in _halvings(starts, start):
        ramp = BatchRamp(start_tokens=point.batch_tokens, increment_tokens=increment * seq_len, over_tokens=over)
        sizes = Batch(tokens=job.batch.tokens, ramp=ramp).sizes
        choices.append(throughput.choice(sizes, increment * seq_len, over))
    in_ramp = (point for point in points.values() if point.batch_tokens >= start.batch_tokens)
    micro_batches = [
        RampMicroBatch(from_batch_tokens=next(alike).batch_tokens, micro_batch=size)
        for size, alike in groupby(in_ramp, key=lambda point: point.micro_batch)
    ]
    return RampPlan(
        share=share,
        start=start,
        increment_tokens=increment * seq_len,
        micro_batches=micro_batches,
        points=list(points.values()),
        choices=choices,
        own=own_choice,
    )


def _increment(sequences: int, dp: int, micro_batch: int) -> int:
    """Return the smallest multiple of a unit that divides ``sequences`` into at most 64 equal parts.

    The unit is dp x ``micro_batch`` if this product divides ``sequences`` into at least 8 equal parts, otherwise dp.
    """
    unit = dp * micro_batch if sequences % (dp * micro_batch) == 0 and sequences >= 8 * dp * micro_batch else dp
    whole = sequences // unit
    return unit * next(n for n in range(-(-whole // _MOST_INCREMENTS), whole + 1) if whole % n == 0)


def _halvings(starts: list[RampPoint], start: RampPoint) -> list[RampPoint]:
    """Return ``start``, and points for the full batch, half of it, a quarter and so on, sorted by batch.

    The point for a batch size is the first in ``starts`` with at least this size. ``starts`` is sorted by batch.
    """
    full = starts[-1].batch_tokens
    halves = [next(p for p in starts if p.batch_tokens >= full / 2**n) for n in range(full.bit_length())]
    return sorted({p.batch_tokens: p for p in (*halves, start)}.values(), key=lambda p: p.batch_tokens)


def _steps(sizes: tuple[tuple[int, int], ...], tokens: int) -> list[tuple[int, int]]:
    """Return (batch in tokens, steps with it) for each pair (first token, batch in tokens) in ``sizes``."""
    schedule = BatchSchedule(sizes)
    ends = [segment.first_step for segment in schedule.segments[1:]] + [schedule.first_step_at(tokens)]
    last = ends[-1]
    return [
        (segment.batch_tokens, max(min(end, last) - segment.first_step, 0))
        for segment, end in zip(schedule.segments, ends, strict=True)
    ]


class NoiseFit(NoiseFitRow):
    """A power law fitted to measured noise scales, as a function of the tokens seen in training."""

    def at(self, tokens: float) -> float:
        """Return the noise scale at ``tokens``: a power law, constant before the first fitted measurement."""
        return self.last * float((max(tokens, self.from_tokens) / self.to_tokens) ** self.exponent)

    def reaches(self, noise: float) -> float:
        """Return the number of tokens after which the noise scale reaches ``noise``, or infinity if it never does."""
        if noise <= self.at(0):
            return 0.0
        return self.to_tokens * (noise / self.last) ** (1 / self.exponent) if self.exponent else math.inf


def fit_noise(measured: Sequence[tuple[int, float]]) -> NoiseFit:
    """Fit a power law to the pairs (tokens, noise scale), without the first 10 pairs.

    The exponent is at least 0: a falling noise scale gives a constant. Raise InputError for fewer than 20 pairs.
    """
    used = measured[SETTLING:]
    if len(used) < FEWEST:
        raise InputError(
            f"{SETTLING + FEWEST} measured noise scales are needed, but the run has {len(measured)}; train a run "
            "with a smaller stability.noise_scale_every_tokens"
        )
    xs, ys = [math.log(tokens) for tokens, _ in used], [math.log(noise) for _, noise in used]
    slope = max(linear_regression(xs, ys).slope, 0.0)
    intercept = fmean(ys) - slope * fmean(xs)
    rest = [y - intercept - slope * x for x, y in zip(xs, ys, strict=True)]
    return NoiseFit(
        points=len(used),
        from_tokens=used[0][0],
        to_tokens=used[-1][0],
        last=math.exp(intercept + slope * xs[-1]),
        exponent=slope,
        scatter=math.exp(math.sqrt(fmean(each**2 for each in rest))),
    )


def noise_ramp(recipe: Recipe, fit: NoiseFit, multiple: float) -> RampDocument:
    """Propose a batch ramp in stages, or say why there is none.

    Possible batches: the full batch, half of it, and so on down to one sequence. A stage begins when its batch is
    ``multiple`` x the noise scale. Raise InputError if the run ends before the first measurement of the fit.
    """
    seq_len, batch, tokens = recipe.model.seq_len, recipe.batch, recipe.data.tokens
    if tokens < fit.from_tokens:
        raise InputError(
            f"this recipe ends at {format_quantity(tokens)} tokens, but the noise scale is known only from "
            f"{format_quantity(fit.from_tokens)} tokens on (the first {SETTLING} measurements are not used); train a "
            "run with a smaller stability.noise_scale_every_tokens"
        )
    sequences = batch.tokens // seq_len
    sizes = sorted({max(sequences >> n, 1) * seq_len for n in range(sequences.bit_length())})
    starts = [(size, fit.reaches(size / multiple)) for size in sizes]
    first = max((size for size, start in starts if start == 0), default=sizes[0])
    later = [(math.ceil(start), size) for size, start in starts if size > first and start < tokens]
    stages = [(0, first), *later]
    steps, full_steps = BatchSchedule(tuple(stages)).first_step_at(tokens), -(-tokens // batch.tokens)
    allowed, full = f"{multiple:g} x the measured noise scale", format_quantity(batch.tokens)
    settings: list[str] = []
    if stages[-1][1] != batch.tokens:
        end_batch = max(int(multiple * fit.at(tokens)) // seq_len, 1) * seq_len
        why = (
            f"none: even at the end of the run, {allowed} allows only a batch of {format_quantity(end_batch)} "
            f"tokens, not of {full}; use leaven transfer --batch-tokens {end_batch}"
        )
    elif sequences == 1:
        why = "none: the full batch is one sequence, and no batch is smaller"
    elif not later:
        why = (
            f"none: the full batch of {full} tokens is at most {allowed} from the start (the first measurement used "
            f"is at {format_quantity(fit.from_tokens)} tokens)"
        )
    else:
        why = (
            f"each stage begins where its batch is {allowed}; the run has {steps:,} steps instead of {full_steps:,}, "
            f"and needs about {1 + multiple:g} times as many tokens as with very small batches for the same loss"
        )
        listed = ", ".join(f"{{from_tokens={start},tokens={size}}}" for start, size in stages)
        settings = [*(["batch.ramp="] if batch.ramp else []), f"batch.stages=[{listed}]"]
        if batch.ramp and batch.ramp.rule != "fixed":
            settings.append(f"batch.stages_rule={batch.ramp.rule}")
    return RampDocument(
        noise=fit,
        multiple=multiple,
        stages=[{"from_tokens": start, "tokens": size} for start, size in stages],
        set=settings,
        steps=steps,
        full_steps=full_steps,
        why=why,
    )
