"""Empirical laws (``laws.toml``): their values for a run, for another batch, and for a budget of FLOPs.

A law is a fit to published runs. Its units, its definition of N and the setting of the fit (``conditions``) belong to
it; outside its fitted range it is a guess.
"""

import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from leaven.catalogue.noise_scale import surge_lr
from leaven.documents.catalogue import BeyondRange, LawRow, LrAtBatch, OptimumRow
from leaven.recipe.base import Part
from leaven.recipe.errors import InputError

ParamsDefinition = Literal["all", "non-embedding", "without input embedding"]
BatchKind = Literal["optimal", "critical"]
Trust = Literal["verified", "read", "secondary", "memory"]
TRUST: dict[Trust, str] = {
    "verified": "read in the paper or its code, and recomputed",
    "read": "read in the paper, not recomputed",
    "secondary": "read in another text about it",
    "memory": "not read again; confirm it first",
}
Range = Annotated[tuple[float, float], Field(strict=False)]
ANY: Range = (0, math.inf)


class Point(NamedTuple):
    """The quantities that a law may depend on."""

    params: float  # N
    tokens: float  # D
    compute: float  # C, training FLOPs
    loss: float  # L, nats per token


class Power(Part):
    """coefficient * N^params * D^tokens * C^compute * L^loss * unit, with N and D counted in ``per``."""

    coefficient: float
    params: float = 0.0
    tokens: float = 0.0
    compute: float = 0.0
    loss: float = 0.0
    unit: float = 1.0  # converts sequences to tokens: 512 for a law in sequences of 512 tokens
    per: float = 1.0

    def at(self, point: Point) -> float:
        """Return the value at a point."""
        return (
            self.coefficient
            * math.pow(point.params / self.per, self.params)
            * math.pow(point.tokens / self.per, self.tokens)
            * math.pow(point.compute, self.compute)
            * math.pow(point.loss, self.loss)
            * self.unit
        )


class LogLinear(Part):
    """intercept + slope * ln N."""

    intercept: float
    slope: float

    def at(self, point: Point) -> float | None:
        """Return the value at a point, or None where it is not positive, so that the law gives no value."""
        value = self.intercept + self.slope * math.log(point.params)
        return value if value > 0 else None


