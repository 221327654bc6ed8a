"""The shape of a starter and its reasons: proportions as the neighbours have them, at the size asked for."""

import math
from dataclasses import replace
from typing import Any

from leaven.catalogue.batch_change import is_critical
from leaven.catalogue.derivation import Draft
from leaven.catalogue.laws import evaluate
from leaven.catalogue.run import Run
from leaven.catalogue.runs import load_runs, size_ratio
from leaven.catalogue.starter.asked import Asked
from leaven.catalogue.starter.shape import (
    TIED_SHARE,
    TOLERANCE,
    VOCABULARIES,
    VOCABULARY_SHARE,
    Proportions,
    shape_of,
    usual_ff_ratio,
    usual_width,
    vocabulary,
)
from leaven.catalogue.votes import FACTOR, OWN, Neighbours, middle, neighbours
from leaven.recipe.errors import InputError
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity, parse_quantity

_STACK = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "qk_norm": True, "bias": False}
_QK_NORM = (
    "bounds the attention logits, so that an lr that is too high costs less (Wortsman et al. 2023, arXiv 2309.14322)"
)


FARTHEST = 0.05
"""A shape farther than this from the parameters that were asked for is refused."""


SHORT = 4_096
"""Positions up to which RoPE's own theta of 10,000 will do."""
SMALL_ASPECT = 16.0
"""d / L at most where nothing near the size is published: small models are better deep and narrow (MobileLLM, arXiv
2402.14905, at 125 M and 350 M; SmolLM-135M has 19)."""
RECENT = "2024"
"""Sequence length and shared key-value heads follow the year more than the size: runs from this year on decide."""
LEAST_SEQUENCES_A_BATCH = 64
"""A batch holds as many sequences, so that the batch of a proxy, a small share of it, is still whole sequences."""
SHORTEST = 128


def choose_shape(asked: Asked, near: Neighbours) -> ModelShape:
    """
    Raises:
        InputError: if none comes near the size; names a vocabulary or a size that fits.
    """
    model = _nearest(asked, near)
    off = model.params / asked.params - 1
    if abs(off) <= FARTHEST:
        return model
    least = f" and the proportions of {near.lead.id}" if near.lead else ""
    raise InputError(
        f"--params {asked.params:,}: with a vocabulary of {model.vocab_size:,}{least} the nearest shape has "
        f"{format_quantity(model.params)} ({off:+.0%}); give {_fitting(asked, near, model)}"
    )


def _fitting(asked: Asked, near: Neighbours, model: ModelShape) -> str:
    """The options with which the question has an answer: a smaller vocabulary, a larger size."""

    def fits(other: Asked) -> bool:
        found = _nearest(other, neighbours(other.params, other.tokens, near.lead))
        return abs(found.params / other.params - 1) <= FARTHEST

    smaller = (size for size in reversed(VOCABULARIES) if size < model.vocab_size)
    larger = (format_quantity(model.params * 1.1**n).replace(" ", "") for n in range(50))
    vocab = next((size for size in smaller if fits(replace(asked, vocab=size))), None)
    params = next((size for size in larger if fits(replace(asked, params=parse_quantity(size)))), None)
    options = [f"--vocab {vocab}" if vocab else "", f"--params {params}" if params else ""]
    return " or ".join(filter(None, options)) or "another size"


def _nearest(asked: Asked, near: Neighbours) -> ModelShape:
    lead = near.lead
    stack = _stack_of(lead) if lead else _STACK
    aspect = middle(_aspects(near)).value
    if not (lead or near.within):
        aspect = min(aspect, SMALL_ASPECT)
    width = usual_width(asked.params, aspect)
    usual = middle(near.values("model.vocab_size")).value
    vocab = asked.vocab or (round(usual) if lead else vocabulary(asked.params, width, usual))
    tied = lead.arch.tied_embeddings if lead else None
    if tied is None:
        tied = vocab * width > TIED_SHARE * asked.params
    seq_len = _seq_len(asked, near)
    fixed = stack | {"vocab_size": vocab, "seq_len": seq_len, "tied_embeddings": tied}
    if not lead and seq_len > SHORT:
        fixed["rope_theta"], _ = _theta_of_long()
    own = _own_shape(lead, fixed) if lead else None
    if own and abs(own.params / asked.params - 1) <= TOLERANCE:
        return own
    return shape_of(asked.params, _proportions(near, aspect, width, str(stack["activation"])), fixed)


def _theta_of_long() -> tuple[float, list[str]]:
    """What most runs of more than ``SHORT`` positions took, and which ones."""
    by: dict[float, list[str]] = {}
    for run in load_runs():
        if run.arch.rope_theta and run.data and (run.data.seq_len or 0) > SHORT:
            by.setdefault(run.arch.rope_theta, []).append(run.id)
    return max(by.items(), key=lambda pair: len(pair[1]))


