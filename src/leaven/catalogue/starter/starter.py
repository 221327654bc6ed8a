"""A recipe for a size and a length out of published runs and laws: every value with its reason.

The method, whose steps are in the modules beside this one:

- shape, batch, ramp and schedule are chosen at the target; learning rate, moments, decay and init at the *base*,
  which is the proxy to tune, or the target itself where tuning is not worth its cost. The scaling rule carries them
  up from there;
- a lineage of published runs has one vote, and runs within a factor of 4 of the size have one, or the nearest three
  lineages; the farther a run, the less it weighs;
- what depends on size or duration is moved there before it is averaged: the lr of a neighbour with its size
  and batch, its batch with its tokens, the lr of a law with the batch;
- laws together and neighbours together weigh the same: neither has been right alone.
"""

from pydantic import ValidationError

from leaven.catalogue.derivation import Derivation, Draft
from leaven.catalogue.lead import find_lead, left_behind
from leaven.catalogue.runs import size_ratio
from leaven.catalogue.starter.adam import choose_adam
from leaven.catalogue.starter.asked import Asked, check
from leaven.catalogue.starter.base import choose_base
from leaven.catalogue.starter.batch import choose_batch, choose_ramp
from leaven.catalogue.starter.guards import finish
from leaven.catalogue.starter.lr import choose_lr, choose_schedule
from leaven.catalogue.starter.model import choose_shape, explain_shape
from leaven.catalogue.starter.setting import Setting
from leaven.catalogue.starter.tuned import take_tuned
from leaven.catalogue.votes import FACTOR, Neighbours, neighbours
from leaven.recipe.data import STDLIB_TOKENS
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

LEAST_SEQUENCES = 2_000


def starter(asked: Asked) -> Derivation:
    """The target's recipe and its derivation; the same for the same question. The planner chooses its layout.

    Raises:
        InputError: if the size or the length makes no sense, or the run to start from cannot be started from.
    """
    check(asked)
    lead = find_lead(asked.lead) if asked.lead else None
    near = neighbours(asked.params, asked.tokens, lead)
    draft = Draft()
    draft.set("name", asked.name, "the name of the file")
    model = choose_shape(asked, near)
    _size(draft, asked, model)
    _near(draft, near)
    explain_shape(draft, asked, near, model)
    if asked.tokens < LEAST_SEQUENCES * model.seq_len:
        raise InputError(
            f"--tokens {format_quantity(asked.tokens)} are fewer than {LEAST_SEQUENCES:,} sequences of "
            f"{model.seq_len:,}; {format_quantity(LEAST_SEQUENCES * model.seq_len)} will do, or a shorter --seq-len"
        )
    _duration(draft, asked, near, model)
    setting = Setting(near, model, asked.tokens, asked.gpus)
    batch = choose_batch(draft, setting)
    choose_ramp(draft, setting, batch)
    choose_schedule(draft, setting, batch)
    base = choose_base(draft, asked, setting, batch)
    if base.tuned:
        take_tuned(draft, base.tuned, asked.tokens)
    else:
        size = format_quantity(base.shape.params)
        where = f"for the proxy of {size}" if base.tuning.proxy else f"at {size}"
        lr = choose_lr(draft, base.setting, base.batch_tokens, where)
        choose_adam(draft, base.setting, base.batch_tokens, lr)
    finish(draft, setting, base)
    try:
        return Derivation(draft.recipe(), tuple(draft.steps), base.tuning)
    except ValidationError as error:
        raise InputError(f"no recipe comes of this: {explain(error)}") from None


def untuned(recipe: Recipe) -> Recipe:
    """A recipe with the hyperparameters and the schedule that a starter of its shape, batch and length has at that
    scale, where nothing is tuned."""
    at = Setting(neighbours(recipe.model.params, recipe.data.tokens), recipe.model, recipe.data.tokens, 1)
    draft, batch = Draft(), recipe.batch.tokens
    draft.set("batch", recipe.batch.model_dump(mode="json", exclude_none=True), "the recipe's own")
    choose_schedule(draft, at, batch)
    where = f"at {format_quantity(recipe.model.params)}"
    choose_adam(draft, at, batch, choose_lr(draft, at, batch, where))
    chosen = {name: draft.document[name] for name in ("schedule", "hyperparameters")}
    return recipe.replace(chosen | {"scaling": {"rule": "complete-d-p"}, "why": draft.why})


