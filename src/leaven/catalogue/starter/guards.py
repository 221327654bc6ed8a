"""The end of a starter: precision, scaling, what guards the run, what is least sure."""

from leaven.catalogue.derivation import Draft
from leaven.catalogue.starter.base import StarterBase
from leaven.catalogue.starter.defaults import DEFAULTS
from leaven.catalogue.starter.setting import Setting
from leaven.recipe.recipe import flatten
from leaven.recipe.units import format_quantity

PROCESSOR_PARAMS = 20_000_000
"""Up to this size models are trained on processors too, most of which compute bf16 at half the speed of fp32."""


def finish(draft: Draft, at: Setting, base: StarterBase) -> None:
    """The last two steps: precision and scaling, then what guards the run and what is least sure."""
    _precision(draft, at)
    _scaling(draft, at, base)
    draft.step(
        "layout, scale",
        [
            draft.document["precision"]["compute"]
            + ("" if at.model.params <= PROCESSOR_PARAMS else " (on a processor fp32 is mostly faster)"),
            "one process, micro-batch timed where the run starts",
            f"rule complete-d-p, base {_base_text(draft)}",
        ],
    )
    tokens = at.tokens
    trouble = [run.id for run in at.near.runs if run.instabilities]
    draft.set(
        "stability.on_spike",
        "rollback",
        f"{len(trouble)} of {len(at.near.runs)} neighbours report instabilities"
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
    unsure = [
        f"{one.about}, {one.spread:.3g}x between its sources"
        + (f" ({one.remedy})" if base.tuning.proxy or "tune" not in one.remedy else "")
        for one in sorted(draft.unsure, key=lambda one: -one.spread)
    ]
    said = [
        f"checkpoint and evaluation every {format_quantity(checkpoint)} tokens",
        "rollback from spikes",
        *(["least sure: " + "; ".join(unsure)] if unsure else []),
    ]
    draft.step("guards", said)


def _precision(draft: Draft, at: Setting) -> None:
    if at.model.params <= PROCESSOR_PARAMS:
        reason = (
            "small enough for a processor, where bf16 is mostly emulated at half of the speed; on a GPU take bf16"
        )
        draft.set("precision.compute", "fp32", reason)
        return
    said = at.near.most("precision.compute")
    counted = f" ({said.counted(str)})" if said else ""
    reason = f"the range of fp32 without a loss scale{counted}; on a processor without bf16 units take fp32"
    draft.set("precision.compute", "bf16", reason)


def _scaling(draft: Draft, at: Setting, base: StarterBase) -> None:
    """The scale that the values belong to: the proxy's, a lead's, or the target's own."""
    model, lead = at.model, at.lead
    scale = {"width": base.shape.d_model, "depth": base.shape.n_layers}
    implied = model.d_ff * base.shape.d_model == base.shape.d_ff * model.d_model
    if not implied:
        scale |= {"d_ff": base.shape.d_ff, "d_head": base.shape.d_head, "n_kv_heads": base.shape.n_kv_heads}
    if base.tuned:
        why = f"the scale of {base.tuned.name}, where leaven tuned the values; the rule carries them to this recipe"
    elif base.tuning.proxy:
        why = "the proxy's scale: the values are chosen and tuned there, and the rule carries them to this recipe"
    else:
        why = "this recipe's own scale: the values are chosen for it, and every ratio is 1"
    if lead and lead.arch.d_model and lead.arch.n_layers:
        group = model.n_heads // model.n_kv_heads
        unit = model.d_head * group
        width = max(round(lead.arch.d_model / unit), 1) * unit
        scale = {
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
    scale |= {"batch_tokens": base.batch_tokens, "tokens": base.setting.tokens}
    for key, value in scale.items():
        draft.set(f"scaling.base.{key}", value, why)
    draft.set(
        "scaling.rule",
        "complete-d-p",
        "at the base it multiplies nothing; from there it moves the values over width, depth, batch and tokens "
        "(arXiv 2512.22382)",
    )


def _base_text(draft: Draft) -> str:
    base, model = draft.document["scaling"]["base"], draft.document["model"]
    ratios = {
        "width": model["d_model"] / base["width"],
        "depth": model["n_layers"] / base["depth"],
        "batch": draft.document["batch"]["tokens"] / base["batch_tokens"],
        "tokens": draft.document["data"]["tokens"] / base["tokens"],
    }
    moved = ", ".join(f"{axis} x{ratio:.3g}" for axis, ratio in ratios.items() if ratio != 1)
    return f"width {base['width']:,} and depth {base['depth']}: {moved or 'its own, every ratio is 1'}"