class LossLaw(Part):
    """L(N, D) = irreducible + a / N^alpha + b / D^beta, in nats per token, N with the embeddings."""

    irreducible: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Return the predicted loss in nats per token."""
        return self.irreducible + self.a / math.pow(params, self.alpha) + self.b / math.pow(tokens, self.beta)

    def optimal_params(self, flops: float) -> float:
        """Return the N of lowest loss on the budget 6 N D = ``flops``.

        It is G (C / 6)^(beta / (alpha + beta)) with G = (alpha a / (beta b))^(1 / (alpha + beta)) (arXiv 2203.15556,
        equation 4).
        """
        both = self.alpha + self.beta
        scale = math.pow(self.alpha * self.a / (self.beta * self.b), 1 / both)
        return scale * math.pow(flops / 6, self.beta / both)


class FrontierLine(Part):
    """N = params (C / flops)^exponent: a straight line in logarithms through a published point."""

    flops: float
    params: float
    exponent: float

    def optimal_params(self, flops: float) -> float:
        """Return the best N for a budget of training FLOPs."""
        return self.params * math.pow(flops / self.flops, self.exponent)


class Fitted(Part):
    """The ranges (lowest, highest) of a fit. A lowest of 0 means that the source does not give it."""

    params: Range = ANY
    tokens: Range = ANY
    compute: Range = ANY
    tokens_per_param: Range = ANY

    def beyond(self, params: float, tokens: float, compute: float) -> list[BeyondRange]:
        """Return every axis along which a point lies outside, the farthest first."""
        found: list[BeyondRange] = []
        for axis, value, (lowest, highest) in (
            ("N", params, self.params),
            ("D", tokens, self.tokens),
            ("C", compute, self.compute),
            ("D/N", tokens / params, self.tokens_per_param),
        ):
            if value > highest:
                found.append(BeyondRange(axis=axis, factor=value / highest, side="above"))
            elif value < lowest:
                found.append(BeyondRange(axis=axis, factor=lowest / value, side="below"))
        return sorted(found, key=lambda each: -each.factor)


class Sourced(Part):
    """The fields that every entry of ``laws.toml`` has besides its formula."""

    name: str
    conditions: str
    source: str
    trust: Trust
    doubt: str = ""  # what is uncertain about the constants
    fitted: Fitted = Fitted()

    def common_fields(self, params: float, tokens: float, compute: float) -> dict[str, Any]:
        """Return the fields that a :class:`LawRow` and an :class:`OptimumRow` share, for a point."""
        beyond = self.fitted.beyond(params, tokens, compute)
        known = any(low > 0 for low, _ in (getattr(self.fitted, axis) for axis in Fitted.model_fields))
        return {
            "law": self.name,
            "conditions": self.conditions,
            "source": self.source,
            "trust": self.trust,
            "doubt": self.doubt,
            "beyond": beyond,
            "in_range": False if beyond else True if known else None,
            "extrapolation": beyond[0].factor if beyond else 1.0 if known else None,
        }


class Law(Sourced):
    """A law about the hyperparameters of a run."""

    params_definition: ParamsDefinition
    lr: Power | LogLinear | None = None  # peak learning rate of AdamW
    lr_batch: int | None = None  # the batch at which the lr holds, if the law has no batch of its own
    lr_batch_exponent: float | None = None  # how the best lr moves with the batch in the law's own data
    batch: Power | None = None  # tokens
    batch_kind: BatchKind | None = None  # optimal: the best batch; critical: above it more saves little time
    loss: LossLaw | None = None
    tau: Power | None = None  # the best AdamW timescale B / (lr x weight decay x D), as a share of the run
    says: str = ""  # the statement of a law without a number: how a value moves
    form_of: str | None = None  # another form of this law, which is counted only once


class Frontier(Sourced):
    """The best N for a budget of training FLOPs C = 6 N D.

    The approaches of one paper disagree: at Gopher's budget Chinchilla's first says 67B, its third 40B. The fit
    behind the third did not converge (Besiroglu et al. 2024); the replication is near the first.
    """

    sizes: FrontierLine | LossLaw


_ENTRIES = tomllib.loads(Path(__file__).with_name("laws.toml").read_text(encoding="utf-8"))
LAWS = tuple(map(Law.model_validate, _ENTRIES["law"]))
FRONTIERS = tuple(map(Frontier.model_validate, _ENTRIES["frontier"]))


def find_law(name: str) -> Law:
    """Return the law of this name."""
    return next(law for law in LAWS if law.name == name)


def _loss_law(name: str) -> LossLaw:
    law = next(frontier.sizes for frontier in FRONTIERS if frontier.name == name)
    assert isinstance(law, LossLaw)
    return law


APPROACH_3 = _loss_law("Chinchilla approach 3")
REPLICATION = _loss_law("Besiroglu 2024 replication")


def evaluate(params: float, tokens: float, *, params_non_embedding: float | None = None) -> list[LawRow]:
    """Return the values of every law for a run of ``tokens`` tokens with ``params`` parameters.

    Laws that count N without the embeddings use ``params_non_embedding`` if it is given, else ``params``: a good
    approximation above 1B, but 45% too high for GPT-2 124M.

    >>> [round(r.batch_tokens) for r in evaluate(1e9, 20e9) if r.law == "Step Law 2025"]
    [441892]

    Raises:
        InputError: if there are no parameters or no tokens.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"no law covers {params:g} parameters and {tokens:g} tokens; both must be above 0")
    chinchilla = find_law("Chinchilla 2022 loss").loss
    assert chinchilla
    loss = chinchilla.loss(params, tokens)
    results = []
    for law in LAWS:
        counted = params_non_embedding if law.params_definition == "non-embedding" else params
        n = params if counted is None else counted
        point = Point(n, tokens, 6 * n * tokens, loss)
        batch = law.batch.at(point) if law.batch else None
        results.append(
            LawRow(
                **law.common_fields(n, tokens, point.compute),
                params_definition=law.params_definition,
                lr=law.lr.at(point) if law.lr else None,
                lr_batch_tokens=(law.lr_batch or batch) if law.lr else None,
                lr_batch_exponent=law.lr_batch_exponent,
                batch_tokens=batch,
                batch_kind=law.batch_kind,
                loss=law.loss.loss(n, tokens) if law.loss else None,
                tau=law.tau.at(point) if law.tau else None,
                says=law.says,
                form_of=law.form_of,
            )
        )
    return results


