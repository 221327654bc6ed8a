"""Choose the shape of a starter recipe from the proportions of the nearest published runs.

Symbols: d is d_model, L is the number of layers, and f is d_ff, the width of the MLP.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, get_args

from leaven.catalogue.groups import PublishedArchitecture
from leaven.catalogue.laws import batches, evaluate
from leaven.catalogue.neighbours import ALIKE, Neighbours, Votes, first_of_each, middle, mixtures, neighbours
from leaven.catalogue.runs import PublishedRun, load_runs
from leaven.catalogue.starter.draft import StarterDraft, StarterRequest, widths_of_experts
from leaven.catalogue.terms import term, terms
from leaven.errors import InputError
from leaven.recipe.experts import Experts
from leaven.recipe.shape import GATED, Activation, ModelShape, NormPlacement, Positions
from leaven.recipe.units import format_quantity, parse_quantity

TOLERANCE = 0.03
"""The parameter count of a shape should differ from the requested count by at most this share."""
VOCABULARIES = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072)
"""Vocabulary sizes to choose from. All are divisible by 128 and by tensor-parallel degrees of 2, 4 and 8."""
VOCABULARY_SHARE = 0.25
"""The embedding may have at most this share of the parameters."""
TIED_SHARE = 0.08
"""Embedding and unembedding are tied if the embedding has more than this share of the parameters."""
FARTHEST = 0.05
"""A shape that differs from the requested parameters by more than this share is refused."""
SHORT = 4_096
"""For sequences of up to this many tokens RoPE's default theta of 10,000 is used."""
SMALL_ASPECT = 16.0
"""Largest d_model / n_layers if no published run is near the model's size. Small models are better deep and narrow
(MobileLLM, arXiv 2402.14905, at 125 M and 350 M). The ratio of SmolLM-135M is 19."""
RECENT = "2024"
"""Runs from this year on decide sequence length and grouped-query attention, which depend more on the year than on
the size."""
SEQUENCES_A_BATCH = 64
"""The sequence length is chosen so that a batch of the size predicted by scaling laws has at least about this many
sequences. Then the smaller batch of a proxy still has several."""
SHORTEST = 128
"""Tokens of the shortest sequence."""
_DEEPEST = 200  # layers
_UNEVEN = (0.0, 0.1, 0.03, 0.1)  # cost of a number of layers, by its remainder modulo 4
# (least width, unit): from this width on, widths are multiples of this unit. With 1,024 the number of heads of size
# 128 is divisible by 8, the GPUs of a node.
_ROUND = ((4_096, 1_024), (2_048, 512), (1_024, 256), (512, 128), (256, 64), (128, 32), (0, 16))
_STACK = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "qk_norm": True, "bias": False}
# Further choices that a reference run decides; otherwise they are the defaults of `ModelShape`.
_OF_REFERENCE = ("norm_placement", "parallel_branches", "qk_norm_whole", "attention_bias", "rotary_fraction")
_CHOICES = (*_STACK, "embedding_norm", "rope_theta", "dropout", *_OF_REFERENCE)
_HEADS = ("d_head", "n_heads", "n_kv_heads")
_VOTED = ("shared", "dense_layers")  # values of the experts that similar published mixtures decide
_SIZES = ("n_layers", "d_model", *_HEADS, "d_ff", "vocab_size", "tied_embeddings", "seq_len")


class Proportions(NamedTuple):
    aspect: float  # d / L
    ff_ratio: float  # f / d
    d_head: int
    group: int = 1  # query heads per key-value head
    n_kv_heads: int | None = None  # fixed number of key-value heads, used instead of group
    width: int | None = None  # width of the reference run (``--from``), which is allowed even if it is not round
    attention: Fraction = Fraction(1)  # (width of all heads together) / d

    def heads(self, d: int) -> dict[str, int | None]:
        """Return the width and the head fields of a shape. d_model is ``d``, a multiple of :attr:`unit`."""
        together = int(d * self.attention)
        n_heads = together // self.d_head
        return {
            "d_model": d,
            "d_head": self.d_head,
            "n_heads": n_heads,
            "n_kv_heads": self.n_kv_heads or n_heads // self.group,
            "d_attention": together if together != d else None,
        }

    @property
    def unit(self) -> int:
        """Return the smallest valid d_model. At its multiples, n_heads is whole and a multiple of n_kv_heads."""
        return (Fraction(self.d_head * (self.n_kv_heads or self.group)) / self.attention).numerator


