"""Tokens, batch, ramp and schedule of a recipe against those of published runs."""

import math
from collections.abc import Iterator
from functools import cache
from statistics import median
from typing import Any

from leaven.catalogue.findings.case import Case, Finding, Limits, upward
from leaven.catalogue.laws import evaluate
from leaven.catalogue.run import Run
from leaven.catalogue.terms import TERMS
from leaven.recipe.data import STDLIB_TOKENS
from leaven.recipe.units import format_number, format_quantity

_CHINCHILLA = 20  # tokens per parameter
_STEPS_OF_WARMUP = 2000  # what most runs have, however long they are


def size(case: Case) -> Iterator[Finding]:
    """Whether there is anything to hold the recipe against."""
    if case.neighbours:
        return
    params, nearest = case.params, case.runs[0]
    apart = max(nearest.params_total / params, params / nearest.params_total)
    side = "larger" if nearest.params_total > params else "smaller"
    yield Finding(
        path="model",
        severity="note",
        value=float(params),
        low=case.published(lambda run: float(run.params_total))[0],
        high=case.published(lambda run: float(run.params_total))[1],
        factor=apart,
        says=f"no published run is within a factor of 4 of {format_quantity(params)} parameters: {nearest.id} is "
        f"{format_number(apart)}x {side}; lr, batch, shape and seq_len are held against nothing",
        runs=(nearest.id,),
    )


def tokens_per_parameter(case: Case) -> Iterator[Finding]:
    recipe = case.recipe
    value = recipe.data.tokens / case.params
    most = case.published(_tokens_per_parameter)[1]
    side = "under Chinchilla's 20" if value < _CHINCHILLA else f"the most published is {most:,.0f}"
    yield from case.judge(
        "data.tokens",
        value,
        _tokens_per_parameter,
        Limits((16.0, most), (5.0, 1.5 * most), (1.0, 5 * most)),
        f"{format_number(value)} tokens a parameter, {side}"
        + (": a smaller model would be better for the same compute" if value < _CHINCHILLA else ""),
        sure=bool(case.neighbours),
        mends=[_tokens(case, math.floor(most if value > most else _CHINCHILLA) * case.params)],
    )


def steps(case: Case) -> Iterator[Finding]:
    value = float(case.recipe.steps)
    fewest = case.published(_steps)[0]
    smaller = case.recipe.data.tokens / 10_000
    yield from case.judge(
        "batch.tokens",
        value,
        _steps,
        Limits((5000.0, math.inf), (1000.0, math.inf), (100.0, math.inf)),
        f"{value:,.0f} optimiser steps; the fewest published are {fewest:,.0f}",
        mends=[
            case.with_batch(smaller),
            case.with_batch(smaller / 2),  # two steps of a batch of one sequence more or less
            _tokens(case, 10_000 * case.recipe.batch.tokens),
        ],
        sure=bool(case.neighbours),
    )


def epochs(case: Case) -> Iterator[Finding]:
    if case.corpus_tokens is None:
        stand_in = "python-stdlib" in {source.source for source in case.recipe.data.sources}
        if stand_in and case.recipe.data.tokens > 16 * STDLIB_TOKENS:
            yield Finding(
                path="data.source",
                severity="note",
                value=None,
                low=None,
                high=None,
                factor=None,
                says=f"the text is python-stdlib, a stand-in of about {format_quantity(STDLIB_TOKENS)} tokens: name "
                "yours before training",
            )
        return
    value = case.recipe.data.tokens / case.corpus_tokens
    yield from case.judge(
        "data.tokens",
        value,
        lambda run: (
            (run.tokens / run.data.tokens_in_dataset)
            if run.tokens and run.data and run.data.tokens_in_dataset
            else None
        ),
        upward(4, 4, 16),
        f"{format_number(value)} epochs of the text; up to 4 are nearly as good as new text, beyond about 16 hardly "
        f"anything is "
        "learned from more",
        mends=[_tokens(case, 4 * case.corpus_tokens)],
    )


