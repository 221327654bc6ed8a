"""Floating-point operations of training, by operator.

A multiply-add is two operations. The backward pass costs twice the forward. Embedding lookups, norms, activations
and softmax are not counted, the unembedding is: the convention of PaLM (appendix B), Narayanan 2021 and torchtitan.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from leaven.recipe.layout import Recompute
from leaven.recipe.shape import ModelShape, Role

Attention = Literal["full", "causal"]

CONVENTION = (
    "6 per matmul weight and token (unembedding counted, embedding lookup not) + attention over the full matrix; "
    "recomputation not counted; dense bf16 peak"
)


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward pass, per token, by operator; ``attention`` over the full matrix of scores."""

    matrices: int
    attention: int
    unembedding: int

    def layers(self, attention: Attention = "full") -> float:
        """All blocks; a causal kernel computes half of the scores."""
        return self.matrices + self.attention / (2 if attention == "causal" else 1)


@cache
def forward_flops(shape: ModelShape) -> ForwardFlops:
    """Operations of one forward pass per token, counted over ``shape.parameters()``."""
    matrices = sum(p.size for p in shape.parameters() if p.role is Role.HIDDEN_WEIGHT)
    return ForwardFlops(
        matrices=2 * matrices,
        # scores and their product with the values: two matmuls of d_head x seq_len a head
        attention=4 * shape.n_layers * shape.n_heads * shape.d_head * shape.seq_len,
        unembedding=2 * shape.vocab_size * shape.d_model,
    )


def flops_per_token(shape: ModelShape, attention: Attention = "full") -> float:
    """Model FLOPs of training on one token, forward and backward: 6 N + 12 L d s for full attention.

    N counts the matrices of the blocks and the unembedding. Source: PaLM, arXiv 2204.02311, appendix B;
    Narayanan 2021, arXiv 2104.04473, without its recomputation.
    """
    forward = forward_flops(shape)
    return 3 * (forward.layers(attention) + forward.unembedding)


def hardware_flops_per_token(shape: ModelShape, recompute: Recompute, attention: Attention = "full") -> float:
    """Model FLOPs plus what is computed again: all blocks (``full``), the attention core (``selective``).

    With ``full`` this is Narayanan 2021, equation 3. For ``selective`` Korthikanti 2022 prints s/(3h), two thirds
    more than the one forward pass of the attention core that is in fact repeated; here it counts once.
    """
    forward = forward_flops(shape)
    again = {
        "none": 0.0,
        "selective": forward.layers(attention) - forward.matrices,
        "full": forward.layers(attention),
    }
    return flops_per_token(shape, attention) + again[recompute]
