"""Propose a batch ramp (a growing batch size) that stays below a multiple of the measured gradient noise scale.

To reach a given loss, a batch of m times the noise scale needs 1 + m times the minimum number of tokens and 1 + 1/m
times the minimum number of steps (McCandlish et al. 2018, arXiv 1812.06162). The noise scale grows as the loss falls.
It may be measured on a smaller model at the same number of tokens, because critical batch sizes depend on the number
of tokens and hardly on the model size (Zhang et al. 2024, arXiv 2410.21676).
"""

import math
from collections.abc import Sequence
from statistics import fmean, linear_regression

from leaven.documents.planning import NoiseFitRow, RampDocument
from leaven.recipe.batch import BatchSchedule
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity

# The first measurements are skipped: their running averages have too few values.
SETTLING = 10
# Measurements that a fit needs after the skipped ones.
FEWEST = 10


class NoiseFit(NoiseFitRow):
    """A power law fitted to measured noise scales, as a function of the tokens seen in training."""

    def at(self, tokens: float) -> float:
        """Return the noise scale after ``tokens`` tokens. Before the first measurement, the fit is constant."""
        return self.last * float((max(tokens, self.from_tokens) / self.to_tokens) ** self.exponent)

    def reaches(self, noise: float) -> float:
        """Return the number of tokens after which the noise scale reaches ``noise``, or infinity if it never does."""
        if noise <= self.at(0):
            return 0.0
        return self.to_tokens * (noise / self.last) ** (1 / self.exponent) if self.exponent else math.inf


def fit_noise(measured: Sequence[tuple[int, float]]) -> NoiseFit:
    """Return a power law fitted to pairs of (tokens, noise scale), or a constant if the noise scale falls.

    Raises:
        InputError: if there are too few measurements.
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
    """Propose a batch ramp in stages, whose batch size is at most ``multiple`` x the noise scale.

    The batch size doubles from stage to stage, up to the full batch. Each stage begins when ``multiple`` x the noise
    scale reaches the batch size of the stage. The first stage has the largest batch size that is allowed at the start
    of training. If none is allowed, its batch is one sequence. The caller adds the commands to run next.
    """
    seq_len, batch, tokens = recipe.model.seq_len, recipe.batch, recipe.data.tokens
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
            f"none: a batch of {full} tokens is above {allowed} even at the end of the run, where the limit is "
            f"{format_quantity(end_batch)}; use leaven transfer --batch-tokens {end_batch}"
        )
    elif not later:
        why = f"none: a batch of {full} tokens is within {allowed} from the start"
    else:
        why = (
            f"each stage begins where its batch is {allowed}: {steps:,} steps instead of {full_steps:,}, "
            f"and about {1 + multiple:g} times the minimum of tokens for a loss"
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
