"""The end of a starter: precision, scaling, what guards the run, what is least sure."""

from leaven.catalogue.derivation import Draft
from leaven.catalogue.starter.defaults import DEFAULTS
from leaven.catalogue.starter.proxy import tuning
from leaven.catalogue.starter.setting import Setting
from leaven.recipe.recipe import flatten
from leaven.recipe.units import format_quantity


def finish(draft: Draft, at: Setting) -> None:
    """Steps 10 and 11: precision and scaling, then what guards the run, what comes next, what is least sure."""
    _precision(draft, at)
    _scaling(draft, at)
    draft.step(
        "layout, scale",
        [
            draft.document["precision"]["compute"],
            "one process, micro-batch timed where the run starts",
            f"rule complete-d-p, base {_base_text(draft)}",
        ],
    )
    tokens = at.tokens
    trouble = [run.id for run in at.near.runs if run.instabilities]
    draft.set(
        "stability.on_spike",
        "rollback",
        f"{len(trouble)} of {len(at.near.runs)} neighbours tell of trouble"
        + (f": {', '.join(trouble)}" if trouble else ""),
    )
    checkpoint, evaluation = max(tokens // 50, 1), max(tokens // 50, 1)
    held_out = min(max(tokens // 1_000, 8 * at.model.seq_len), 131_072)
    draft.set("stability.checkpoint_every_tokens", checkpoint, "a fiftieth of the run: what a crash costs at most")
    draft.set("evaluation.every_tokens", evaluation, "a fiftieth of the run")
    draft.set(
        "evaluation.tokens",
        held_out,
        f"50 evaluations of it are {50 * held_out / tokens:.2%} of the tokens of the run; a thousandth of the run, "
        "but 8 sequences at least, 131,072 tokens at most",
    )
    finished = draft.recipe().model_dump(mode="json", exclude_none=True, exclude={"why"})
    for path in flatten(finished):
        if path not in draft.why and path in DEFAULTS:
            draft.why[path] = DEFAULTS[path]
    said = [
        f"checkpoint and evaluation every {format_quantity(checkpoint)} tokens",
        "rollback from spikes",
        tuning(draft.recipe()),
        "least sure: "
        + "; ".join(
            f"{one.about}, {one.spread:.3g}x between its sources ({one.remedy})"
            for one in sorted(draft.unsure, key=lambda one: -one.spread)
        ),
    ]
    draft.step("guards, next", said)


def _precision(draft: Draft, at: Setting) -> None:
    said = at.near.most("precision.compute")
    counted = f" ({said.counted(str)})" if said else ""
    draft.set("precision.compute", "bf16", f"the range of fp32 without a loss scale{counted}")


def _scaling(draft: Draft, at: Setting) -> None:
    """The values are those of a scale: this one's, or with a lead its own, from where the rule moves them."""
    model, lead, batch = at.model, at.lead, draft.document["batch"]["tokens"]
    base = {"width": model.d_model, "depth": model.n_layers}
    why = (
        "this recipe's own scale: published values and laws are those of a size, so every ratio is 1 until it is "
        "transferred"
    )
    if lead and lead.arch.d_model and lead.arch.n_layers:
        group = model.n_heads // model.n_kv_heads
        unit = model.d_head * group
        width = max(round(lead.arch.d_model / unit), 1) * unit
        base = {
            "width": width,
            "depth": lead.arch.n_layers,
            "d_ff": lead.arch.d_ff or round(model.d_ff / model.d_model * width),
            "d_head": model.d_head,
            "n_kv_heads": width // unit,
        }
        rounded = "" if width == lead.arch.d_model else f" (its width of {lead.arch.d_model:,} in whole heads)"
        why = (
            f"the width and depth of {lead.id}{rounded}, from where the rule moves its values to this shape; "
            "not moved for tokens, for on those laws disagree in sign"
        )
    for key, value in (base | {"batch_tokens": batch, "tokens": at.tokens}).items():
        draft.set(f"scaling.base.{key}", value, why)
    draft.set(
        "scaling.rule",
        "complete-d-p",
        "at the base it multiplies nothing, as the standard parametrisation; from there transfer moves width, depth, "
        "batch and tokens by it (arXiv 2512.22382)",
    )


def _base_text(draft: Draft) -> str:
    base, model = draft.document["scaling"]["base"], draft.document["model"]
    wider, deeper = model["d_model"] / base["width"], model["n_layers"] / base["depth"]
    ratios = "its own, every ratio is 1" if wider == deeper == 1 else f"width x{wider:.3g}, depth x{deeper:.3g}"
    return f"width {base['width']:,} and depth {base['depth']}: {ratios}"
