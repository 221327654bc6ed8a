"""Empirical laws (``laws.toml``): what each says about a run, another batch, and a budget of FLOPs.

A law is a fit to somebody's runs. Its units, its definition of N and the setting it was fitted in (``conditions``)
are part of it; outside of its fitted range it is a guess.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from leaven.catalogue.noise_scale import surge_lr
from leaven.recipe.base import Part
from leaven.recipe.errors import InputError

ParamsDefinition = Literal["all", "non-embedding", "without input embedding"]
BatchKind = Literal["optimal", "critical"]
Trust = Literal["verified", "read", "secondary", "memory"]
TRUST: dict[Trust, str] = {
    "verified": "read in the paper or its code, and recomputed",
    "read": "read in the paper, not recomputed",
    "secondary": "read in somebody else's text",
    "memory": "not read again; confirm it first",
}
Range = Annotated[tuple[float, float], Field(strict=False)]
ANY: Range = (0, math.inf)


class Point(NamedTuple):
    """The quantities that a law may depend on."""

    params: float  # N
    tokens: float  # D
    compute: float  # C, training FLOPs
    loss: float  # L, nats a token


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
        """Return the value at a point, or None where it is not positive: the law has no answer there."""
        value = self.intercept + self.slope * math.log(point.params)
        return value if value > 0 else None


class LossLaw(Part):
    """L(N, D) = irreducible + a / N^alpha + b / D^beta, in nats a token, N with the embeddings."""

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


@dataclass(frozen=True)
class Beyond:
    """How far a point lies outside a fitted range along one axis: a factor above 1 from the nearer end."""

    axis: str  # N parameters, D tokens, C training FLOPs, D/N tokens a parameter
    factor: float
    side: Literal["above", "below"]


class Fitted(Part):
    """The ranges (lowest, highest) of a fit. A lowest of 0 means that the source does not give it."""

    params: Range = ANY
    tokens: Range = ANY
    compute: Range = ANY
    tokens_per_param: Range = ANY

    def beyond(self, params: float, tokens: float, compute: float) -> tuple[Beyond, ...]:
        """Return every axis along which a point lies outside, the farthest first."""
        found = []
        for axis, value, (lowest, highest) in (
            ("N", params, self.params),
            ("D", tokens, self.tokens),
            ("C", compute, self.compute),
            ("D/N", tokens / params, self.tokens_per_param),
        ):
            if value > highest:
                found.append(Beyond(axis, value / highest, "above"))
            elif value < lowest:
                found.append(Beyond(axis, lowest / value, "below"))
        return tuple(sorted(found, key=lambda each: -each.factor))


class Sourced(Part):
    """The fields that every entry of ``laws.toml`` has besides its formula."""

    name: str
    conditions: str
    source: str
    trust: Trust
    doubt: str = ""  # what is uncertain about the constants
    fitted: Fitted = Fitted()

    def judged(self, params: float, tokens: float, compute: float) -> dict[str, Any]:
        """Return the fields of :class:`LawAnswer` for a point."""
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
    says: str = ""  # what a law without a number says: how a value moves
    form_of: str | None = None  # the law that this is another form of; it does not count twice


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


@dataclass(frozen=True, kw_only=True)
class LawAnswer:
    """The fields that the answers of a law and of a frontier share."""

    law: str
    conditions: str
    source: str
    trust: Trust
    doubt: str
    in_range: bool | None  # None where the fitted range is not known
    extrapolation: float | None  # largest factor outside the range, 1 inside
    beyond: tuple[Beyond, ...]


@dataclass(frozen=True, kw_only=True)
class LawResult(LawAnswer):
    """What one law says at one point: the fields of :class:`Law` as numbers, None where it gives none."""

    params_definition: ParamsDefinition
    lr: float | None
    lr_batch_tokens: float | None
    lr_batch_exponent: float | None
    batch_tokens: float | None
    batch_kind: BatchKind | None
    loss: float | None
    tau: float | None
    says: str
    form_of: str | None

    @property
    def is_critical(self) -> bool:
        """Whether it gives a critical batch that counts as an independent opinion."""
        return self.batch_kind == "critical" and self.form_of is None


def evaluate(params: float, tokens: float, *, params_non_embedding: float | None = None) -> list[LawResult]:
    """Return what every law says about a run of ``tokens`` tokens with ``params`` parameters.

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
            LawResult(
                **law.judged(n, tokens, point.compute),
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


def critical_batch(results: Sequence[LawResult]) -> float:
    """Return the median of the laws' critical batches in tokens; each law counts once."""
    return median(each.batch_tokens for each in results if each.batch_tokens and each.is_critical)


@dataclass(frozen=True)
class AtBatch:
    """The lr of a law at another batch than its own, by several rules that disagree."""

    batch_tokens: float
    ratio: float  # of the batch to the one at which the lr holds
    square_root: float  # of Adam below the critical batch (the SDE of Malladi et al. 2022, arXiv 2205.10287)
    linear: float  # of SGD there (McCandlish et al. 2018), and of AdamW at fixed decay if its timescale is to stay
    surge: float  # of Adam, falling above the noise scale (arXiv 2405.14578)
    own: float | None  # as in the law's own data, if known


def lr_at_batch(result: LawResult, batch_tokens: float, noise: float) -> AtBatch | None:
    """Return a law's lr at a batch, or None if it has no lr. ``noise`` is the noise scale in tokens."""
    if result.lr is None or result.lr_batch_tokens is None:
        return None
    ratio, exponent = batch_tokens / result.lr_batch_tokens, result.lr_batch_exponent
    return AtBatch(
        batch_tokens=batch_tokens,
        ratio=ratio,
        square_root=result.lr * ratio**0.5,
        linear=result.lr * ratio,
        surge=result.lr * surge_lr(batch_tokens, noise) / surge_lr(result.lr_batch_tokens, noise),
        own=None if exponent is None else result.lr * ratio**exponent,
    )


@dataclass(frozen=True, kw_only=True)
class Optimum(LawAnswer):
    """One answer for a budget."""

    params: float
    tokens: float
    tokens_per_param: float
    loss: float  # of this N and D by Chinchilla's approach 3, nats a token
    loss_replication: float  # and by its replication


def best_tokens_per_param(flops: float) -> list[float]:
    """Return D / N by every answer for a budget of training FLOPs."""
    return [flops / 6 / frontier.sizes.optimal_params(flops) ** 2 for frontier in FRONTIERS]


def compute_optimal(flops: float) -> list[Optimum]:
    """Return every answer for a budget of training FLOPs.

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
            Optimum(
                **frontier.judged(params, tokens, flops),
                params=params,
                tokens=tokens,
                tokens_per_param=tokens / params,
                loss=APPROACH_3.loss(params, tokens),
                loss_replication=REPLICATION.loss(params, tokens),
            )
        )
    return found