def batch(case: Case) -> Iterator[Finding]:
    """Only upward: a small batch costs time, not quality."""
    known = case.near(lambda run: run.batch_tokens)
    if not known:
        return
    value, highest = case.recipe.batch.tokens, known[-1]
    yield from case.judge(
        "batch.tokens",
        value,
        lambda run: run.batch_tokens,
        upward(highest, 3 * highest, 10 * highest),
        f"a batch of {format_quantity(value)} tokens; the nearest comparable runs have "
        f"{format_quantity(known[0])} .. {format_quantity(highest)}",
        mends=[case.with_batch(median(known)), case.with_batch(highest)],
        among=case.neighbours,
    )


def critical_batch(case: Case) -> Iterator[Finding]:
    """Against the median of the laws; beyond what any published run had over its own, it is outside."""
    model, tokens = case.recipe.model, case.recipe.data.tokens
    told = _critical(case.params, tokens, model.params_non_embedding)
    middle, most = median(told.values()), case.published(_over_critical)[1]
    value = case.recipe.batch.tokens / middle
    listed = ", ".join(f"{law} {format_quantity(size)}" for law, size in told.items())
    yield from case.judge(
        "batch.tokens",
        value,
        _over_critical,
        upward(1.0, most, 4 * most),
        f"a batch of {format_quantity(case.recipe.batch.tokens)} tokens is {format_number(value, 2)} x the critical "
        f"one "
        f"({listed}): more of it saves few steps and costs tokens",
        mends=[case.with_batch(middle), case.with_batch(0.9 * middle)],
        sure=bool(case.neighbours),
    )


def no_ramp(case: Case) -> Iterator[Finding]:
    spec = case.recipe.batch
    if spec.ramp is not None or spec.stages:
        return
    most = case.published(_constant_batch)[1]
    start = case.sequences(spec.tokens / 8)
    yield from case.judge(
        "batch.ramp",
        spec.tokens,
        _constant_batch,
        upward(4.2e6, most, 4 * most),
        f"a batch of {format_quantity(spec.tokens)} tokens from the first step: the critical batch is small at "
        f"first, and larger batches were ramped up to; the largest without is {format_quantity(most)}",
        mends=[
            {
                "batch.ramp": {
                    "start_tokens": start,
                    "increment_tokens": spec.tokens - start,
                    "over_tokens": round(0.03 * case.recipe.data.tokens),
                }
            }
        ],
        among=[run for run in case.runs if _start(run) and (run.batch_tokens or 0) >= 2e6][:5],
    )


def ramp_start(case: Case) -> Iterator[Finding]:
    ramp = case.recipe.batch.ramp
    if ramp is None:
        return
    tenth = case.sequences(case.recipe.batch.tokens / 10)
    value, least = ramp.start_tokens / case.recipe.batch.tokens, case.published(_start)[0]
    yield from case.judge(
        "batch.ramp.start_tokens",
        value,
        _start,
        Limits((least, 1.0), (least / 2, 1.0), (least / 10, 1.0)),
        f"the ramp starts at {format_quantity(ramp.start_tokens)} tokens, {value:.2g} of the batch; the least "
        f"published is {least:.2g}. So small a batch keeps few devices busy (BLOOM: 8 TFLOP/s at 16 sequences, 73 at "
        "192)",
        mends=[
            {"batch.ramp.start_tokens": case.recipe.batch.tokens - 9 * tenth, "batch.ramp.increment_tokens": tenth}
        ],
    )


def ramp_length(case: Case) -> Iterator[Finding]:
    """Of a ramp in increments; a few doublings may come late."""
    ramp = case.recipe.batch.ramp
    if ramp is None:
        return
    value = ramp.over_tokens / case.recipe.data.tokens
    yield from case.judge(
        "batch.ramp.over_tokens",
        value,
        _ramp_length,
        upward(0.06, 0.12, 0.5),
        f"the ramp takes {format_number(value, 2)} of the run; published ones in increments take 0.02 to 0.06",
        mends=[{"batch.ramp.over_tokens": round(0.04 * case.recipe.data.tokens)}],
    )