def usual_ff_ratio(activation: str, n_heads: int, n_kv_heads: int) -> float:
    """Return the d_ff / d_model at which a block has 12 d_model^2 parameters (arXiv 2002.05202), such as 4 or 8/3."""
    return (12 - 2 - 2 * n_kv_heads / n_heads) / (3 if activation in GATED else 2)


def vocabulary(params: int, width: float, usual: float) -> int:
    """Return the size in `VOCABULARIES` nearest to ``usual``, or the next smaller one whose embedding fits.

    An embedding of ``width`` fits if it has at most `VOCABULARY_SHARE` of ``params``. The smallest always fits.
    """
    nearest = min(VOCABULARIES, key=lambda size: abs(math.log(size / usual)))
    fitting = [size for size in VOCABULARIES if size <= nearest and size * width <= VOCABULARY_SHARE * params]
    return max(fitting, default=VOCABULARIES[0])


def shape_of(
    params: int,
    usual: float,
    proportions: Proportions,
    fixed: dict[str, Any],
    experts: Mapping[str, Any] | None = None,
) -> ModelShape:
    """Return a shape with about ``params`` parameters and with proportions near ``proportions``.

    Of the shapes within `TOLERANCE` of ``params``, return the one with the nearest proportions; if there is none, the
    one with the nearest size. Numbers of layers that suit pipeline stages are preferred (`_UNEVEN`).

    Args:
        usual: the width to start from. Widths up to 3 times smaller or larger are tried.
        fixed: values of the other fields of :class:`ModelShape`.
        experts: values of :class:`Experts` without d_expert, which follows from d_ff.
    """

    def cost(pair: tuple[ModelShape, int]) -> tuple[bool, float]:
        shape, size = pair
        off = abs(size / params - 1)
        if off > TOLERANCE:
            return True, off
        aspect = abs(math.log(shape.d_model / shape.n_layers / proportions.aspect))
        ff = abs(math.log(shape.d_ff / shape.d_model / proportions.ff_ratio))
        return False, aspect + 5 * ff + 3 * off + _UNEVEN[shape.n_layers % 4]

    def shapes() -> Iterator[tuple[ModelShape, int]]:
        for d in _widths(usual, proportions):
            sides = fixed | proportions.heads(d) | {"n_layers": shallowest}
            for f in _mlp_widths(d, proportions):
                one = ModelShape.model_validate(sides | _mlp(f, experts))
                layer = one.model_copy(update={"n_layers": shallowest + 1}).params - one.params
                ends = one.params - shallowest * layer
                exact = (params - ends) / layer
                for depth in {math.floor(exact), math.ceil(exact)}:
                    n_layers = min(max(depth, shallowest), _DEEPEST)
                    yield one.model_copy(update={"n_layers": n_layers}), ends + n_layers * layer

    shallowest = 1 + experts["dense_layers"] if experts else 1
    best, _ = min(shapes(), key=cost)
    return ModelShape.model_validate(best.model_dump())


def _mlp(width: int, experts: Mapping[str, Any] | None, d_expert: int | None = None) -> dict[str, Any]:
    """Return the model fields ``d_ff`` and, if any, ``experts`` for MLPs of ``width`` that a token uses in total."""
    if experts is None:
        return {"d_ff": width}
    used = experts["active"] + experts["shared"]
    step = 64 if width >= 512 * used else 8
    d_expert = d_expert or max(round(width / used / step), 1) * step
    return {"d_ff": used * d_expert, "experts": {**experts, "d_expert": d_expert}}


def _experts_of(request: StarterRequest, run: PublishedRun | None) -> dict[str, Any] | None:
    """Return the fields of :class:`Experts` except d_expert, with the values that ``run`` publishes."""
    if request.experts is None:
        return None
    number, active = request.experts
    near = mixtures(request.params_active, request.experts, run)
    votes = {name: near.most(f"model.experts.{name}") for name in _VOTED}
    made = {name: most.value if most else 0 for name, most in votes.items()}
    router = "sigmoid" if made["shared"] else "softmax"
    made |= {"number": number, "active": active, "normalise": active > 1, "router": router}
    return made | {name: value for name, value in _published_experts(run).items() if name != "d_expert"}


def _published_experts(run: PublishedRun | None) -> dict[str, Any]:
    known = {name: term(run, f"model.experts.{name}") for name in Experts.model_fields if run}
    return {name: value for name, value in known.items() if value is not None}


