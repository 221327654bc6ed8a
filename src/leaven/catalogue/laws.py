"""Empirical laws for learning rate, batch and loss: constants, units, range and source as data.

The units and the definition of N are part of a law; so is the set-up it was fitted in (``conditions``). The
laws disagree by an order of magnitude at 7B: read the spread, not one of them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from leaven.recipe.errors import InputError

ParamsDefinition = Literal["all", "non-embedding", "without input embedding"]


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

    name: str
    irreducible: float
    a: float
    alpha: float
    b: float
    beta: float
    source: str

    def loss(self, params: float, tokens: float) -> float:
        """Predicted loss in nats a token."""
        return self.irreducible + self.a / math.pow(params, self.alpha) + self.b / math.pow(tokens, self.beta)


CHINCHILLA = LossLaw(
    "Chinchilla 2022, approach 3",
    irreducible=1.69,
    a=406.4,
    alpha=0.34,
    b=410.7,
    beta=0.28,
    source="Hoffmann et al. 2022, arXiv 2203.15556, section 3.3",
)


@dataclass(frozen=True)
class Law:
    """A law with its units, its definition of N, the range it was fitted on, and its source.

    ``lr`` gives a peak learning rate of AdamW, ``batch`` a batch in tokens: the best one (``optimal``), or
    the one above which more batch saves little time (``critical``). None where the law says nothing absolute.
    Ranges are (lowest, highest) of the fit.
    """

    name: str
    params_definition: ParamsDefinition
    conditions: str
    source: str
    lr: Power | LogLinear | None = None
    batch: Power | None = None
    batch_kind: Literal["optimal", "critical"] | None = None
    params_range: tuple[float, float] = (0, math.inf)
    tokens_range: tuple[float, float] = (0, math.inf)
    compute_range: tuple[float, float] = (0, math.inf)
    tokens_per_param_range: tuple[float, float] = (0, math.inf)

    def extrapolation(self, point: Point) -> float:
        """The factor by which a point lies outside the fitted range, along its worst axis; 1 inside."""
        return max(
            _beyond(point.params, self.params_range),
            _beyond(point.tokens, self.tokens_range),
            _beyond(point.compute, self.compute_range),
            _beyond(point.tokens / point.params, self.tokens_per_param_range),
        )


@dataclass(frozen=True)
class LawResult:
    """What one law says at one point. ``batch_tokens`` and ``lr`` are None where the law is silent."""

    law: str
    lr: float | None
    batch_tokens: float | None
    batch_kind: Literal["optimal", "critical"] | None
    in_range: bool
    extrapolation: float
    conditions: str
    source: str


_LOSS_FROM = "loss taken from Chinchilla's approach 3"

KAPLAN_LR = Law(
    "Kaplan 2020 learning rate",
    "non-embedding",
    "batch 0.5M tokens, cosine, pre-norm transformers of 2019, s 1024",
    "arXiv 2001.08361, appendix D.6",
    lr=LogLinear(3.239e-3, -1.395e-4),
    params_range=(0, 1.5e9),
)
KAPLAN_BATCH = Law(
    "Kaplan 2020 critical batch",
    "non-embedding",
    f"WebText2, definition of McCandlish 2018; {_LOSS_FROM}",
    "arXiv 2001.08361, section 5.1",
    batch=Power(2e8, loss=-1 / 0.21),
    batch_kind="critical",
    params_range=(0, 1.5e9),
)
DEEPSEEK = Law(
    "DeepSeek LLM 2024",
    "non-embedding",
    "multi-step schedule, compute-optimal; C taken as 6 N D, in the paper non-embedding FLOPs with attention",
    "arXiv 2401.02954, section 3.1",
    lr=Power(0.3118, compute=-0.1250),
    batch=Power(0.2920, compute=0.3271),
    batch_kind="optimal",
    compute_range=(1e17, 2e19),
)
MINICPM = Law(
    "MiniCPM 2024",
    "non-embedding",
    f"WSD, C4; {_LOSS_FROM}; its lr 0.01 is a muP base and says nothing of yours",
    "arXiv 2404.06395, section 3",
    batch=Power(1.21e9, loss=-6.24),
    batch_kind="optimal",
    params_range=(9e6, 170e6),
)
STEP_LAW = Law(
    "Step Law 2025",
    "non-embedding",
    "AdamW, weight decay 0.1, s 2048, cosine to a fixed 1e-5; dense and MoE",
    "arXiv 2503.04715, equation 1",
    lr=Power(1.79, params=-0.713, tokens=0.307),
    batch=Power(0.58, tokens=0.571),
    batch_kind="optimal",
    params_range=(60e6, 1e9),
    tokens_range=(2e9, 100e9),
)
PORIAN = Law(
    "Porian 2024",
    "without input embedding",
    "compute-optimal tokens, beta2 tuned at small batch, s 2048",
    "arXiv 2406.19146",
    lr=Power(3.7, params=-0.36),
    batch=Power(0.7576, params=0.703),
    batch_kind="optimal",
    params_range=(5e6, 901e6),
    tokens_per_param_range=(10, 40),  # our reading of "compute-optimal": half to twice 20
)
POWER_LINES = Law(
    "Power Lines 2025",
    "all",
    "CompleteP or muP models, SlimPajama, s 2048; its lr follows from tau and your weight decay",
    "arXiv 2505.13738 (coefficients from memory)",
    batch=Power(0.0306, tokens=0.383, unit=2048),
    batch_kind="optimal",
    params_range=(111e6, 3.3e9),
)
POWER_LINES_CRITICAL = Law(
    "Power Lines 2025 critical batch",
    "all",
    "CompleteP or muP models, SlimPajama, s 2048",
    "arXiv 2505.13738 (coefficients from memory)",
    batch=Power(0.0471, tokens=0.462, unit=2048),
    batch_kind="critical",
    params_range=(111e6, 3.3e9),
)
BJORCK = Law(
    "Bjorck 2024",
    "all",
    "exponents only: lr ~ N^-0.23 D^-0.32 at a batch of 0.5M tokens; its constant is not recoverable",
    "arXiv 2409.19913",
    params_range=(50e6, 2.7e9),
    tokens_range=(0, 800e9),
)
ZHANG = Law(
    "Zhang 2024 critical batch",
    "all",
    "20% overhead over the steps of small batches, constant lr with weight averaging, s 512; the form in D",
    "arXiv 2410.21676",
    batch=Power(22.91, tokens=0.47, unit=512, per=1e6),
    batch_kind="critical",
    params_range=(85e6, 1.2e9),
)
LAWS = (
    KAPLAN_LR,
    KAPLAN_BATCH,
    DEEPSEEK,
    MINICPM,
    STEP_LAW,
    PORIAN,
    POWER_LINES,
    POWER_LINES_CRITICAL,
    BJORCK,
    ZHANG,
)


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
    results = []
    for law in LAWS:
        counted = params_non_embedding if law.params_definition == "non-embedding" else params
        n = params if counted is None else counted
        point = Point(n, tokens, 6 * n * tokens, CHINCHILLA.loss(params, tokens))
        beyond = law.extrapolation(point)
        results.append(
            LawResult(
                law=law.name,
                lr=law.lr.at(point) if law.lr else None,
                batch_tokens=law.batch.at(point) if law.batch else None,
                batch_kind=law.batch_kind,
                in_range=beyond == 1,
                extrapolation=beyond,
                conditions=law.conditions,
                source=law.source,
            )
        )
    return results


def power_lines_tau(params: float, tokens: float) -> float:
    """The best AdamW timescale tau = B / (lr * weight decay * D), in fractions of the run, B and D in tokens.

    Source: Power Lines 2025, arXiv 2505.13738: tau = 1.084 (D/N)^-0.527; the coefficient is from memory.
    """
    return 1.084 * math.pow(tokens / params, -0.527)


def _beyond(value: float, bounds: tuple[float, float]) -> float:
    lowest, highest = bounds
    return max(1.0, lowest / value, value / highest)
