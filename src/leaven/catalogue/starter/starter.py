"""Derive a recipe for a size and a duration from published runs and laws (`leaven new`), with reasons.

The method:

- The target is the model that the user requests. Its shape, batch, ramp and schedule are chosen
  directly.
- Learning rate, betas, decay and init are chosen for a model called the base, and the scaling rule
  converts them for the target. The base is usually the proxy: a smaller model that the user tunes first.
  If tuning is not worth its cost, the base is the target itself. If no published run is near the
  target's size, the base is a small model that leaven has tuned.
- The evidence is empirical laws and published runs. Each lineage (runs that copied one another's lr)
  within a factor of 4 of the target's size has one vote, and at least the three nearest lineages vote.
  Runs of more distant sizes have less weight; see :meth:`Neighbours.weights`. The size of a mixture of
  experts is the number of parameters that a token uses.
- Values are converted to the new recipe before they are averaged: the lr of a published run to the recipe's
  size and batch, the batch of a published run to the recipe's number of tokens, and the lr of a law to the
  recipe's batch.
- All laws together weigh as much as all published runs together. Laws outside their fitted range weigh
  less.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from pydantic import ValidationError

from leaven.catalogue.messages import constants, parts, sentence
from leaven.catalogue.neighbours import FACTOR, Neighbours, neighbours, size_ratio
from leaven.catalogue.runs import PublishedRun
from leaven.catalogue.starter.base import StarterBase, choose_base, take_tuned
from leaven.catalogue.starter.batch import batch_ramps, choose_batch, choose_ramp, repeated_growth
from leaven.catalogue.starter.draft import RunSize, StarterDraft, StarterRecipes, StarterRequest, find_reference
from leaven.catalogue.starter.optimizer import choose_adam, choose_lr, choose_schedule
from leaven.catalogue.starter.shape import choose_shape, decide_shape
from leaven.catalogue.terms import term, without_counterpart
from leaven.errors import InputError
from leaven.recipe.data import STDLIB_TOKENS
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe, flatten
from leaven.recipe.shape import Activation, ModelShape, NormPlacement, Positions
from leaven.recipe.units import format_quantity

LEAST_SEQUENCES = 2_000
"""Runs of fewer sequences are refused."""
MOST_EPOCHS = 4
"""Up to this many epochs, repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""
LEAST_HELD_OUT = 64
"""Fewest sequences in an evaluation: the loss of 8 sequences of 128 tokens was off by 0.17 nats."""
MOST_EVALUATED = 1 / 7
"""Evaluations read at most this many tokens per training token, which takes about 5% of a run's time."""
PROCESSOR_PARAMS = 20_000_000
"""Models of up to this many parameters get fp32, because they are often trained on CPUs, where bf16 is mostly
slower."""
HORIZON_OFF = 0.02
"""A published length of the lr decay counts as the length of the run if they differ by at most this share."""

# Tables of a run's file whose values are in other tables of a recipe.
_CARRIED = ("batch.", "schedule.", "precision.", "data.", "init.", "parallel.")


