"""How large a model, and how long a run, a budget of training FLOPs is best spent on, by every published answer.

C = 6 N D throughout. The approaches of one paper disagree: at Gopher's budget Chinchilla's first says 67B, its third
40B. The fit behind the third did not converge (Besiroglu et al. 2024); the replication is near the first.
"""

import math
from dataclasses import dataclass

from leaven.catalogue.law_forms import Beyond, Fitted, LossLaw, Trust
from leaven.catalogue.law_table import CHINCHILLA, REPLICATION, REPLICATION_LOSS
from leaven.recipe.errors import InputError

APPROACH_3 = LossLaw(
    irreducible=math.exp(0.5267), a=math.exp(6.0073), alpha=0.33917, b=math.exp(6.0179), beta=0.28491
)
"""Chinchilla's third approach with the digits of the paper's TeX source: the printed ones, 0.34 and 0.28, are 20% off
the paper's own sizes."""


@dataclass(frozen=True)
class Line:
    """N = params (C / flops)^exponent: a straight line in the logarithms through a published point."""

    flops: float
    params: float
    exponent: float

    def optimal_params(self, flops: float) -> float:
        return self.params * math.pow(flops / self.flops, self.exponent)


def _through(first: tuple[float, float], last: tuple[float, float]) -> Line:
    """The line through the two ends (FLOPs, N) of a published table."""
    return Line(*first, math.log(last[1] / first[1]) / math.log(last[0] / first[0]))


@dataclass(frozen=True)
class Frontier:
    """An answer: the best N at a budget, where it was fitted, and how sure its constants are."""

    name: str
    sizes: Line | LossLaw
    conditions: str
    source: str
    trust: Trust
    fitted: Fitted
    doubt: str = ""


FRONTIERS = (
    Frontier(
        "Chinchilla approach 1",
        _through((1.92e19, 400e6), (1.30e28, 10e12)),
        "least loss of all training curves at each budget; N ~ C^0.50",
        "arXiv 2203.15556, table 3",
        "verified",
        CHINCHILLA.fitted,
        doubt="the line through the ends of its table; between them it meets the rows within 4%",
    ),
    Frontier(
        "Chinchilla approach 2",
        _through((1.84e19, 400e6), (1.75e28, 10e12)),
        "parabolas over N at nine budgets; N ~ C^0.49",
        "arXiv 2203.15556, table A3",
        "verified",
        CHINCHILLA.fitted,
        doubt="the line through the ends of its table; between them it meets the rows within 4%",
    ),
    Frontier(
        "Chinchilla approach 3",
        APPROACH_3,
        "a loss in N and D fitted to all runs; N ~ C^0.46",
        "arXiv 2203.15556, section 3.3, constants of the TeX source",
        "verified",
        CHINCHILLA.fitted,
        doubt="the fit had not converged (arXiv 2404.10102); up to 8% off the sizes of its own table",
    ),
    Frontier(
        "Besiroglu 2024 replication",
        REPLICATION_LOSS,
        "approach 3 fitted again; N ~ C^0.513",
        "arXiv 2404.10102",
        "verified",
        CHINCHILLA.fitted,
        doubt=REPLICATION.doubt,
    ),
    Frontier(
        "DeepSeek LLM 2024",
        Line(1.0, 0.1715 / 6, 0.5243),
        "IsoFLOP, its own text; in FLOPs a token M = 0.1715 C^0.5243, taken as 6 N",
        "arXiv 2401.02954, equation 4",
        "secondary",
        Fitted(compute=(1e17, 3e20)),
        doubt="M has the attention and not the embeddings",
    ),
    Frontier(
        "Llama 3 2024",
        Line(3.8e25, 3.8e25 / 6 / 16.55e12, 0.47),
        "IsoFLOP, its own text; D ~ C^0.53 through the 16.55T tokens that it gives for 3.8e25 FLOPs",
        "arXiv 2407.21783, section 3.2.1",
        "read",
        Fitted(compute=(6e18, 1e22)),
        doubt="its printed D = 0.29 C^0.53 gives 10.5T there, 1.6 times less than the paper says",
    ),
)


@dataclass(frozen=True)
class Optimum:
    """What one answer gives for a budget. The losses are those of this N and D by Chinchilla's approach 3 and by its
    replication, in nats a token."""

    law: str
    params: float
    tokens: float
    tokens_per_param: float
    loss: float
    loss_replication: float
    in_range: bool | None
    extrapolation: float | None
    beyond: tuple[Beyond, ...]
    conditions: str
    source: str
    trust: Trust
    doubt: str


def best_tokens_per_param(flops: float) -> list[float]:
    """D / N by every answer for a budget of training FLOPs."""
    return [flops / 6 / frontier.sizes.optimal_params(flops) ** 2 for frontier in FRONTIERS]


def compute_optimal(flops: float) -> list[Optimum]:
    """Every answer for a budget of training FLOPs.

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
            raise InputError(
                f"no law speaks of {flops:g} FLOPs: not enough for one parameter; write for example 1e22"
            )
        beyond = frontier.fitted.beyond(params, tokens, flops)
        found.append(
            Optimum(
                law=frontier.name,
                params=params,
                tokens=tokens,
                tokens_per_param=tokens / params,
                loss=APPROACH_3.loss(params, tokens),
                loss_replication=REPLICATION_LOSS.loss(params, tokens),
                in_range=frontier.fitted.inside(beyond),
                extrapolation=frontier.fitted.farthest(beyond),
                beyond=beyond,
                conditions=frontier.conditions,
                source=frontier.source,
                trust=frontier.trust,
                doubt=frontier.doubt,
            )
        )
    return found
