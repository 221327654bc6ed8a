"""Losses and notes that several targets share: what of a schedule, a batch, a clip or a start they do not have."""

from collections.abc import Iterable, Mapping

from leaven.interop.configs.vocabulary import SAME, SAME_START, Given, Loss, Wanted
from leaven.recipe.recipe import Recipe


def of_start(recipe: Recipe) -> list[Loss]:
    if recipe.start.weights is None:
        return []
    return [Loss("start.weights", recipe.start.weights, "the run would start from random weights; load them by hand")]


def of_clip(wanted: Wanted, *, folded: bool) -> list[Loss]:
    """``folded``: a multiplier c is in the weights on one side only, which makes their gradients 1 / c there."""
    clip = wanted.recipe.hyperparameters.grad_clip
    if not clip.limit:
        return []
    if clip.mode != "global":
        return [
            Loss("hyperparameters.grad_clip.mode", clip.mode, f"would be the global norm, limited to {clip.limit:g}")
        ]
    if folded:
        return [
            Loss(
                "hyperparameters.grad_clip",
                clip.limit,
                "multipliers move into or out of weights and scale their gradients: the same limit on another norm",
            )
        ]
    return []


def of_ramp(recipe: Recipe, target: str) -> list[Loss]:
    if len(recipe.batch.sizes) == 1:
        return []
    key = "batch.ramp" if recipe.batch.ramp else "batch.stages"
    first = recipe.batch.sizes[0][1]
    return [
        Loss(
            key,
            f"{first} tokens and up",
            f"would be {recipe.batch.tokens} from the first step: {target} has one batch size",
        )
    ]


def of_ramp_rule(recipe: Recipe, target: str) -> list[Loss]:
    """Of a target that has the ramp."""
    if recipe.batch.rule == "fixed":
        return []
    key = "batch.ramp.rule" if recipe.batch.ramp else "batch.stages_rule"
    return [Loss(key, "scaled", f"would be fixed: {target} keeps lr, betas, eps and decay while the batch grows")]


def of_schedule(recipe: Recipe, target: str, known: Iterable[str], instead: str) -> list[Loss]:
    decay = recipe.schedule.decay
    if decay in known:
        return []
    return [Loss("schedule.decay", decay, f"would be {instead}: {target} has {', '.join(known)}")]


def of_floor(wanted: Wanted, target: str) -> list[Loss]:
    """The floor of ``inverse_sqrt``, if the run comes down to it."""
    schedule, tokens = wanted.recipe.schedule, wanted.recipe.data.tokens
    reached = schedule.decay == "inverse_sqrt" and schedule.warmup_tokens / tokens < schedule.min_lr_ratio**2
    why = f"would go on falling: {target} has no floor with inverse_sqrt"
    return [Loss("schedule.min_lr_ratio", schedule.min_lr_ratio, why)] if reached else []


def common_notes(wanted: Wanted, given: Mapping[str, Given] | None = None) -> list[str]:
    """What no target takes over and no number depends on, and what was rounded.

    ``given`` is what a target that computes initial values by itself gives each parameter.
    """
    recipe = wanted.recipe
    notes = [
        "data: source and tokenizer are the target's to be told; leaven's order of the samples is its own",
        "stability and evaluation stay behind: no target goes back by itself after a spike",
    ]
    if recipe.batch.micro_batch != wanted.micro_batch:
        notes.append(f"micro_batch is {recipe.batch.micro_batch} in the recipe and {wanted.micro_batch} here")
    close = {
        row.module
        for row in wanted.table.rows
        if given and row.name in given and SAME < abs(row.init_std / (given[row.name].init_std or 1) - 1) < SAME_START
    }
    if close:
        notes.append(f"init_std of {', '.join(sorted(close))} is the recipe's within {SAME_START:.1%}")
    return notes


def rounding_notes(wanted: Wanted) -> list[str]:
    """Tokens that are no whole number of steps."""
    recipe = wanted.recipe
    uneven = [
        f"{key} {tokens:,} tokens is {tokens / recipe.batch.tokens:.2f} steps, written as {steps}"
        for key, tokens, steps in (
            ("data.tokens", recipe.data.tokens, wanted.steps),
            ("schedule.warmup_tokens", recipe.schedule.warmup_tokens, wanted.in_steps(recipe.schedule.warmup_tokens)),
        )
        if tokens % recipe.batch.tokens
    ]
    return uneven
