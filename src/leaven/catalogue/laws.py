"""Evaluate the empirical laws of ``laws.toml``: predicted lr, batch, weight decay, loss or best size of a run.

A law is a fit to training runs, with its own definition of N, the number of parameters. Outside its fitted range it
is a guess.
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
from leaven.errors import InputError
from leaven.recipe.base import Part
from leaven.recipe.shape import ModelShape

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
    """The quantities of a run that a law may use."""

    params: float  # N
    tokens: float  # D
    compute: float  # C, training FLOPs
    loss: float  # L, nats per token


class Power(Part):
    """A power law: coefficient * (N / per)^params * (D / per)^tokens * C^compute * L^loss * unit."""

    coefficient: float
    params: float = 0.0  # exponent of N
    tokens: float = 0.0  # exponent of D
    compute: float = 0.0  # exponent of C
    loss: float = 0.0  # exponent of L
    unit: float = 1.0  # for example 512 if the law counts a batch in sequences of 512 tokens
    per: float = 1.0  # 1e6 if the law counts N and D in millions

    def at(self, point: Point) -> float:
        return (
            self.coefficient
            * math.pow(point.params / self.per, self.params)
            * math.pow(point.tokens / self.per, self.tokens)
            * math.pow(point.compute, self.compute)
            * math.pow(point.loss, self.loss)
            * self.unit
        )


class LogLinear(Part):
    """A law of the form intercept + slope * ln N, where N is the number of parameters."""

    intercept: float
    slope: float

    def at(self, point: Point) -> float | None:
        value = self.intercept + self.slope * math.log(point.params)
        return value if value > 0 else None


class LossLaw(Part):
    """A loss law: L = irreducible + a / N^alpha + b / D^beta, in nats per token. N includes embeddings."""

    irreducible: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        return self.irreducible + self.a / math.pow(params, self.alpha) + self.b / math.pow(tokens, self.beta)

    def worth_in_tokens(self, tokens: float, nats: float) -> float:
        """Return the factor on ``tokens`` that lowers the loss by ``nats``; inf if no factor does."""
        reducible = self.b / math.pow(tokens, self.beta)
        return math.pow(1 - nats / reducible, -1 / self.beta) if nats < reducible else math.inf

    def optimal_params(self, flops: float) -> float:
        """Return the N with the lowest loss for 6 N D = ``flops`` FLOPs (arXiv 2203.15556, equation 4)."""
        both = self.alpha + self.beta
        scale = math.pow(self.alpha * self.a / (self.beta * self.b), 1 / both)
        return scale * math.pow(flops / 6, self.beta / both)


class ExpertsLoss(Part):
    """A loss law of mixtures of experts (arXiv 2502.05172, equations 4 and 6).

    L = irreducible + a E^delta N^(alpha + gamma ln E) + b E^omega D^(beta + zeta ln E), for N parameters that a token
    uses, and D training tokens. E is a bounded function of the number of experts: ``start`` for a dense model, and
    at most ``most``.
    """

    irreducible: float
    a: float
    alpha: float
    gamma: float
    delta: float
    b: float
    beta: float
    zeta: float
    omega: float
    start: float
    most: float

    def of(self, experts: float) -> LossLaw:
        """Return the law for models in which each token uses one of ``experts`` experts."""
        e = 1 / (1 / (experts - 1 + 1 / (1 / self.start - 1 / self.most)) + 1 / self.most)
        return LossLaw(
            irreducible=self.irreducible,
            a=self.a * e**self.delta,
            alpha=-self.alpha - self.gamma * math.log(e),
            b=self.b * e**self.omega,
            beta=-self.beta - self.zeta * math.log(e),
        )


class FrontierLine(Part):
    """A power law for the best number of parameters: params x (budget / flops)^exponent."""

    flops: float  # a budget of training FLOPs for which the source states the best size
    params: float  # the best number of parameters for this budget
    exponent: float

    def optimal_params(self, flops: float) -> float:
        return self.params * math.pow(flops / self.flops, self.exponent)


class Fitted(Part):
    """The ranges (lowest, highest) to which a law was fitted, or (0, inf) if the source states none."""

    params: Range = ANY
    tokens: Range = ANY
    compute: Range = ANY  # training FLOPs
    tokens_per_param: Range = ANY
    experts: Range = ANY  # (experts of a layer) / (those that a token uses), if the law depends on it; 1 if dense

    def beyond(self, params: float, tokens: float, compute: float, experts: float = 1) -> list[BeyondRange]:
        """Return a row for each fitted range that does not contain the run, the farthest range first."""
        found = []
        for axis, value, (lowest, highest) in (
            ("N", params, self.params),
            ("D", tokens, self.tokens),
            ("C", compute, self.compute),
            ("D/N", tokens / params, self.tokens_per_param),
            ("E", experts, self.experts),
        ):
            if value > highest:
                found.append(BeyondRange(axis=axis, factor=value / highest, side="above"))
            elif value < lowest:
                found.append(BeyondRange(axis=axis, factor=lowest / value, side="below"))
        return sorted(found, key=lambda each: -each.factor)


class Sourced(Part):
    """Fields that all laws in ``laws.toml`` have."""

    name: str
    conditions: str  # the setting in which the law was fitted
    source: str
    trust: Trust  # how the constants were checked, see `TRUST`
    doubt: str = ""  # what is uncertain about the constants
    fitted: Fitted = Fitted()

    def common_fields(self, params: float, tokens: float, compute: float, experts: float = 1) -> dict[str, Any]:
        """Return the fields that :class:`LawRow` and :class:`OptimumRow` share, for a run of this size."""
        beyond = self.fitted.beyond(params, tokens, compute, experts)
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
    """A law about the hyperparameters or the loss of a run."""

    params_definition: ParamsDefinition
    lr: Power | LogLinear | None = None  # peak learning rate of AdamW
    lr_batch: int | None = None  # batch in tokens for which the lr is valid; None: the batch that the law predicts
    lr_batch_exponent: float | None = None  # in the law's own data, the best lr grows with batch^lr_batch_exponent
    batch: Power | None = None  # batch in tokens
    batch_kind: BatchKind | None = None  # optimal: the best batch; critical: a larger batch saves little time
    loss: LossLaw | None = None
    loss_of_experts: ExpertsLoss | None = None
    tau: Power | None = None  # the best AdamW timescale, batch / (lr x weight decay x tokens): a share of the run
    says: str = ""  # for a law that predicts no number: how a value changes, such as "lr ~ N^-0.23 D^-0.32"
    form_of: str | None = None  # name of the law that this law restates in another form; restatements have no vote


class Frontier(Sourced):
    """A law about the best number of parameters for a budget of 6 N D training FLOPs (N parameters, D tokens).

    Published laws disagree: for Gopher's budget, two approaches of the Chinchilla paper predict 67B and 40B.
    """

    sizes: FrontierLine | LossLaw


_ENTRIES = tomllib.loads(Path(__file__).with_name("laws.toml").read_text(encoding="utf-8"))
LAWS = tuple(map(Law.model_validate, _ENTRIES["law"]))
FRONTIERS = tuple(map(Frontier.model_validate, _ENTRIES["frontier"]))


def find_law(name: str) -> Law:
    return next(law for law in LAWS if law.name == name)


# The laws that `compute_optimal` uses for losses: Chinchilla's approach 3, and its replication by Besiroglu et al.
APPROACH_3, REPLICATION = (frontier.sizes for frontier in FRONTIERS if isinstance(frontier.sizes, LossLaw))


def evaluate(
    params: float, tokens: float, *, params_non_embedding: float | None = None, experts: float = 1
) -> list[LawRow]:
    """Return the predictions of each law for a run. Raise InputError for a size that is not above 0.

    >>> [round(r.batch_tokens) for r in evaluate(1e9, 20e9) if r.law == "Step Law 2025"]
    [441892]

    Args:
        params: for a mixture of experts, the parameters that a token uses.
        params_non_embedding: ``params`` without embeddings. Default: ``params``.
        experts: (experts of a layer) / (experts that a token uses).
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"no law covers {params:g} parameters and {tokens:g} tokens; give numbers above 0")
    chinchilla = find_law("Chinchilla 2022 loss").loss
    assert chinchilla
    loss = chinchilla.loss(params, tokens)
    results = []
    for law in LAWS:
        predicted = law.loss_of_experts.of(experts) if law.loss_of_experts else law.loss
        n = (params_non_embedding or params) if law.params_definition == "non-embedding" else params
        point = Point(n, tokens, 6 * n * tokens, loss)
        batch = law.batch.at(point) if law.batch else None
        results.append(
            LawRow(
                **law.common_fields(n, tokens, point.compute, experts),
                params_definition=law.params_definition,
                lr=law.lr.at(point) if law.lr else None,
                lr_batch_tokens=(law.lr_batch or batch) if law.lr else None,
                lr_batch_exponent=law.lr_batch_exponent,
                batch_tokens=batch,
                batch_kind=law.batch_kind,
                loss=predicted.loss(n, tokens) if predicted else None,
                tau=law.tau.at(point) if law.tau else None,
                says=law.says,
                form_of=law.form_of,
                of_experts=law.loss_of_experts is not None,
            )
        )
    return results