MOST_EPOCHS = 4
"""Epochs up to which repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""


def _size(draft: Draft, asked: Asked, model: ModelShape) -> None:
    off = model.params / asked.params - 1
    said = [
        f"{format_quantity(asked.params)} parameters asked for, N all of them",
        f"{format_quantity(model.params)} hit ({off:+.1%}), {format_quantity(model.params_non_embedding)} without "
        "embeddings",
    ]
    if abs(off) > 0.03:
        said.append("further off than 3%: this vocabulary and these proportions come no nearer")
    draft.step("size", said)


def _near(draft: Draft, near: Neighbours) -> None:
    if near.lineages_within == len(near.runs):
        said = [f"{len(near.runs)} lineages within a factor of {FACTOR:g}, the nearest run of each"]
    elif near.within:
        said = [
            f"{near.lineages_within} of the nearest {len(near.runs)} lineages within a factor of {FACTOR:g}, the "
            "nearest run of each"
        ]
    else:
        side = "smaller" if near.runs[0].params_total > near.params else "larger"
        said = [
            f"none within a factor of {FACTOR:g}: this is {near.distance:.3g} times {side} than the nearest, "
            f"{near.runs[0].id}; the {len(near.runs)} nearest lineages speak, and everything below is extrapolated"
        ]
    if near.lead:
        ratio = size_ratio(near.lead, near.params)
        said.insert(0, f"values of {near.lead.id} taken together, {ratio:.2g} times from it in size")
        lost = list(left_behind(near.lead))
        if lost:
            said.insert(1, f"not carried over: {', '.join(lost)}")
        said.append("they speak where it is silent")
    said.append(", ".join(f"{run.id} ({run.lineage.name})" for run in near.runs))
    draft.step("neighbours", said, near.sources(near.table))


def _duration(draft: Draft, asked: Asked, near: Neighbours, model: ModelShape) -> None:
    each = asked.tokens / model.params
    ratios = [run.tokens / run.params_total for run in near.runs if run.tokens]
    draft.set("data.tokens", asked.tokens, f"asked for: {each:.3g} tokens a parameter")
    stand_in = asked.source == "python-stdlib"
    text = STDLIB_TOKENS if stand_in else asked.text_tokens
    why = "the text that is on every machine with Python; name yours" if stand_in else "the text that was named"
    draft.set("data.source", asked.source, why)
    draft.set("data.tokenizer", "bpe", "trained on the source, to vocab_size tokens or as many as its pairs give")
    draft.step(
        "duration",
        [
            f"{format_quantity(asked.tokens)} tokens",
            f"{each:,.4g} a parameter",
            f"{each / 20:.2g} x the compute-optimal 20 or so (Chinchilla 2022)"
            + (", for a model that is cheaper to use" if each > 40 else ""),
            f"neighbours {min(ratios):,.0f} .. {max(ratios):,.0f} a parameter",
            *_epochs(asked, text, stand_in),
        ],
        ["arXiv 2203.15556"],
    )


def _epochs(asked: Asked, text: int | None, stand_in: bool) -> list[str]:
    """How often the text is seen, where that is known and more than once."""
    if text is None or asked.tokens <= text:
        return []
    epochs = asked.tokens / max(text, 1)
    said = f"about {epochs:,.0f} epochs of {asked.source}, which has about {format_quantity(text)} tokens"
    if stand_in and epochs > MOST_EPOCHS:
        return [f"{said}: a stand-in, give your text with --source"]
    return [f"{said}: up to {MOST_EPOCHS} are nearly as good as new text" if epochs > MOST_EPOCHS else said]