def _widths(usual: float, proportions: Proportions) -> list[int]:
    """Return the widths to choose from: multiples of ``proportions.unit`` between 1/3 and 3 times ``usual``.

    If some are round (``_ROUND``) or the reference run's width, return only those. If none is in range, the unit.
    """
    unit = proportions.unit
    steps = range(1, max(round(4 * usual / unit), 8) + 1)
    widths = [unit * step for step in steps if usual / 3 <= unit * step <= 3 * usual]
    round_ones = [d for d in widths if d % next(step for least, step in _ROUND if d >= least) == 0]
    return [d for d in widths if d in round_ones or d == proportions.width] or widths or [unit]


def _mlp_widths(d: int, proportions: Proportions) -> list[int]:
    """Return the MLP widths to try at width ``d``: within 12.5% of ``ff_ratio`` x d, the nearest first."""
    wanted = proportions.ff_ratio * d
    step = 32 if d < 512 else 64 if d < 1_024 or proportions.width else 128 if d < 2_048 else 256
    nearest = max(round(wanted / step), 1) * step
    around = sorted({nearest + n * step for n in range(-6, 7)}, key=lambda f: abs(f - wanted))
    return [f for f in around if f > 0 and abs(f / wanted - 1) <= 1 / 8] or [nearest]


def choose_shape(request: StarterRequest, near: Neighbours) -> ModelShape:
    """Return the shape of a starter recipe. Raise InputError if no shape is near the requested size."""
    model = _nearest(request, near)
    off = model.params / request.params - 1
    if abs(off) <= FARTHEST:
        return model

    def fits(other: StarterRequest) -> bool:
        found = _nearest(
            other, neighbours(other.params_active, other.tokens, reference=near.reference, experts=near.experts)
        )
        return abs(found.params / other.params - 1) <= FARTHEST

    smaller = (size for size in reversed(VOCABULARIES) if size < model.vocab_size)
    larger = (format_quantity(model.params * 1.1**n).replace(" ", "") for n in range(50))
    vocab = next((size for size in smaller if fits(replace(request, vocab=size))), None)
    params = next((size for size in larger if fits(replace(request, params=parse_quantity(size)))), None)
    options = [f"--vocab {vocab}" if vocab else "", f"--params {params}" if params else ""]
    with_proportions = f" and the proportions of {near.reference.id}" if near.reference else ""
    raise InputError(
        f"--params {request.params:,}: with a vocabulary of {model.vocab_size:,}{with_proportions} the nearest shape "
        f"has {format_quantity(model.params)} ({off:+.0%}); give "
        f"{' or '.join(filter(None, options)) or 'another size'}"
    )


def _nearest(request: StarterRequest, near: Neighbours) -> ModelShape:
    run, arch = near.reference, near.reference.arch if near.reference else None
    width = _usual_width(request, near)
    stack = _stack_of(run) if run else _STACK
    aspect = _usual_aspect(near)
    usual = middle(near.values("model.vocab_size")).value
    published = run and term(run, "model.vocab_size")
    vocab = request.vocab or published or vocabulary(request.params_active, width, usual)
    tied = arch.tied_embeddings if arch else None
    if tied is None:
        tied = _embedding_share(request, near, vocab) > TIED_SHARE
    seq_len = _seq_len(request, near)
    fixed = stack | {"vocab_size": vocab, "seq_len": seq_len, "tied_embeddings": tied}
    if not run and seq_len > SHORT:
        fixed["rope_theta"], _ = _theta_of_long()
    experts = _experts_of(request, run)
    proportions = _proportions(near, aspect, width, str(stack["activation"]), experts)
    if arch and arch.d_model and arch.n_layers and arch.d_model % proportions.unit == 0 and (arch.d_ff or experts):
        own = _mlp(0, experts, arch.d_expert) | ({"d_ff": arch.d_ff} if arch.d_ff else {})
        sides = fixed | proportions.heads(arch.d_model) | {"n_layers": arch.n_layers}
        same = ModelShape.model_validate(sides | own)
        if abs(same.params / request.params - 1) <= TOLERANCE:
            return same
    return shape_of(request.params, width, proportions, fixed, experts)