def starter(request: StarterRequest) -> StarterRecipes:
    """Return the requested recipe (the target) with the steps that derived it, or raise InputError.

    The layout is for one process. :func:`leaven.planning.start.start` adds a cluster layout and the proxy.
    """
    request.validate()
    run = find_reference(request.reference) if request.reference else None
    if run and run.experts:
        request = replace(request, experts=run.experts)
    near = neighbours(request.params_active, request.tokens, reference=run, experts=bool(request.experts))
    draft = StarterDraft(reference=request.reference)
    draft.decide("name", request.name)
    model = choose_shape(request, near)
    off = model.params / request.params - 1
    draft.step("size", params=request.params, model=model, off=off, far=abs(off) > 0.03)
    of_shape = near
    if request.experts:  # the shape shows how many parameters a token uses, which was only estimated before
        near = neighbours(model.params_active, request.tokens, reference=run, experts=True)
    _neighbours_step(draft, near, _precision(model))
    decide_shape(draft, request, of_shape, model)
    if request.tokens < LEAST_SEQUENCES * model.seq_len:
        raise InputError(
            f"--tokens {format_quantity(request.tokens)}: fewer than {LEAST_SEQUENCES:,} sequences of "
            f"{model.seq_len:,} tokens; give {format_quantity(LEAST_SEQUENCES * model.seq_len)} or more, "
            "or a shorter --seq-len"
        )
    _choose_duration(draft, request, near, model)
    size = RunSize(near, model, request.tokens, request.gpus)
    batch = choose_batch(draft, size)
    choose_ramp(draft, size, batch)
    choose_schedule(draft, size, batch)
    base = choose_base(draft, request, size, batch)
    if base.tuned:
        take_tuned(draft, base.tuned, request.tokens)
    else:
        params = format_quantity(base.size.model.params)
        where = f"for the proxy of {params}" if base.tuning.proxy else f"at {params}"
        lr = choose_lr(draft, base.size, base.batch_tokens, where)
        choose_adam(draft, base.size, base.batch_tokens, lr)
    _choose_scaling(draft, size, base)
    _choose_safeguards(draft, size, base)
    try:
        recipe = Recipe.model_validate(draft.document)
    except ValidationError as error:
        raise InputError(f"these values cannot be combined in a recipe: {explain(error)}") from None
    # The reasons for values that neither laws nor neighbours decide.
    written, defaults = flatten(recipe.model_dump(mode="json", exclude_none=True)), constants("defaults")
    others = {path: defaults[path] for path in written if path in defaults and path not in draft.why}
    origin = run or base.tuned
    source = {name: term(origin, f"model.{name}") for name in ("vocab_size", "seq_len")} if origin else {}
    return StarterRecipes(recipe.replace({"why": draft.why | others}), tuple(draft.steps), base.tuning, source=source)


def _neighbours_step(draft: StarterDraft, near: Neighbours, precision: str) -> None:
    run, runs = near.reference, near.runs
    draft.step(
        "neighbours",
        near.sources(near.table),
        ratio=size_ratio(run, near.params) if run else None,
        lost=list(_left_behind(run, precision)) or None if run else None,
        factor=FACTOR,
        experts=near.experts,
        runs=len(runs),
        close=len(near.close),
        all_close=len(near.close) == len(runs),
        some_close=0 < len(near.close) < len(runs),
        none_close=not near.close,
        distance=size_ratio(runs[0], near.params),
        side="smaller" if runs[0].params_active > near.params else "larger",
        nearest=runs[0].id,
        lineages=[f"{run.id} ({run.lineage.name})" for run in runs],
    )


def _precision(model: ModelShape) -> str:
    return "fp32" if model.params <= PROCESSOR_PARAMS else "bf16"


def _left_behind(run: PublishedRun, precision: str) -> Iterator[str]:
    """Yield the properties of a run that `leaven new --from` does not carry over. ``precision`` is the recipe's."""
    arch = run.arch
    dtype, growth_known = run.precision and run.precision.dtype, True
    if run.batch_grew and run.tokens and run.batch_tokens:
        growth_known = all(batch_ramps([run])) or repeated_growth(run, run.tokens, run.batch_tokens, 1) is not None
    stages = (run.ramp and run.ramp.stages) or ()
    schedule, tokens = run.schedule, run.tokens
    decayed = schedule.decay_tokens if schedule and schedule.shape != "wsd" else None
    horizon = decayed if decayed and tokens and abs(decayed / tokens - 1) > HORIZON_OFF else None
    positions = None if arch.positional == "rotary" else arch.positional
    yield from parts(
        "not_carried_over",
        "arch",
        {
            "placement": None if arch.norm_placement in get_args(NormPlacement) else arch.norm_placement,
            "activation": arch.activation if arch.activation not in get_args(Activation) else None,
            "instead": "swiglu" if arch.gated else "gelu",
            "latent": arch.kv_lora_rank,
            "precision": dtype if dtype != precision else None,
            "instead_of_it": precision,
            "horizon": horizon,
            "of_run": horizon and tokens and horizon / tokens,
            "start_lr": (schedule and schedule.start_lr) or None,
            "positions": positions if positions not in get_args(Positions) else None,
            "growth_known": growth_known,
            "other_lengths": any("seq_len" in stage for stage in stages),
        },
    )
    for path, value in without_counterpart(run):
        if value and not path.startswith(_CARRIED):
            yield f"{path.partition('.')[2]} {value}"


