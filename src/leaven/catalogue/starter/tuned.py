"""leaven's own tuned bases: small recipes with searched hyperparameters, for sizes where nothing is published.

A base is the recipe that ``leaven tune`` wrote, in ``catalogue/bases``: its values, with what is known of each under
``[why]``, belong to its own scale.
"""

from functools import cache
from pathlib import Path

from leaven.catalogue.derivation import Draft
from leaven.catalogue.starter.proxy import SMALL_FACTOR
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe, flatten
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

FOLDER = Path(__file__).parents[1] / "bases"
MEASURED = "no more than a start: at 222 k what laws and neighbours say was 0.03 nats better (docs/road.md)"
"""How a base did against the values that it replaces, where that was measured."""
SAME_DURATION = 4.0
"""A base is taken for as many tokens a parameter as its own, within this factor."""


@cache
def tuned_bases() -> tuple[Recipe, ...]:
    """All bases, from small to large."""
    return tuple(sorted((read_recipe(path) for path in FOLDER.glob("*.toml")), key=lambda base: base.model.params))


def tuned_base(model: ModelShape, tokens: int) -> Recipe | None:
    """The largest base of half the size of a model or less that is near enough to transfer from; None without one."""
    each = tokens / model.params
    for base in reversed(tuned_bases()):
        size, own = base.model.params, base.data.tokens / base.model.params
        near = 1 / SAME_DURATION <= each / own <= SAME_DURATION
        if near and 2 * size <= model.params <= SMALL_FACTOR * size and _at_base(model, base):
            return base
    return None


def take_tuned(draft: Draft, base: Recipe, tokens: int) -> None:
    """Set the hyperparameters and the share of the warm-up to those of a base."""
    document = base.hyperparameters.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    for path, value in flatten({"hyperparameters": document}).items():
        draft.set(path, value, f"{base.name}: {base.why.get(path, 'held in its search')}")
    share = base.schedule.warmup_tokens / base.data.tokens
    searched = base.why.get("schedule.warmup_tokens", "held in its search")
    draft.set("schedule.warmup_tokens", round(share * tokens), f"{share:.2%} of the run, as {base.name}: {searched}")
    tuned = base.hyperparameters
    draft.step(
        "lr, adam, init",
        [
            f"as {base.name}, tuned by leaven on {format_quantity(base.data.tokens)} tokens of "
            f"{', '.join(source.source for source in base.data.sources)} (docs/log.md)",
            f"lr {tuned.lr:.3g}",
            f"betas {tuned.beta1:.3g}, {tuned.beta2:.3g}",
            f"eps {tuned.eps:.2g}",
            f"decay {tuned.weight_decay:.2g}",
            f"init std {tuned.init_std:.3g}",
            f"residual {tuned.residual:.2g}",
            f"warm-up {share:.2%} of the run",
            MEASURED,
        ],
        [f"{base.name}: benchmarks/tuned_base"],
    )


def _at_base(model: ModelShape, base: Recipe) -> bool:
    """Whether a model's family has a member of a base's width and depth."""
    try:
        model.scaled(base.model.d_model, base.model.n_layers, d_ff=base.model.d_ff)
    except ValueError:
        return False
    return base.model.d_model <= model.d_model and base.model.n_layers <= model.n_layers