def main_laws(model: ModelShape, tokens: int) -> list[LawRow]:
    """Return the rows of :func:`evaluate` for a model and a run length, without laws that restate another law."""
    experts = model.experts.number / model.experts.active if model.experts else 1
    rows = evaluate(model.params_active, tokens, params_non_embedding=model.params_non_embedding, experts=experts)
    return [row for row in rows if row.form_of is None]


def power_lines_tau(params: float, tokens: float) -> float:
    """Return the best AdamW timescale, batch / (lr x weight decay x tokens), by Power Lines (arXiv 2505.13738)."""
    tau = find_law("Power Lines 2025 timescale").tau
    assert tau
    return tau.at(Point(params, tokens, 1, 1))


def batches(laws: Iterable[LawRow], kind: BatchKind) -> dict[str, float]:
    """Return the optimal or critical batch of each law in tokens. Laws that restate others are left out."""
    return {
        law.law: law.batch_tokens for law in laws if law.batch_kind == kind and law.batch_tokens and not law.form_of
    }


def critical_batch(laws: Iterable[LawRow]) -> float:
    """Return the median of the laws' critical batches, in tokens."""
    return median(batches(laws, "critical").values())


def lr_at_batch(law: LawRow, batch_tokens: float, noise: float) -> LrAtBatch | None:
    """Return a law's lr converted to another batch by four rules, or None if the lr or its batch is not known.

    - ``square_root``: for Adam below the critical batch (the SDE of Malladi et al. 2022, arXiv 2205.10287)
    - ``linear``: for SGD below the critical batch (McCandlish et al. 2018)
    - ``surge``: for Adam at any batch (arXiv 2405.14578); ``noise`` is the gradient noise scale in tokens
    - ``own``: with the exponent that was fitted to the law's own data; None if no exponent was fitted
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
    """Return the best tokens per parameter at ``flops`` training FLOPs for each law of `FRONTIERS`."""
    return [flops / 6 / frontier.sizes.optimal_params(flops) ** 2 for frontier in FRONTIERS]


def compute_optimal(flops: float) -> list[OptimumRow]:
    """Return the best parameters and tokens for a budget of training FLOPs by each law, or raise InputError.

    >>> [f"{each.params:.2g}" for each in compute_optimal(5.76e23)][:4]
    ['6.8e+10', '6.4e+10', '4e+10', '7.2e+10']
    """
    found = []
    for frontier in FRONTIERS:
        params = frontier.sizes.optimal_params(flops) if flops > 0 else 0.0
        tokens = flops / 6 / params if params else 0.0
        if params < 1 or tokens < 1:
            raise InputError(f"{flops:g} FLOPs are not enough for one parameter and one token; give for example 1e22")
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
