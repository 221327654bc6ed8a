"""What every law says of one run: the laws of :mod:`leaven.catalogue.law_table` at a point."""

from dataclasses import dataclass

from leaven.catalogue.law_forms import BatchKind, Beyond, ParamsDefinition, Point, Trust
from leaven.catalogue.law_table import CHINCHILLA_LOSS, LAWS, TAU
from leaven.recipe.errors import InputError


@dataclass(frozen=True)
class LawResult:
    """What one law says at one point. ``lr``, ``batch_tokens``, ``loss`` and ``tau`` are None where it is silent,
    ``in_range`` and ``extrapolation`` where it is not known what it was fitted on."""

    law: str
    lr: float | None
    batch_tokens: float | None
    batch_kind: BatchKind | None
    in_range: bool | None
    extrapolation: float | None
    conditions: str
    source: str
    loss: float | None
    tau: float | None
    says: str
    trust: Trust
    doubt: str
    params_definition: ParamsDefinition
    beyond: tuple[Beyond, ...]
    form_of: str | None
    lr_batch_tokens: float | None
    lr_batch_exponent: float | None


def evaluate(params: float, tokens: float, *, params_non_embedding: float | None = None) -> list[LawResult]:
    """What every law says of a run of ``tokens`` tokens with ``params`` parameters.

    Laws that count N without the embeddings use ``params_non_embedding`` if it is given, else ``params``: a
    good stand-in above 1B, 45% too many for GPT-2 124M.

    >>> [round(r.batch_tokens) for r in evaluate(1e9, 20e9) if r.law == "Step Law 2025"]
    [441892]

    Raises:
        InputError: if there are no parameters or no tokens.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"no law speaks of {params:g} parameters and {tokens:g} tokens; both must be above 0")
    loss = CHINCHILLA_LOSS.loss(params, tokens)
    results = []
    for law in LAWS:
        counted = params_non_embedding if law.params_definition == "non-embedding" else params
        n = params if counted is None else counted
        point = Point(n, tokens, 6 * n * tokens, loss)
        beyond = law.fitted.beyond(n, tokens, point.compute)
        batch = law.batch.at(point) if law.batch else None
        results.append(
            LawResult(
                law=law.name,
                lr=law.lr.at(point) if law.lr else None,
                batch_tokens=batch,
                batch_kind=law.batch_kind,
                in_range=law.fitted.inside(beyond),
                extrapolation=law.fitted.farthest(beyond),
                conditions=law.conditions,
                source=law.source,
                loss=law.loss.loss(n, tokens) if law.loss else None,
                tau=law.tau.at(point) if law.tau else None,
                says=law.says,
                trust=law.trust,
                doubt=law.doubt,
                params_definition=law.params_definition,
                beyond=beyond,
                form_of=law.form_of,
                lr_batch_tokens=(law.lr_batch or batch) if law.lr else None,
                lr_batch_exponent=law.lr_batch_exponent,
            )
        )
    return results


def power_lines_tau(params: float, tokens: float) -> float:
    """The best AdamW timescale tau = B / (lr * weight decay * D), in fractions of the run, B and D in tokens."""
    return TAU.at(Point(params, tokens, 1, 1))
