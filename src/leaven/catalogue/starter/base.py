"""Choose the base of a starter recipe: the model and run length for which its hyperparameters are written.

The base is the target (the model that the user requests), a proxy (a smaller model to tune first), or a
tuned base (a small recipe in ``catalogue/bases`` that leaven tuned). The scaling rule converts
hyperparameters to the target.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from leaven.catalogue.messages import sentence
from leaven.catalogue.neighbours import neighbours
from leaven.catalogue.starter.draft import RunSize, StarterDraft, StarterRequest
from leaven.catalogue.starter.proxy import SMALL_FACTOR, TuningAdvice, choose_proxy
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe, flatten
from leaven.recipe.shape import ModelShape

FOLDER = Path(__file__).parents[1] / "bases"
SAME_DURATION = 4.0
"""A tuned base is used only if its tokens per parameter are within this factor of the target's."""


@dataclass(frozen=True)
class StarterBase:
    size: RunSize  # model and tokens
    batch_tokens: int
    tuning: TuningAdvice  # whether to tune a proxy
    tuned: Recipe | None = None  # the tuned base whose values are used, if any


def choose_base(draft: StarterDraft, request: StarterRequest, at: RunSize, batch: int) -> StarterBase:
    """Return the model for which the hyperparameters are set: a tuned base, a proxy worth tuning, or the target.

    ``at`` is the size of the target, and ``batch`` its batch in tokens. Raise InputError if ``--proxy`` is given
    with ``--from``, or is an impossible size.
    """
    if at.reference:
        if request.proxy:
            raise InputError(
                f"--proxy cannot be combined with --from {at.reference.id}, whose values are used without tuning; "
                "leave one of them out"
            )
        return StarterBase(at, batch, TuningAdvice(None, sentence("tuning", "reference", {"id": at.reference.id})))
    if request.proxy == 0:
        tuning = TuningAdvice(None, sentence("tuning", "declined", {}))
    else:
        tuning = choose_proxy(at.model, batch, at.tokens, len(at.near.close), request.proxy)
    proxy = tuning.proxy
    found = None if at.near.close or at.model.experts else tuned_base(at.model, at.tokens)
    facts: dict[str, Any] = {"why": tuning.reason, "params": proxy.params if proxy else None}
    if found:
        tuned, shape = found
        draft.step("proxy", message="tuned base", name=tuned.name, **facts)
        return StarterBase(RunSize(at.near, shape, tuned.data.tokens), tuned.batch.tokens, tuning, tuned)
    if proxy is None:
        draft.step("proxy", message="no proxy", **facts)
        return StarterBase(at, batch, tuning)
    near = neighbours(proxy.shape.params_active, proxy.tokens, experts=bool(at.model.experts))
    size = RunSize(near, proxy.shape, proxy.tokens)
    facts |= {"proxy": proxy, "each": size.tokens_per_parameter}
    facts |= {"steps": proxy.tokens // proxy.batch_tokens, "target_steps": at.tokens // batch}
    draft.step("proxy", ["arXiv 2512.22382"], **facts)
    return StarterBase(size, proxy.batch_tokens, tuning)


@cache
def tuned_bases() -> tuple[Recipe, ...]:
    return tuple(sorted((read_recipe(path) for path in FOLDER.glob("*.toml")), key=lambda base: base.model.params))


def tuned_base(model: ModelShape, tokens: int) -> tuple[Recipe, ModelShape] | None:
    """Return (base, shape), or None if no base fits. ``base`` is the largest tuned recipe that fits the model, and
    ``shape`` is the model scaled to the width and depth of the base.

    A base fits if it has 1/32 to 1/2 of the model's parameters, a similar number of tokens per parameter, and no
    larger width or depth, and if the model can be scaled to it.
    """
    each = tokens / model.params
    for base in reversed(tuned_bases()):
        shape = base.model
        size, own = shape.params, base.data.tokens / shape.params
        near = 1 / SAME_DURATION <= each / own <= SAME_DURATION
        smaller = shape.d_model <= model.d_model and shape.n_layers <= model.n_layers
        if near and smaller and 2 * size <= model.params <= SMALL_FACTOR * size:
            try:
                return base, model.scaled(shape.d_model, shape.n_layers, d_ff=shape.d_ff)
            except ValueError:  # the model cannot have this width, for example because of its heads
                continue
    return None


def take_tuned(draft: StarterDraft, base: Recipe, tokens: int) -> None:
    """Copy a tuned base's hyperparameters into the draft. The warm-up is scaled to a run of ``tokens`` tokens."""
    document = base.hyperparameters.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    for path, value in flatten({"hyperparameters": document}).items():
        draft.decide(path, value, "tuned", name=base.name, searched=base.why.get(path))
    path, share = "schedule.warmup_tokens", base.schedule.warmup_tokens / base.data.tokens
    facts = {"name": base.name, "searched": base.why.get(path), "share": share}
    draft.decide(path, round(share * tokens), "tuned", **facts)
    texts = [source.source for source in base.data.sources]
    draft.step("lr, adam, init", [f"{base.name}: benchmarks/tuned_base"], base=base, texts=texts, share=share)
