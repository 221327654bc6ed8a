"""Floating-point operations of training, by operator.

A multiply-add is two operations. The backward pass costs twice the forward. Embedding lookups, norms, activations
and softmax are not counted, the unembedding is: the convention of PaLM (appendix B), Narayanan 2021 and torchtitan.
Of routed experts those count that a token is sent to, and the router. What a flash kernel computes again within its
own backward pass is not counted, as nobody counts it. How published tables count: benchmarks/planner/conventions.py.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from leaven.planning.blueprint import Attention, Model, blueprint
from leaven.recipe.layout import Recompute

CONVENTION = (
    "6 per matmul weight and token (unembedding counted, embedding lookup not) + attention over the full matrix; "
    "recomputation not counted; dense bf16 peak"
)


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward pass, per token, by what becomes of them: ``attention`` over the full matrix of
    scores, ``causal`` over what a causal kernel computes of it."""

    matrices: int
    attention: float
    causal: float
    unembedding: int

    def layers(self, attention: Attention = "full") -> float:
        """All blocks."""
        return self.matrices + (self.causal if attention == "causal" else self.attention)


@cache
def forward_flops(model: Model) -> ForwardFlops:
    """Operations of one forward pass per token."""
    table = blueprint(model)
    return ForwardFlops(
        matrices=sum(count * row.flops for block, count in table.kinds for row in block.matmuls),
        attention=sum(count * block.core.flops(table.seq_len) for block, count in table.kinds),
        causal=sum(count * block.core.flops(table.seq_len, "causal") for block, count in table.kinds),
        unembedding=2 * table.embedding,
    )


def operators(model: Model, attention: Attention = "full") -> dict[str, float]:
    """Model FLOPs of training on one token by operator, over all layers; they add up to :func:`flops_per_token`.

    The core of attention is ``attention.core``; the products have the names that they have in the model.
    """
    table = blueprint(model)
    found: defaultdict[str, float] = defaultdict(float)
    for block, count in table.kinds:
        found["attention.core"] += 3 * count * block.core.flops(table.seq_len, attention)
        for row in block.matmuls:
            found[row.name] += 3 * count * row.flops
    return dict(found) | {"unembedding": 3 * 2 * table.embedding}


def flops_per_token(model: Model, attention: Attention = "full") -> float:
    """Model FLOPs of training on one token, forward and backward: 6 N + 12 L d s for full attention.

    N counts the matrices of the blocks and the unembedding. Source: PaLM, arXiv 2204.02311, appendix B;
    Narayanan 2021, arXiv 2104.04473, without its recomputation.
    """
    forward = forward_flops(model)
    return 3 * (forward.layers(attention) + forward.unembedding)


def hardware_flops_per_token(model: Model, recompute: Recompute, attention: Attention = "full") -> float:
    """Model FLOPs plus what is computed again: all blocks (``full``), the attention core (``selective``).

    With ``full`` this is Narayanan 2021, equation 3. For ``selective`` Korthikanti 2022 prints s/(3h), two thirds
    more than the one forward pass of the attention core that is in fact repeated; here it counts once.
    """
    forward = forward_flops(model)
    again = {
        "none": 0.0,
        "selective": forward.layers(attention) - forward.matrices,
        "full": forward.layers(attention),
    }
    return flops_per_token(model, attention) + again[recompute]