def _choose_duration(draft: StarterDraft, request: StarterRequest, near: Neighbours, model: ModelShape) -> None:
    each = request.tokens / model.params_active
    ratios = [run.tokens_per_parameter for run in near.runs if run.tokens_per_parameter]
    draft.decide("data.tokens", request.tokens, each=each, model=model)
    stand_in = request.source == "python-stdlib"
    draft.decide("data.source", request.source, stand_in=stand_in)
    draft.decide("data.tokenizer", "bpe")
    # Epochs of the text; None if at most one, or if the length of the text is unknown.
    text = STDLIB_TOKENS if stand_in else request.text_tokens and request.text_tokens(model.vocab_size)
    epochs = request.tokens / max(text, 1) if text is not None and request.tokens > text else None
    many = epochs is not None and epochs > MOST_EPOCHS
    draft.step(
        "duration",
        ["arXiv 2203.15556"],
        tokens=request.tokens,
        each=each,
        optimal=each / 20,
        long=each > 40,
        shortest=min(ratios),
        longest=max(ratios),
        source=request.source,
        text=text,
        epochs=epochs,
        stand_in=stand_in and many,
        repeated=MOST_EPOCHS if many and not stand_in else None,
    )


def _choose_scaling(draft: StarterDraft, at: RunSize, base: StarterBase) -> None:
    """Write precision, scaling rule and ``scaling.base`` to the draft; its shape is the reference run's, if known."""
    model, run, shape = at.model, at.reference, base.size.model
    if _precision(model) == "fp32":
        draft.decide("precision.compute", "fp32", "precision of a small model")
    else:
        votes = at.near.most("precision.compute")
        draft.decide("precision.compute", "bf16", votes=votes and replace(votes, value="bf16"))
    scale = {"width": shape.d_model, "depth": shape.n_layers}
    if model.d_ff * shape.d_model != shape.d_ff * model.d_model:
        scale |= {"d_ff": shape.d_ff, "d_head": shape.d_head, "n_kv_heads": shape.n_kv_heads}
    message = "base: tuned" if base.tuned else "base: proxy" if base.tuning.proxy else "base: target"
    if run and run.arch.d_model and run.arch.n_layers:
        unit = model.width_unit()
        width = max(round(run.arch.d_model / unit), 1) * unit
        d_ff = run.arch.d_ff or round(model.d_ff / model.d_model * width)
        if model.experts and run.arch.d_expert:  # d_expert / d_ff stays
            d_ff = model.d_ff * run.arch.d_expert // model.experts.d_expert
        scale = {
            "width": width,
            "depth": run.arch.n_layers,
            "d_ff": d_ff,
            "d_head": model.d_head,
            "n_kv_heads": width * model.n_kv_heads // model.d_model,
        }
        message = "base: reference"
    scale |= {"batch_tokens": base.batch_tokens, "tokens": base.size.tokens}
    rounded = run.arch.d_model if run and run.arch.d_model != scale["width"] else None
    for key, value in scale.items():
        name = base.tuned.name if base.tuned else None
        draft.decide(f"scaling.base.{key}", value, message, name=name, rounded=rounded)
    draft.decide("scaling.rule", "complete-d-p")
    ratios = {
        "width": model.d_model / scale["width"],
        "depth": model.n_layers / scale["depth"],
        "batch": draft.document["batch"]["tokens"] / scale["batch_tokens"],
        "tokens": at.tokens / scale["tokens"],
    }
    moved = [f"{axis} x{ratio:.3g}" for axis, ratio in ratios.items() if ratio != 1]
    draft.step("layout, scale", large=model.params > PROCESSOR_PARAMS, moved=moved or None)


def _choose_safeguards(draft: StarterDraft, at: RunSize, base: StarterBase) -> None:
    """Choose checkpoints, evaluations and the reaction to loss spikes, and list the least certain values."""
    tokens, runs = at.tokens, at.near.runs
    unstable = [run.id for run in runs if run.instabilities]
    draft.decide("stability.on_spike", "rollback", runs=len(runs), unstable=unstable or None, count=len(unstable))
    every = max(tokens // 50, 1)
    held_out = min(max(tokens // 1_000, LEAST_HELD_OUT * at.model.seq_len), 131_072)
    often = max(every, round(held_out / MOST_EVALUATED))
    draft.decide("stability.checkpoint_every_tokens", every)
    draft.decide("evaluation.every_tokens", often, share=often / tokens)
    draft.decide("evaluation.tokens", held_out, percent=100 * held_out / often)
    uncertain = [
        sentence("uncertain", about, facts | {"proxy": base.tuning.proxy is not None})
        for about, facts in sorted(draft.uncertain.items(), key=lambda item: -item[1]["spread"])
    ]
    draft.step("guards", uncertain="; ".join(uncertain) or None)
