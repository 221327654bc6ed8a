"""Count the floating-point operations (FLOPs) of training.

A multiply-add is two operations, and the backward pass costs twice the forward pass. As in PaLM
(appendix B), Narayanan 2021 and torchtitan, only matrix products count, including the unembedding.
Recomputation in a flash attention kernel does not count. benchmarks/planner/conventions.py has the
conventions of other publications.
"""

from dataclasses import dataclass
from functools import cache

from leaven.planning.blueprint import Attention, Model, blueprint
from leaven.recipe.layout import Recompute

CONVENTION = (
    "6 per matmul weight and token (unembedding counted, embedding lookup not) + attention over the full matrix or "
    "window; recomputation not counted; dense peak in the compute dtype"
)


@dataclass(frozen=True)
class ForwardFlops:
    """The FLOPs per token of a forward pass, by part of the model."""

    matrices: int  # for the matrix products of the blocks
    attention: float  # for the scores and weighted sums of attention
    unembedding: int


@cache
def forward_flops(model: Model, attention: Attention = "full") -> ForwardFlops:
    """Return the FLOPs per token of a forward pass. If ``attention`` is "causal", masked positions do not count."""
    table = blueprint(model)
    return ForwardFlops(
        matrices=sum(count * row.flops for block, count in table.kinds for row in block.matmuls),
        attention=sum(count * block.core.flops(table.seq_len, attention) for block, count in table.kinds),
        unembedding=2 * table.embedding,
    )


def flops_per_token(model: Model, attention: Attention = "full") -> float:
    """Return the model FLOPs of training on one token, forward and backward: 6 N + 12 L d s for full attention.

    N is the number of matrix weights that a token uses, L the number of layers, d the width of all heads together,
    and s the sequence length (PaLM, arXiv 2204.02311, appendix B).
    """
    forward = forward_flops(model, attention)
    return 3 * (forward.matrices + forward.attention + forward.unembedding)


def hardware_flops_per_token(model: Model, recompute: Recompute) -> float:
    """Return the FLOPs of training on one token, including recomputation. Masked positions of attention count, too.

    Full recomputation repeats the forward pass of all blocks (Narayanan 2021, arXiv 2104.04473, equation 3).
    Selective recomputation repeats attention without its projections: 4 s h FLOPs per layer and token, for sequence
    length s and width h. (Korthikanti 2022, arXiv 2205.05198, counts 12 s h.)
    """
    forward = forward_flops(model)
    again = {"none": 0.0, "selective": forward.attention, "full": forward.matrices + forward.attention}
    return flops_per_token(model) + again[recompute]


def utilisation(model: Model, recompute: Recompute, mfu: float) -> dict[str, float]:
    """Return three FLOPs utilisations of a run by name, computed from ``mfu``.

    ``mfu`` (model FLOPs) counts full attention. ``mfu_causal`` counts causal attention. ``hfu`` (hardware
    FLOPs) counts full attention and recomputation.
    """
    full = flops_per_token(model)
    return {
        "mfu": mfu,
        "mfu_causal": mfu * flops_per_token(model, "causal") / full,
        "hfu": mfu * hardware_flops_per_token(model, recompute) / full,
    }
