"""Derive batch ramps, warm-ups and cooldowns of published runs from the values in their files."""

import math
from collections.abc import Iterable
from itertools import pairwise

from leaven.catalogue.run import PublishedRun
from leaven.catalogue.runs import load_runs
from leaven.recipe.batch import BatchStage, Ramp


def batch_ramps(runs: Iterable[PublishedRun] | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Return the starts and the lengths of published batch ramps, both by run id.

    A start is the first batch as a share of the last; a length is a share of the run. Each family has one vote, its
    largest run, because a team chooses its own ramp even if it copies a learning rate.
    """
    starts: dict[str, tuple[str, float]] = {}
    lengths: dict[str, tuple[str, float]] = {}
    for run in runs or load_runs():  # from small to large: the largest of a family is kept
        ramp = run.ramp
        if run.kind != "dense" or ramp is None or ramp.kind not in ("increments", "linear"):
            continue
        if run.ramp_start:
            starts[run.family] = run.id, run.ramp_start
        if run.ramp_tokens and run.tokens:
            lengths[run.family] = run.id, run.ramp_tokens / run.tokens
        elif ramp.over_fraction_of_samples:
            lengths[run.family] = run.id, ramp.over_fraction_of_samples
    return dict(starts.values()), dict(lengths.values())


def repeated_growth(run: PublishedRun, tokens: int, batch: int, unit: int) -> Ramp | tuple[BatchStage, ...] | None:
    """Return a run's batch growth, adapted to a run of ``tokens`` tokens that ends with batches of ``batch`` tokens.

    Every increment or stage comes at the same share of the run. Batch sizes are multiples of ``unit``, which divides
    ``batch``. If length, batch and sequence length are the published ones, so is the growth. Return None if too
    little is published.
    """
    ramp, length = run.ramp, run.tokens
    if not (run.batch_grew and ramp and length):
        return None
    longer = tokens / length
    if ramp.stages:
        begins = stage_begins(run)
        sizes = [max(round(stage["tokens"] / unit), 1) * unit for stage in ramp.stages]
        if begins is None:
            return None
        return tuple(
            BatchStage(from_tokens=round(begin * longer), tokens=size)
            for begin, size in zip(begins, [*sizes[:-1], batch], strict=True)
        )
    seq_len = run.data.seq_len if run.data else None
    if not (ramp.kind == "increments" and ramp.start_samples and ramp.n_increments and ramp.over_tokens and seq_len):
        return None
    start = max(round(ramp.start_samples * seq_len / unit), 1)
    climb, count = batch // unit - start, ramp.n_increments
    if climb <= 0:
        return None
    counts = [n for n in range(1, climb + 1) if climb % n == 0]
    nearest = min(counts, key=lambda n: abs(math.log(n / count)))
    return Ramp(
        start_tokens=start * unit,
        increment_tokens=climb // nearest * unit,
        over_tokens=max(round(ramp.over_tokens * longer), 1),
    )


def stage_begins(run: PublishedRun) -> list[float] | None:
    """Return how many tokens the run had consumed before each stage, or None if that is not published."""
    begins, steps = [0.0], 0
    for before, stage in pairwise((run.ramp and run.ramp.stages) or ()):
        if "from_tokens" in stage:
            begins.append(stage["from_tokens"])
        elif "from_fraction" in stage and run.tokens:
            begins.append(stage["from_fraction"] * run.tokens)
        elif "from_step" in stage:
            begins.append(begins[-1] + (stage["from_step"] - steps) * before["tokens"])
            steps = stage["from_step"]
        else:
            return None
    return begins


def warmup_tokens(run: PublishedRun) -> float | None:
    """Return the run's warm-up in tokens, if it is known.

    A warm-up in steps is converted with the batches of those steps.
    """
    if run.warmup_fraction is not None and run.tokens:
        return run.warmup_fraction * run.tokens
    steps, begins = run.schedule.warmup_steps if run.schedule else None, stage_begins(run)
    if not (steps and begins and run.ramp and run.ramp.stages):
        return None
    total, left = 0.0, float(steps)
    for size, begin, end in zip(run.ramp.stages, begins, [*begins[1:], math.inf], strict=True):
        taken = min(left, (end - begin) / size["tokens"])
        total, left = total + taken * size["tokens"], left - taken
    return total


def cooldown_share(run: PublishedRun) -> float | None:
    """Return the share of the run that the final cooldown took, or None if no wsd schedule is published."""
    schedule = run.schedule
    if schedule is None or schedule.shape != "wsd":
        return None
    if schedule.decay_fraction is not None:
        return schedule.decay_fraction
    if schedule.decay_steps and schedule.total_steps:
        return schedule.decay_steps / schedule.total_steps
    return schedule.decay_tokens / run.tokens if schedule.decay_tokens and run.tokens else None