def power_lines_tau(params: float, tokens: float) -> float:
    """Return the best AdamW timescale tau = B / (lr x weight decay x D) as a share of the run, with B and D in
    tokens."""
    tau = find_law("Power Lines 2025 timescale").tau
    assert tau
    return tau.at(Point(params, tokens, 1, 1))


def batches(laws: Iterable[LawRow], kind: BatchKind) -> dict[str, float]:
    """Return the batches of this kind in tokens, by law. Other forms of a law are left out."""
    return {
        law.law: law.batch_tokens for law in laws if law.batch_kind == kind and law.batch_tokens and not law.form_of
    }


def critical_batch(laws: Iterable[LawRow]) -> float:
    """Return the median of the laws' critical batches in tokens."""
    return median(batches(laws, "critical").values())


def lr_at_batch(law: LawRow, batch_tokens: float, noise: float) -> LrAtBatch | None:
    """Return a law's lr at a batch by several rules that disagree, or None if it has no lr.

    ``noise`` is the noise scale in tokens. The rules: ``square_root`` for Adam below the critical batch (the SDE of
    Malladi et al. 2022, arXiv 2205.10287); ``linear`` for SGD there (McCandlish et al. 2018), and for AdamW at fixed
    decay if its timescale is to stay; ``surge`` for Adam, falling above the noise scale (arXiv 2405.14578); ``own``
    as in the law's data.
    """
    if law.lr is None or law.lr_batch_tokens is None:
        return None
    ratio, exponent = batch_tokens / law.lr_batch_tokens, law.lr_batch_exponent
    return LrAtBatch(
        batch_tokens=batch_tokens,
        ratio=ratio,
        square_root=law.lr * ratio**0.5,
        linear=law.lr * ratio,
        surge=law.lr * surge_lr(batch_tokens, noise) / surge_lr(law.lr_batch_tokens, noise),
        own=None if exponent is None else law.lr * ratio**exponent,
    )


def best_tokens_per_param(flops: float) -> list[float]:
    """Return the best D / N for a budget of training FLOPs by every frontier."""
    return [flops / 6 / frontier.sizes.optimal_params(flops) ** 2 for frontier in FRONTIERS]


def compute_optimal(flops: float) -> list[OptimumRow]:
    """Return the best size and duration for a budget of training FLOPs by every frontier.

    >>> [f"{each.params:.2g}" for each in compute_optimal(5.76e23)][:4]
    ['6.8e+10', '6.4e+10', '4e+10', '7.2e+10']

    Raises:
        InputError: if the budget is not enough for one parameter and one token.
    """
    found = []
    for frontier in FRONTIERS:
        params = frontier.sizes.optimal_params(flops) if flops > 0 else 0.0
        tokens = flops / 6 / params if params else 0.0
        if params < 1 or tokens < 1:
            raise InputError(f"no law covers {flops:g} FLOPs: not enough for one parameter; type for example 1e22")
        found.append(
            OptimumRow(
                **frontier.common_fields(params, tokens, flops),
                params=params,
                tokens=tokens,
                tokens_per_param=tokens / params,
                loss=APPROACH_3.loss(params, tokens),
                loss_replication=REPLICATION.loss(params, tokens),
            )
        )
    return found