def _proportions(
    near: Neighbours, aspect: float, width: float, activation: str, experts: Mapping[str, Any] | None
) -> Proportions:
    """Return ``aspect`` and the other proportions: those that the reference run publishes, else the usual ones."""
    run = near.reference
    arch = run.arch if run else PublishedArchitecture(source="none", confidence="file")
    heads: dict[str, Any]
    if run and arch.d_model and arch.n_heads and arch.n_kv_heads and arch.head_dim:
        together = arch.n_heads * arch.head_dim
        # Else the width is not a multiple of d_head and will be rounded (GPT-3 13B), or the source contradicts its
        # own count of parameters (GPT-3 1.3B).
        other = abs(together - arch.d_model) >= arch.head_dim and run.params.shape_check is None
        heads = {"d_head": arch.head_dim, "group": arch.n_heads // arch.n_kv_heads}
        heads |= {"attention": Fraction(together, arch.d_model)} if other else {}
    else:
        d_head = next(size for least, size in ((1_024, 128), (256, 64), (128, 32), (0, 16)) if width >= least)
        heads = {"d_head": d_head, "n_kv_heads": 8 if _grouped(near) and width >= 2 * 8 * d_head else None}
    n_heads = round(width / heads["d_head"])
    ratio = usual_ff_ratio(activation, n_heads, heads.get("n_kv_heads") or n_heads)
    if experts and arch.d_expert and arch.d_model:
        ratio = (experts["active"] + experts["shared"]) * arch.d_expert / arch.d_model
    elif experts:
        ratio = float(widths_of_experts(mixtures(near.params)).value)
    elif arch.d_ff and arch.d_model:
        ratio = arch.d_ff / arch.d_model
    return Proportions(aspect, ratio, **heads, width=arch.d_model if experts or "group" in heads else None)


def _usual_aspect(near: Neighbours) -> float:
    aspect = float(middle(near.values(lambda run: run.aspect)).value)
    return aspect if near.reference or near.close else min(aspect, SMALL_ASPECT)


def _usual_width(request: StarterRequest, near: Neighbours) -> float:
    """Return the width d of a model with ``request.params_active`` = 12 d^2 L and the usual aspect ratio d / L."""
    return math.cbrt(request.params_active * _usual_aspect(near) / 12)


def _embedding_share(request: StarterRequest, near: Neighbours, vocab: int) -> float:
    return vocab * _usual_width(request, near) / request.params_active


def _stack_of(run: PublishedRun) -> dict[str, Any]:
    """Return the values that a run publishes for the model fields in `_CHOICES`, by field.

    Missing and unsupported values get defaults: those of `_STACK`, but no QK-norm, and gelu for an unsupported
    activation without a gate. A field without a default is left out.
    """
    known = {name: value for name in _CHOICES if (value := terms(run).get(f"model.{name}")) is not None}
    if known.get("positions") not in get_args(Positions):
        known.pop("positions", None)
    if known.get("activation") not in get_args(Activation) and known.pop("activation", None) and not run.arch.gated:
        known["activation"] = "gelu"
    if known.get("norm_placement") not in get_args(NormPlacement):
        known.pop("norm_placement", None)
    return _STACK | {"qk_norm": False} | known


def _theta_of_long() -> tuple[float, list[str]]:
    """Return the most frequent rope_theta of runs with seq_len above `SHORT`, and the ids of the runs with it."""
    by: dict[float, list[str]] = {}
    for run in load_runs():
        if run.arch.rope_theta and (run.seq_len or 0) > SHORT:
            by.setdefault(run.arch.rope_theta, []).append(run.id)
    return max(by.items(), key=lambda pair: len(pair[1]))


def _recent(near: Neighbours) -> list[PublishedRun]:
    """Return the newest run of each lineage near in size, from `RECENT` on, or all of ``near`` if there are none."""
    newest = first_of_each(reversed(sorted(near.of_size(), key=lambda run: run.date)))
    return [run for run in newest if run.date >= RECENT] or list(near.runs)


def _groups(near: Neighbours) -> dict[str, float]:
    return {run.id: run.query_groups for run in _recent(near) if run.query_groups}


def _grouped(near: Neighbours) -> bool:
    """Return whether at least half of the recent lineages have grouped-query attention."""
    shares = list(_groups(near).values())
    return sum(group > 1 for group in shares) * 2 >= max(len(shares), 1)


def _lengths(near: Neighbours) -> Votes:
    if near.reference:
        return middle(near.values("model.seq_len"))
    return middle({run.id: run.seq_len for run in _recent(near) if run.seq_len})


def _seq_len(request: StarterRequest, near: Neighbours) -> int:
    """Return the sequence length: the requested one, the reference run's, or a power of 2 from recent runs."""
    if request.seq_len:
        return request.seq_len
    usual = float(_lengths(near).value)
    if near.reference:
        return round(usual)
    length = min(usual, max(_predicted_batch(request) / SEQUENCES_A_BATCH, SHORTEST))
    return 1 << math.floor(math.log2(length) + 0.25)


def _predicted_batch(request: StarterRequest) -> float:
    """Return the median of the laws' optimal batch sizes, in tokens."""
    return float(middle(batches(evaluate(request.params_active, request.tokens), "optimal")).value)


def decide_shape(draft: StarterDraft, request: StarterRequest, near: Neighbours, model: ModelShape) -> None:
    """Add to the draft the values of ``model`` (see :func:`choose_shape`) and their reasons."""
    run, lengths, predicted = near.reference, _lengths(near), _predicted_batch(request)
    aspects, grouped = middle(near.values(lambda run: run.aspect)), _grouped(near)
    experts, alike = (mixtures(request.params_active, like, run) for like in (None, request.experts))
    shares_heads, own_heads = model.n_kv_heads < model.n_heads, bool(run and run.arch.n_kv_heads)
    used = model.experts.active + model.experts.shared if model.experts else 0
    w = used * model.experts.d_expert if model.experts else model.d_ff
    shortened = not request.seq_len and model.seq_len < lengths.value / 1.5
    facts: dict[str, Any] = {
        "model": model,
        "aspect": model.d_model / model.n_layers,
        "aspects": aspects,
        "even": model.n_layers % 4 == 0,
        "head_sizes": near.values("model.d_head"),
        "shared": not own_heads and shares_heads,
        "narrow": not own_heads and not shares_heads and grouped,
        "unshared": not own_heads and not shares_heads and not grouped,
        "groups": _groups(near),
        "ratio": model.d_ff / model.d_model,
        "usual": usual_ff_ratio(model.activation, model.n_heads, model.n_kv_heads),
        "multiple": math.gcd(model.d_ff, 256),  # 256 is the largest step of MLP widths
        "vocab": request.vocab,
        "vocab_sizes": middle(near.values("model.vocab_size")),
        "vocab_share": VOCABULARY_SHARE,
        "as_reference": bool(run and run.arch.tied_embeddings is not None),
        "share": _embedding_share(request, near, model.vocab_size),
        "tied_share": TIED_SHARE,
        "tied": near.values("model.tied_embeddings"),
        "seq_len": request.seq_len,
        "lengths": lengths,
        "predicted": predicted,
        "sequences": int(predicted / model.seq_len) if shortened else None,
        "wanted": SEQUENCES_A_BATCH,
        "shortest": SHORTEST,
        "experts": model.experts and w == model.d_ff,
        "used_width": w / model.d_model,
        "widths": widths_of_experts(experts),
        "actives": experts.values("model.experts.active"),
    }
    published = terms(run) if run else {}
    for name in (*_SIZES, *(["d_attention"] if model.d_attention else [])):
        known = draft.reference if name == "d_attention" or f"model.{name}" in published else None
        draft.decide(f"model.{name}", getattr(model, name), **facts, reference=known)
    own = model.experts
    odd = {"router": own and own.shared, "normalise": own and own.active == 1}
    for name, value in own or ():
        path = f"model.experts.{name}"
        if published.get(path) == value:
            draft.decide(path, value, "experts of the reference")
        elif name in ("number", "active", "d_expert", *_VOTED) or odd.get(name):
            votes, others = alike.most(path), experts.values(path)
            known = draft.reference if path in published else None
            more = {"votes": votes, "others": others, "factor": ALIKE, "reference": known}
            draft.decide(path, value, **facts | more)
    for name in _CHOICES:
        path, value = f"model.{name}", getattr(model, name)
        by = near.values(path)
        if run and run.id in by:
            kind = "parallel branches" if name == "parallel_branches" and value else "stack"
            draft.decide(path, value, f"{kind} of the reference", own=by[run.id] == value)
        elif name in _STACK:
            message = "stack of the reference" if run else path if name == "qk_norm" else "stack"
            draft.decide(path, value, message, votes=Votes(value, by), own=False)
    if not run and model.seq_len > SHORT:
        theta, runs = _theta_of_long()
        draft.decide("model.rope_theta", theta, positions=SHORT, runs=runs)
    facts = {"outputs": model.norm_placement == "output"}
    draft.step("shape", [*near.sources(aspects.by), "Shazeer 2020, arXiv 2002.05202"], **facts)