def _own_shape(lead: Run, fixed: dict[str, Any]) -> ModelShape | None:
    """The run's own depth and widths; None where one is not published, or its heads are not as wide as it is."""
    arch = lead.arch
    if not (arch.d_model and arch.n_layers and arch.n_heads and arch.n_kv_heads and arch.d_ff):
        return None
    d_head = arch.d_head or arch.d_model // arch.n_heads
    if arch.n_heads * d_head != arch.d_model:
        return None
    sides = {name: getattr(arch, name) for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff")}
    return ModelShape.model_validate(fixed | sides | {"d_head": d_head})


def _proportions(near: Neighbours, aspect: float, width: float, activation: str) -> Proportions:
    arch = near.lead.arch if near.lead else None
    if arch and arch.n_heads and arch.n_kv_heads and arch.d_ff and arch.d_model:
        d_head = arch.d_head or arch.d_model // arch.n_heads
        group = arch.n_heads // arch.n_kv_heads
        return Proportions(aspect, arch.d_ff / arch.d_model, d_head, group, width=arch.d_model)
    d_head = next(size for least, size in ((1_024, 128), (256, 64), (128, 32), (0, 16)) if width >= least)
    grouped = _grouped(near) and width >= 2 * 8 * d_head
    n_heads = round(width / d_head)
    ratio = usual_ff_ratio(activation, n_heads, 8 if grouped else n_heads)
    return Proportions(aspect, ratio, d_head, n_kv_heads=8 if grouped else None)


def _aspects(near: Neighbours) -> dict[str, float]:
    return near.of(
        lambda run: run.arch.d_model / run.arch.n_layers if run.arch.d_model and run.arch.n_layers else None
    )


def _grouped(near: Neighbours) -> bool:
    """Whether at least half of the recent lineages share key-value heads."""
    shares = list(_groups(near).values())
    return sum(group > 1 for group in shares) * 2 >= max(len(shares), 1)


def _groups(near: Neighbours) -> dict[str, float]:
    return {
        run.id: run.arch.n_heads / run.arch.n_kv_heads
        for run in _recent(near)
        if run.arch.n_heads and run.arch.n_kv_heads
    }


def _recent(near: Neighbours) -> list[Run]:
    """The newest run of each lineage within the factor in size, those from `RECENT` on if there are any."""
    newest: dict[str, Run] = {}
    for run in sorted(load_runs(), key=lambda run: run.date):
        if run.kind == "dense" and run.lineage.name != OWN and size_ratio(run, near.params) <= FACTOR:
            newest[run.lineage.name] = run
    return [run for run in newest.values() if run.date >= RECENT] or list(near.runs)


def _lengths(near: Neighbours) -> dict[str, int]:
    if near.lead:
        return near.values("model.seq_len")
    return {run.id: run.data.seq_len for run in _recent(near) if run.data and run.data.seq_len}


def _seq_len(asked: Asked, near: Neighbours) -> int:
    """As the recent neighbours have it, but `LEAST_SEQUENCES_A_BATCH` fit into the batch that the laws suggest."""
    if asked.seq_len:
        return asked.seq_len
    usual = float(middle(_lengths(near)).value)
    if near.lead:
        return round(usual)
    laws = [law for law in evaluate(asked.params, asked.tokens) if law.form_of is None]
    batch = middle({law.law: law.batch_tokens for law in laws if law.batch_tokens and not is_critical(law)}).value
    length = min(usual, max(batch / LEAST_SEQUENCES_A_BATCH, SHORTEST))
    return 1 << math.floor(math.log2(length) + 0.25)


def _stack_of(lead: Run) -> dict[str, Any]:
    """A run's choices, as far as leaven has them."""
    arch = lead.arch
    known = {
        "norm": arch.norm,
        "activation": arch.activation if arch.activation in ("swiglu", "gelu", "relu", "squared_relu") else None,
        "positions": {"rotary": "rope", "learned": "learned", "alibi": "alibi"}.get(arch.positional or ""),
        "qk_norm": arch.qk_norm,
        "bias": arch.bias,
        "embedding_norm": arch.embedding_norm,
        "rope_theta": arch.rope_theta,
        "dropout": lead.optim.dropout if lead.optim else None,
    }
    chosen = _STACK | {"qk_norm": False} | {key: value for key, value in known.items() if value is not None}
    if known["activation"] is None and arch.activation and not arch.gated:
        chosen["activation"] = "gelu"
    return chosen


def explain_shape(draft: Draft, asked: Asked, near: Neighbours, model: ModelShape) -> None:
    lead = near.lead
    aspects, heads = middle(_aspects(near)), model.n_heads
    of = f"as {lead.id}" if lead else "the middle of the neighbours"
    said_aspect = (
        f"d / L {model.d_model / model.n_layers:.3g}; {of} {aspects.value:.3g}: {aspects.told('{:.3g}'.format)}"
    )
    whole = "layers that 4 pipeline stages share" if model.n_layers % 4 == 0 else "the count that hits the size"
    draft.set("model.n_layers", model.n_layers, f"{said_aspect}; {whole}")
    draft.set("model.d_model", model.d_model, f"{said_aspect}; a multiple of the head dimension {model.d_head}")
    head_dims = near.values("model.d_head")
    said_head = (
        f"16 below a width of 128, 32 below 256, 64 below 1,024, 128 from there: {middle(head_dims).told(str)}"
    )
    draft.set("model.d_head", model.d_head, f"as {lead.id}" if lead else said_head)
    draft.set("model.n_heads", heads, "d_model / d_head")
    groups = ", ".join(f"{id} {group:.3g}" for id, group in _groups(near).items())
    shared = (
        f"{model.n_kv_heads} for {heads}: half of the recent lineages or more share them, and 8 divide over a node"
        if model.n_kv_heads < heads
        else "one each: the model is too narrow for 8 that are shared"
        if _grouped(near)
        else "one each: most recent lineages share none"
    )
    draft.set(
        "model.n_kv_heads",
        model.n_kv_heads,
        f"query heads to a key-value head as {lead.id}" if lead else f"{shared}; query heads to each: {groups}",
    )
    ratio = model.d_ff / model.d_model
    usual = usual_ff_ratio(model.activation, heads, model.n_kv_heads)
    draft.set(
        "model.d_ff",
        model.d_ff,
        f"{ratio:.3g} d_model, a multiple of 64: {of if lead else f'{usual:.3g} makes a block of 12 d_model^2'}"
        + ("" if lead else " (Shazeer 2020, arXiv 2002.05202; what fewer key-value heads save goes here)"),
    )
    vocabularies = middle(near.values("model.vocab_size"))
    draft.set(
        "model.vocab_size",
        model.vocab_size,
        "asked for"
        if asked.vocab
        else f"{of} {vocabularies.value:,.0f}: {vocabularies.told('{:,}'.format)}"
        + ("" if lead else f"; rounded, and its matrix at most {VOCABULARY_SHARE:.0%} of the parameters"),
    )
    share = model.vocab_size * model.d_model / asked.params
    draft.set(
        "model.tied_embeddings",
        model.tied_embeddings,
        f"as {lead.id}"
        if lead and lead.arch.tied_embeddings is not None
        else f"a matrix of the vocabulary is {share:.1%} of the parameters; one for both from {TIED_SHARE:.0%} on: "
        f"{_told(near, 'model.tied_embeddings')}",
    )
    lengths = middle(_lengths(near))
    among = of if lead else "the middle of the recent neighbours"
    shorter = model.seq_len < lengths.value / 1.5 and not asked.seq_len
    fits = f"; shorter, so that a batch holds {LEAST_SEQUENCES_A_BATCH} sequences" if shorter else ""
    draft.set(
        "model.seq_len",
        model.seq_len,
        "asked for" if asked.seq_len else f"{among} {lengths.value:,.0f}: {lengths.told(str)}{fits}",
    )
    for field in ("norm", "activation", "positions", "qk_norm", "bias", "embedding_norm", "rope_theta", "dropout"):
        path, value = f"model.{field}", getattr(model, field)
        if field in _STACK or (lead and lead.id in near.values(path)):
            draft.set(path, value, _stack_reason(near, path, value))
    if not lead and model.seq_len > SHORT:
        theta, runs = _theta_of_long()
        draft.set("model.rope_theta", theta, f"for more than {SHORT:,} positions, as {', '.join(runs)}")
    draft.step(
        "shape",
        [
            f"L {model.n_layers}  d {model.d_model:,}  heads {heads}x{model.d_head}  kv {model.n_kv_heads}  "
            f"d_ff {model.d_ff:,}  vocab {model.vocab_size:,}  seq {model.seq_len:,}",
            f"d / L {model.d_model / model.n_layers:.3g} ({of} {aspects.value:.3g}, {aspects.low:.3g} .. "
            f"{aspects.high:.3g})",
            f"d_ff / d {ratio:.3g}",
            "embeddings tied" if model.tied_embeddings else "embeddings not tied",
            f"{model.norm}, {model.activation}, {model.positions}" + (", QK-norm" if model.qk_norm else ""),
        ],
        [*near.sources(aspects.by), "Shazeer 2020, arXiv 2002.05202"],
    )


def _told(near: Neighbours, path: str) -> str:
    return ", ".join(f"{who} {value}" for who, value in near.values(path).items())


def _stack_reason(near: Neighbours, path: str, value: Any) -> str:
    by = near.values(path)
    if near.lead:
        own = by.get(near.lead.id)
        return (
            f"as {near.lead.id}" if own == value else f"leaven's own, for {near.lead.id} has what it does not build"
        )
    agree = [who for who, said in by.items() if said == value]
    counted = f"{len(agree)} of {len(by)} lineages ({', '.join(agree) or 'none'})"
    if path == "model.qk_norm":
        return f"{_QK_NORM}; {counted} of this size, and since 2024 OLMo 2 and 3, OpenELM, DCLM, Marin, Apertus"
    return f"the block of LLaMA, which every exporter knows: {counted}"
