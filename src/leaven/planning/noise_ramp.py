"""A batch ramp from the measured gradient noise scale: the batch stays at or below a multiple of it.

A batch of m noise scales needs 1 + m times the fewest tokens for a loss, and 1 + 1/m times the fewest steps
(McCandlish et al. 2018, arXiv 1812.06162). The noise scale grows as the loss falls. It may be read from a smaller
model at the same number of tokens: critical batches depend on the tokens and hardly on the size (Zhang et al. 2024,
arXiv 2410.21676).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from leaven.documents.planning import NoiseFitRow, RampDocument
from leaven.recipe.batch import BatchSchedule, BatchStage
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity

# The first measurements are skipped: their running averages have too few values.
SETTLING = 10
# Measurements that a fit needs after the skipped ones.
FEWEST = 10


@dataclass(frozen=True)
class NoiseFit:
    """A power law of the tokens through measured noise scales."""

    points: int
    from_tokens: int  # of the first point
    to_tokens: int  # of the last point
    last: float  # noise scale at ``to_tokens``, in tokens
    exponent: float
    scatter: float  # factor by which a typical point is off

    def at(self, tokens: float) -> float:
        """Return the noise scale in tokens; before the first point it is that of the first."""
        return self.last * float((max(tokens, self.from_tokens) / self.to_tokens) ** self.exponent)

    def reaches(self, noise: float) -> float:
        """Return the tokens at which the noise scale reaches ``noise``; infinite if it never does."""
        if noise <= self.at(0):
            return 0.0
        return self.to_tokens * (noise / self.last) ** (1 / self.exponent) if self.exponent else math.inf


def fit_noise(measured: Sequence[tuple[int, float]]) -> NoiseFit:
    """Fit a line to the logarithms of (tokens, noise scale); if it falls, use a constant.

    Raises:
        InputError: if there are too few measurements.
    """
    used = measured[SETTLING:]
    if len(used) < FEWEST:
        raise InputError(
            f"{len(measured)} measured noise scales, and {SETTLING + FEWEST} are needed; train a run with a smaller "
            "stability.noise_scale_every_tokens"
        )
    xs, ys = [math.log(tokens) for tokens, _ in used], [math.log(noise) for _, noise in used]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    square = sum((x - x_mean) ** 2 for x in xs)
    slope = max(sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / square, 0.0)
    rest = [y - y_mean - slope * (x - x_mean) for x, y in zip(xs, ys, strict=True)]
    return NoiseFit(
        points=len(used),
        from_tokens=used[0][0],
        to_tokens=used[-1][0],
        last=math.exp(y_mean + slope * (xs[-1] - x_mean)),
        exponent=slope,
        scatter=math.exp(math.sqrt(sum(each**2 for each in rest) / len(rest))),
    )


@dataclass(frozen=True)
class NoiseRamp:
    """Stages that double the batch as the noise scale allows."""

    recipe: Recipe
    fit: NoiseFit
    multiple: float  # noise scales that a batch may have
    stages: tuple[BatchStage, ...]  # up to the recipe's batch, if that is reached
    end_batch: int  # tokens that the noise scale allows when the run ends
    steps: int  # of the optimizer with the stages
    full_steps: int  # without them

    @property
    def reached(self) -> bool:
        """Whether the recipe's batch is allowed before the end of the run."""
        return self.stages[-1].tokens == self.recipe.batch.tokens

    @property
    def settings(self) -> list[str]:
        """What ``--set`` takes; empty if there is nothing to change."""
        if len(self.stages) == 1 or not self.reached:
            return []
        stages = ", ".join(f"{{from_tokens={stage.from_tokens},tokens={stage.tokens}}}" for stage in self.stages)
        batch = self.recipe.batch
        rule = [f"batch.stages_rule={batch.ramp.rule}"] if batch.ramp and batch.ramp.rule != "fixed" else []
        return [*(["batch.ramp="] if batch.ramp else []), f"batch.stages=[{stages}]", *rule]

    @property
    def reason(self) -> str:
        allowed, full = f"{self.multiple:g} x the measured noise scale", format_quantity(self.recipe.batch.tokens)
        if not self.reached:
            return (
                f"none: a batch of {full} tokens is above {allowed} even at the end of the run, where that allows "
                f"{format_quantity(self.end_batch)}; leaven transfer --batch-tokens {self.end_batch} moves the "
                "recipe to it"
            )
        if len(self.stages) == 1:
            return f"none: a batch of {full} tokens is within {allowed} from the start"
        return (
            f"each stage begins where its batch is {allowed}: {self.steps:,} steps instead of {self.full_steps:,}, "
            f"and about {1 + self.multiple:g} times the fewest tokens for a loss"
        )

    def document(self) -> RampDocument:
        """Return the document, without the commands to run next."""
        return RampDocument(
            noise=NoiseFitRow(**asdict(self.fit)),
            multiple=self.multiple,
            stages=[stage.model_dump() for stage in self.stages],
            set=self.settings,
            steps=self.steps,
            full_steps=self.full_steps,
            why=self.reason,
            next=[],
        )


def noise_ramp(recipe: Recipe, fit: NoiseFit, multiple: float) -> NoiseRamp:
    """Return stages that double up to the full batch, in whole sequences; each begins where it is ``multiple`` noise
    scales.

    The first is the largest that the first measurements allow, or one sequence.
    """
    seq_len, full, tokens = recipe.model.seq_len, recipe.batch.tokens, recipe.data.tokens
    sequences = full // seq_len
    sizes = sorted({max(sequences >> n, 1) * seq_len for n in range(sequences.bit_length())})
    starts = [(size, fit.reaches(size / multiple)) for size in sizes]
    first = max((size for size, start in starts if start == 0), default=sizes[0])
    later = [(size, math.ceil(start)) for size, start in starts if size > first and start < tokens]
    stages = tuple(BatchStage(from_tokens=start, tokens=size) for size, start in [(first, 0), *later])
    schedule = BatchSchedule(tuple((stage.from_tokens, stage.tokens) for stage in stages))
    return NoiseRamp(
        recipe=recipe,
        fit=fit,
        multiple=multiple,
        stages=stages,
        end_batch=max(int(multiple * fit.at(tokens)) // seq_len, 1) * seq_len,
        steps=schedule.first_step_at(tokens),
        full_steps=-(-tokens // full),
    )
