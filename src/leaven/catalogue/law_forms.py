"""What a law is made of: its form, the range it was fitted on, how sure its constants are, and what it says.

The units and the definition of N are part of a law; so is the set-up it was fitted in (``conditions``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ParamsDefinition = Literal["all", "non-embedding", "without input embedding"]
BatchKind = Literal["optimal", "critical"]
Trust = Literal["verified", "read", "secondary", "memory"]

TRUST: Mapping[Trust, str] = MappingProxyType(
    {
        "verified": "read in the paper or its code, and recomputed",
        "read": "read in the paper, not recomputed",
        "secondary": "read in somebody else's text",
        "memory": "not read again; confirm it first",
    }
)


@dataclass(frozen=True)
class Point:
    """What a law may depend on: parameters N, tokens D, training FLOPs C and loss L in nats a token."""

    params: float
    tokens: float
    compute: float
    loss: float


@dataclass(frozen=True)
class Power:
    """coefficient * N^params * D^tokens * C^compute * L^loss * unit, with N and D counted in ``per``.

    ``unit`` turns sequences into tokens: a law for sequences of 512 tokens has unit 512.
    """

    coefficient: float
    params: float = 0.0
    tokens: float = 0.0
    compute: float = 0.0
    loss: float = 0.0
    unit: float = 1.0
    per: float = 1.0

    def at(self, point: Point) -> float:
        return (
            self.coefficient
            * math.pow(point.params / self.per, self.params)
            * math.pow(point.tokens / self.per, self.tokens)
            * math.pow(point.compute, self.compute)
            * math.pow(point.loss, self.loss)
            * self.unit
        )


@dataclass(frozen=True)
class LogLinear:
    """intercept + slope * ln N; None where that is not positive, for there the law has no answer."""

    intercept: float
    slope: float

    def at(self, point: Point) -> float | None:
        value = self.intercept + self.slope * math.log(point.params)
        return value if value > 0 else None


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = irreducible + a / N^alpha + b / D^beta, in nats a token, N with the embeddings."""

    irreducible: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Predicted loss in nats a token."""
        return self.irreducible + self.a / math.pow(params, self.alpha) + self.b / math.pow(tokens, self.beta)

    def optimal_params(self, flops: float) -> float:
        """The N of least loss where 6 N D = ``flops``: G (C / 6)^(beta / (alpha + beta)) with
        G = (alpha a / (beta b))^(1 / (alpha + beta)) (arXiv 2203.15556, equation 4)."""
        both = self.alpha + self.beta
        scale = math.pow(self.alpha * self.a / (self.beta * self.b), 1 / both)
        return scale * math.pow(flops / 6, self.beta / both)


Range = tuple[float, float]
ANY: Range = (0, math.inf)
AXES = ("N", "D", "C", "D/N")
"""Parameters, tokens, training FLOPs, tokens a parameter: the axes of a fitted range."""


@dataclass(frozen=True)
class Beyond:
    """How far a point lies outside a fitted range along one axis: a factor above 1, of the nearer end."""

    axis: str
    factor: float
    side: Literal["above", "below"]


@dataclass(frozen=True)
class Fitted:
    """The ranges (lowest, highest) of a fit: parameters, tokens, FLOPs, tokens a parameter.

    A lowest of 0 is one that the source does not tell: without any lower end nothing is known to be inside.
    """

    params: Range = ANY
    tokens: Range = ANY
    compute: Range = ANY
    tokens_per_param: Range = ANY

    def beyond(self, params: float, tokens: float, compute: float) -> tuple[Beyond, ...]:
        """Every axis along which a point lies outside, the farthest first."""
        values = (params, tokens, compute, tokens / params)
        found = []
        for axis, value, (lowest, highest) in zip(
            AXES, values, (self.params, self.tokens, self.compute, self.tokens_per_param), strict=True
        ):
            if value > highest:
                found.append(Beyond(axis, value / highest, "above"))
            elif value < lowest:
                found.append(Beyond(axis, lowest / value, "below"))
        return tuple(sorted(found, key=lambda each: -each.factor))

    def inside(self, beyond: tuple[Beyond, ...]) -> bool | None:
        """Whether a point that lies so far outside is inside; None where that is not known."""
        ranges = (self.params, self.tokens, self.compute, self.tokens_per_param)
        if beyond:
            return False
        return True if any(lowest > 0 for lowest, _ in ranges) else None

    def farthest(self, beyond: tuple[Beyond, ...]) -> float | None:
        """The factor along the worst axis; 1 inside, None where that is not known."""
        return beyond[0].factor if beyond else 1.0 if self.inside(beyond) else None


@dataclass(frozen=True)
class Law:
    """A law with its units, its definition of N, the range it was fitted on, its source, and how sure it is.

    ``lr`` gives a peak learning rate of AdamW, ``batch`` a batch in tokens: the best one (``optimal``), or
    the one above which more batch saves little time (``critical``); ``loss`` nats a token; ``tau`` the best
    timescale B / (lr x weight decay x D) of AdamW, in fractions of the run. A law with none of them says something
    relative only: ``says``.

    ``lr_batch`` is the batch that the lr belongs to where the law has no batch of its own, ``lr_batch_exponent``
    how the best lr moves with the batch in the law's own data. ``form_of``: the same law in another form, which is
    no second opinion. ``doubt`` says what is not sure about the constants.
    """

    name: str
    params_definition: ParamsDefinition
    conditions: str
    source: str
    trust: Trust
    doubt: str = ""
    lr: Power | LogLinear | None = None
    batch: Power | None = None
    batch_kind: BatchKind | None = None
    loss: LossLaw | None = None
    tau: Power | None = None
    says: str = ""
    fitted: Fitted = Fitted()
    lr_batch: float | None = None
    lr_batch_exponent: float | None = None
    form_of: str | None = None
