"""What to do with a starter: which proxy to tune, and how its values come back."""

import shlex
from pathlib import Path

from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

LEAST_WIDTH, LEAST_DEPTH = 256, 4
NARROWER, SHALLOWER, SMALLER_BATCH, SHORTER = 16, 32, 8, 100
"""The farthest that the rule has been shown to carry values (arXiv 2512.22382; planning.tested_ground)."""
TOKENS_PER_PARAMETER = 20
TRIALS = 64


def tuning(recipe: Recipe) -> str:
    """Which proxy to tune, and what that costs."""
    proxy = proxy_recipe(recipe)
    if proxy is None:
        return "small enough to tune as it is"
    shape, _, length = proxy
    cost = TRIALS * shape.params * length / (recipe.model.params * recipe.data.tokens)
    return f"tune a proxy of {format_quantity(shape.params)} first: {TRIALS} trials cost {cost:.1%} of this run"


def commands(recipe: Recipe, path: Path) -> tuple[str, ...]:
    """From a proxy to the tuned recipe, or to tune as it is what is small already; ``path``: the recipe's file.

    The proxy is tuned in one process; the tuned recipe has the recipe's own layout again.
    """
    model, study = recipe.model, f"studies/{recipe.name}"
    file, proxy_file, tuned_file = (
        shlex.quote(str(path.with_stem(path.stem + suffix))) for suffix in ("", "-proxy", "-tuned")
    )
    proxy = proxy_recipe(recipe)
    if proxy is None:
        return (f"leaven tune {file} --study {study} --trials {TRIALS}",)
    shape, batch, length = proxy
    whole = shape.d_ff * model.d_model == model.d_ff * shape.d_model

    def transfer(to: ModelShape, batch_tokens: int, tokens: int) -> str:
        d_ff = "" if whole else f" --d-ff {to.d_ff}"
        return f"--width {to.d_model} --depth {to.n_layers}{d_ff} --batch-tokens {batch_tokens} --tokens {tokens}"

    back = transfer(model, recipe.batch.tokens, recipe.data.tokens)
    one, own = _layout(recipe)
    return (
        f"leaven transfer {file} {transfer(shape, batch, length)}{one} -o {proxy_file}",
        f"leaven tune {proxy_file} --study {study} --trials {TRIALS}",
        f"leaven transfer {study}/best.toml {back}{own} -o {tuned_file}",
    )


def _layout(recipe: Recipe) -> tuple[str, str]:
    """Options that put a recipe in one process, and those that put it back where this one runs."""
    own = recipe.layout.model_dump() | {"micro_batch": recipe.batch.micro_batch}
    one = Layout().model_dump() | {"micro_batch": "auto"}
    paths = {key: f"{'batch' if key == 'micro_batch' else 'layout'}.{key}" for key in own if own[key] != one[key]}
    to_one, to_own = ("".join(f" --set {paths[key]}={side[key]}" for key in paths) for side in (one, own))
    return to_one, to_own


def proxy_recipe(recipe: Recipe) -> tuple[ModelShape, int, int] | None:
    """Shape, batch and tokens of a proxy."""
    shape = proxy_shape(recipe.model)
    if shape is None:
        return None
    sequences = max(recipe.batch.tokens // shape.seq_len // SMALLER_BATCH, 1)
    length = max(TOKENS_PER_PARAMETER * shape.params, recipe.data.tokens // SHORTER)
    return shape, sequences * shape.seq_len, min(length, recipe.data.tokens)


def proxy_shape(model: ModelShape) -> ModelShape | None:
    """The smallest of the family that the rule is shown to transfer from; None where that is more than half of it."""
    least = max(LEAST_WIDTH, -(-model.d_model // NARROWER))
    depth = min(max(LEAST_DEPTH, -(-model.n_layers // SHALLOWER)), model.n_layers)
    unit = model.d_head * (model.n_heads // model.n_kv_heads)
    width = -(-least // unit) * unit
    if width >= model.d_model:
        return None
    exact = model.d_ff * width % model.d_model == 0
    d_ff = None if exact else max(round(model.d_ff * width / model.d_model / 64), 1) * 64
    shape = model.scaled(width, depth, d_ff=d_ff)
    return shape if shape.params * 2 <= model.params else None
