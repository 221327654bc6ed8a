"""Count the floating-point operations of training, by operator.

A multiply-add counts as two operations, and the backward pass costs twice the forward pass. As in PaLM (appendix B),
Narayanan 2021 and torchtitan, the unembedding counts; embedding lookups, norms, activations and softmax do not.
Routed experts count for the tokens routed to them, and the router counts. The recomputation of a flash kernel in its
own backward pass is not counted, as usual. The conventions of published tables are in
benchmarks/planner/conventions.py.
"""

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
    """The operations of one forward pass per token.

    ``attention`` counts the full matrix of scores, ``causal`` only the part that a causal kernel computes.
    """

    matrices: int
    attention: float
    causal: float
    unembedding: int

    def layers(self, attention: Attention = "full") -> float:
        """Return the operations of all blocks."""
        return self.matrices + (self.causal if attention == "causal" else self.attention)


@cache
def forward_flops(model: Model) -> ForwardFlops:
    """Return the operations of one forward pass per token."""
    table = blueprint(model)
    return ForwardFlops(
        matrices=sum(count * row.flops for block, count in table.kinds for row in block.matmuls),
        attention=sum(count * block.core.flops(table.seq_len) for block, count in table.kinds),
        causal=sum(count * block.core.flops(table.seq_len, "causal") for block, count in table.kinds),
        unembedding=2 * table.embedding,
    )


def flops_per_token(model: Model, attention: Attention = "full") -> float:
    """Return the model FLOPs of training on one token, forward and backward: 6 N + 12 L d s for full attention.

    N counts the matrices of the blocks and the unembedding. Sources: PaLM, arXiv 2204.02311, appendix B; Narayanan
    2021, arXiv 2104.04473, without its recomputation.
    """
    forward = forward_flops(model)
    return 3 * (forward.layers(attention) + forward.unembedding)


def hardware_flops_per_token(model: Model, recompute: Recompute, attention: Attention = "full") -> float:
    """Return the model FLOPs plus recomputation: of all blocks (``full``) or of attention cores (``selective``).

    With ``full`` this is Narayanan 2021, equation 3. For ``selective``, Korthikanti 2022 prints s/(3h), which is two
    thirds more than the one forward pass of the attention core that is repeated; here it counts once.
    """
    forward = forward_flops(model)
    again = {
        "none": 0.0,
        "selective": forward.layers(attention) - forward.matrices,
        "full": forward.layers(attention),
    }
    return flops_per_token(model, attention) + again[recompute]