def warmup(case: Case) -> Iterator[Finding]:
    """Under 0.1% of the run, unless that is still the 2,000 steps that most runs have; or over a tenth."""
    recipe = case.recipe
    value = recipe.schedule.warmup_tokens / recipe.data.tokens
    taken = recipe.batches.first_step_at(recipe.schedule.warmup_tokens)
    enough = taken >= _STEPS_OF_WARMUP
    longest, hundredth = case.published(_warmup)[1], round(0.01 * recipe.data.tokens)
    yield from case.judge(
        "schedule.warmup_tokens",
        value,
        _warmup,
        Limits(
            (0.001, 0.1),
            (0.0 if enough else 0.001, longest),
            (0.0 if enough else 0.0001, max(0.5, longest)),
        ),
        f"warm-up over {format_number(value, 2)} of the run, {taken:,} steps; most runs have 0.001 to 0.01 of it, or "
        "2,000 steps",
        mends=[
            {"schedule.warmup_tokens": min(hundredth, recipe.batches.tokens_at_step(_STEPS_OF_WARMUP))},
            {"schedule.warmup_tokens": math.ceil(0.001 * recipe.data.tokens)},
            {"schedule.warmup_tokens": hundredth},
        ],
    )


def min_lr_ratio(case: Case) -> Iterator[Finding]:
    schedule, tokens = case.recipe.schedule, case.recipe.data.tokens
    value = schedule.multiplier(tokens, tokens)
    decays = schedule.decay in ("constant", "inverse_sqrt")
    yield from case.judge(
        "schedule.decay" if decays else "schedule.min_lr_ratio",
        value,
        lambda run: run.min_lr_ratio,
        upward(0.1, 0.2, 0.5),
        f"the lr ends at {value:.2g} of its peak; every run that tells ends at 0.1 or below",
        mends=[{"schedule.min_lr_ratio": 0.1} | ({"schedule.decay": "cosine"} if decays else {})],
    )


@cache
def _critical(params: float, tokens: float, non_embedding: float | None = None) -> dict[str, float]:
    told = evaluate(params, tokens, params_non_embedding=non_embedding)
    return {
        one.law: one.batch_tokens
        for one in told
        if one.batch_kind == "critical" and one.batch_tokens and not one.form_of
    }


def _over_critical(run: Run) -> float | None:
    if not (run.batch_tokens and run.tokens):
        return None
    return run.batch_tokens / median(_critical(run.params_total, run.tokens).values())


def _tokens_per_parameter(run: Run) -> float | None:
    return run.tokens and run.tokens / run.params_total


def _steps(run: Run) -> float | None:
    return run.tokens / run.batch_tokens if run.tokens and run.batch_tokens else None


def _constant_batch(run: Run) -> float | None:
    """The batch of a run that says it had it from the start."""
    constant = run.batch and run.batch.rampup and run.batch.rampup.kind == "none"
    return run.batch_tokens if constant or _start(run) == 1 else None


def _start(run: Run) -> float | None:
    start = TERMS["batch.ramp.start_tokens"].of_run(run)
    return start / run.batch_tokens if start and run.batch_tokens else None


def _ramp_length(run: Run) -> float | None:
    over = TERMS["batch.ramp.over_tokens"].of_run(run)
    in_stages = run.batch and run.batch.rampup and run.batch.rampup.kind == "stages"
    return over / run.tokens if over and run.tokens and not in_stages else None


def _warmup(run: Run) -> float | None:
    return run.warmup_fraction


def _tokens(case: Case, tokens: int) -> dict[str, Any]:
    """So many tokens; a warm-up that is longer goes with them."""
    longer = case.recipe.schedule.warmup_tokens > tokens
    return {"data.tokens": tokens} | ({"schedule.warmup_tokens": tokens // 100} if longer else {})
