"""What to do with a starter: which proxy to tune, and how its values come back."""

from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

LEAST_WIDTH, LEAST_DEPTH = 256, 4
NARROWER, SHALLOWER, SMALLER_BATCH, SHORTER = 16, 32, 8, 100
"""The farthest that the rule has been shown to carry values (arXiv 2512.22382; planning.tested_ground)."""
TOKENS_PER_PARAMETER = 20
TRIALS = 64


def next_steps(recipe: Recipe) -> list[str]:
    """The commands from a proxy to the tuned recipe, or to tune as it is what is small already."""
    model, tokens, name = recipe.model, recipe.data.tokens, recipe.name
    proxy = proxy_shape(model)
    file = f"{name}.toml"
    if proxy is None:
        return [f"next: tune it as it is: leaven tune {file} --study studies/{name} --trials {TRIALS}"]
    sequences = max(recipe.batch.tokens // model.seq_len // SMALLER_BATCH, 1)
    batch = sequences * model.seq_len
    length = min(max(TOKENS_PER_PARAMETER * proxy.params, tokens // SHORTER), tokens)
    cost = TRIALS * proxy.params * length / (model.params * tokens)
    kept = proxy.d_ff * model.d_model == model.d_ff * proxy.d_model
    there, back = ("", "") if kept else (f" --d-ff {proxy.d_ff}", f" --d-ff {model.d_ff}")
    return [
        f"next, a proxy of {format_quantity(proxy.params)}, {TRIALS} trials of which cost {cost:.2g} of this run",
        f"leaven transfer {file} --width {proxy.d_model} --depth {proxy.n_layers}{there} --batch-tokens {batch} "
        f"--tokens {length} -o {name}-proxy.toml",
        f"leaven tune {name}-proxy.toml --study studies/{name} --trials {TRIALS}",
        f"leaven transfer studies/{name}/best.toml --width {model.d_model} --depth {model.n_layers}{back} "
        f"--batch-tokens {recipe.batch.tokens} --tokens {tokens} -o {name}-tuned.toml",
    ]


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
