"""Transfer: change the shape, the batch or the tokens of a recipe, and nothing else.

The hyperparameters stay as written, in base coordinates; what every parameter gets follows from the ratios. What is
counted in tokens moves with the run it is part of: warm-up and ramp keep their share of the run, and a ramp its
start and increment as shares of the batch.
"""

from typing import Any

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity


def transfer(
    recipe: Recipe,
    *,
    width: int | None = None,
    depth: int | None = None,
    batch_tokens: int | None = None,
    tokens: int | None = None,
    name: str | None = None,
) -> Recipe:
    """The recipe at another scale. What is not given stays; the base is pinned where it was.

    Raises:
        InputError: if the width does not fit the head dimension, or the batch no whole number of sequences.
    """
    target_tokens = tokens or recipe.data.tokens
    target_batch = batch_tokens or recipe.batch.tokens
    if target_batch % recipe.model.seq_len:
        seq_len = recipe.model.seq_len
        lower = max(target_batch // seq_len, 1) * seq_len
        raise InputError(
            f"--batch-tokens {target_batch:,} is no whole number of sequences of {seq_len:,}; "
            f"{lower:,} or {lower + seq_len:,} is"
        )
    try:
        shape = recipe.model.scaled(width or recipe.model.d_model, depth or recipe.model.n_layers)
    except ValueError as error:
        raise InputError(f"--width: {error}") from None
    longer = target_tokens / recipe.data.tokens
    changes: dict[str, Any] = {
        "name": name or recipe.name,
        "model": shape.model_dump(),
        "data.tokens": target_tokens,
        "batch": _batch(recipe, target_batch, longer),
        "schedule.warmup_tokens": round(recipe.schedule.warmup_tokens * longer),
        "scaling.base": recipe.base.model_dump(),
    }
    for path in ("stability.checkpoint_every_tokens", "evaluation.every_tokens"):
        section, key = path.split(".")
        every = getattr(getattr(recipe, section), key)
        if every is not None:
            changes[path] = round(every * longer)
    moved = recipe.replace(changes)
    return moved.replace({"why": recipe.why | _reasons(recipe, moved)})


def _batch(recipe: Recipe, tokens: int, longer: float) -> dict[str, Any]:
    batch, seq_len = recipe.batch, recipe.model.seq_len
    larger = tokens / batch.tokens
    moved: dict[str, Any] = {"tokens": tokens, "micro_batch": batch.micro_batch}
    if batch.stages:
        moved["stages"] = [
            {
                "from_tokens": round(stage.from_tokens * longer),
                "tokens": max(round(stage.tokens * larger / seq_len), 1) * seq_len,
            }
            for stage in batch.stages
        ]
    if batch.ramp is not None:
        # The same number of increments; what rounding to whole sequences leaves over goes to the start.
        increments = (batch.tokens - batch.ramp.start_tokens) // batch.ramp.increment_tokens
        increment = max(int(batch.ramp.increment_tokens * larger / seq_len), 1) * seq_len
        increments = min(increments, (tokens - seq_len) // increment)
        if increments > 0:
            moved["ramp"] = {
                "start_tokens": tokens - increments * increment,
                "increment_tokens": increment,
                "over_tokens": round(batch.ramp.over_tokens * longer),
            }
    return moved


def _reasons(before: Recipe, after: Recipe) -> dict[str, str]:
    base = after.base
    where = (
        f"base width {base.width}, depth {base.depth}, batch {format_quantity(base.batch_tokens)}, "
        f"{format_quantity(base.tokens)} tokens"
    )
    reasons = {
        "hyperparameters": f"as tuned at {where}; moved by {after.scaling.rule} (leaven show prints each parameter's)"
    }
    if after.model != before.model:
        reasons["model"] = (
            f"transfer from width {before.model.d_model}, depth {before.model.n_layers}: "
            "head dimension, d_ff / d_model and heads per kv head kept"
        )
    if after.data.tokens != before.data.tokens:
        reasons["data.tokens"] = f"transfer from {format_quantity(before.data.tokens)} tokens"
        reasons["schedule.warmup_tokens"] = (
            f"the same share of the run as before, "
            f"{before.schedule.warmup_tokens / before.data.tokens:.2%} (time in a run is tokens / horizon)"
        )
    if after.batch.tokens != before.batch.tokens:
        reasons["batch.tokens"] = f"transfer from {format_quantity(before.batch.tokens)} tokens a step"
    return reasons
