"""Models as tables of matrix products, from which the planner computes FLOPs, memory and time.

A :class:`Blueprint` is made from a :class:`ModelShape`, or from the architecture of a published run.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Literal, TypeAlias

from leaven.recipe.shape import ModelShape

Split = Literal["column", "row", "none"]
Attention = Literal["full", "causal"]


@dataclass(frozen=True)
class Matmul:
    """A matrix product of a block, which maps ``k`` inputs to ``n`` outputs for every token."""

    name: str
    k: int
    n: int
    split: Split  # tensor parallelism splits the outputs (column), the inputs (row, then all-reduce), or nothing
    bias: bool = False
    stored: int = 1  # number of matrices of this shape: one for each routed expert
    passed: int = 1  # number of these matrices that a token uses

    @property
    def routed(self) -> bool:
        return self.stored > 1

    @property
    def size(self) -> int:
        return self.stored * self.k * self.n

    @property
    def flops(self) -> int:
        """The FLOPs of a forward pass per token. Only experts that the token uses are counted."""
        return 2 * self.passed * self.k * self.n

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Return (k, n) of the part of the matrix on one tensor-parallel rank, rounded up."""
        return -(-self.k // (tp if self.split == "row" else 1)), -(-self.n // (tp if self.split == "column" else 1))


@dataclass(frozen=True)
class Core:
    """The core of attention: scores, softmax and the weighted sum of values. Projections are not included."""

    heads: int
    kv_heads: int
    d_qk: int  # width of a head's queries and keys
    d_v: int  # width of a head's values
    window: int | None = None  # keys that a query attends to, its own position included; None: all
    alibi: bool = False  # each head adds its own bias to the scores
    softcap: bool = False

    def flops(self, seq_len: int, attention: Attention = "full") -> float:
        """Return the FLOPs of a forward pass per token.

        With ``full``, a query attends to all w keys of its window; with ``causal``, to about w - w^2 / (2 T) keys on
        average, where T is ``seq_len``. Without a window, w is T.
        """
        window = min(self.window or seq_len, seq_len)
        keys = window if attention == "full" else window - window * window / (2 * seq_len)
        return 2 * self.heads * (self.d_qk + self.d_v) * keys


@dataclass(frozen=True)
class BlockTable:
    """One transformer block: its matrix products, its attention core, and the parameters of its norms."""

    matmuls: tuple[Matmul, ...]
    core: Core
    gains: int  # norm parameters that every tensor-parallel rank stores in full
    split_gains: int  # norm parameters that are split over tensor-parallel ranks
    activation: str
    qk_norm: bool = False
    dropout: bool = False
    # Norms over the width, by their names in :attr:`leaven.recipe.shape.ModelShape.block_norms`.
    norms: tuple[str, ...] = ("attention", "mlp")

    @cached_property
    def vectors(self) -> int:
        """The number of gains and biases that every tensor-parallel rank stores in full."""
        # The bias of a row-parallel product is added after the sum over ranks.
        return self.gains + sum(row.n for row in self.matmuls if row.bias and row.split == "row")

    @cached_property
    def split_vectors(self) -> int:
        return self.split_gains + sum(row.n for row in self.matmuls if row.bias and row.split == "column")

    @cached_property
    def matrices(self) -> int:
        return sum(row.size for row in self.matmuls)

    @cached_property
    def experts(self) -> int:
        return sum(row.size for row in self.matmuls if row.routed)

    @cached_property
    def params(self) -> int:
        return self.matrices + self.vectors + self.split_vectors

    @cached_property
    def active(self) -> int:
        """The number of parameters that one token uses."""
        return self.params - sum((row.stored - row.passed) * row.k * row.n for row in self.matmuls)

    @cached_property
    def whole(self) -> int:
        """The number of parameters that every tensor-parallel rank stores in full. Routed experts do not count."""
        return self.vectors + sum(row.size for row in self.matmuls if not row.routed and row.split == "none")

    @cached_property
    def cut(self) -> int:
        """The number of parameters split over tensor-parallel ranks, without routed experts."""
        return self.params - self.experts - self.whole


@dataclass(frozen=True)
class Blueprint:
    """A model as the planner sees it: its blocks in order, and the embedding and unembedding at its ends."""

    seq_len: int
    d_model: int
    vocab_size: int
    blocks: tuple[BlockTable, ...]
    tied: bool  # the embedding and the unembedding share one matrix
    positions: int = 0  # number of weights in learned position embeddings
    embedding_norm: bool = False
    embedding_vectors: int = 0  # number of parameters of the norm after the embedding
    final_vectors: int = 0  # number of parameters of the norm before the unembedding

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.seq_len, self.d_model, self.vocab_size, self.blocks, self.tied, self.positions))

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def kinds(self) -> tuple[tuple[BlockTable, int], ...]:
        """The distinct blocks, each with the number of layers that use this block."""
        return tuple(Counter(self.blocks).items())

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.d_model

    @cached_property
    def ends(self) -> int:
        return self.embedding * (1 if self.tied else 2) + self.positions + self.embedding_vectors + self.final_vectors

    @cached_property
    def params(self) -> int:
        return self.ends + sum(count * block.params for block, count in self.kinds)

    @cached_property
    def active_params(self) -> int:
        return self.ends + sum(count * block.active for block, count in self.kinds)

    @cached_property
    def experts(self) -> int:
        """The number of routed experts in a layer, or 0 if there are none."""
        return max((row.stored for block, _ in self.kinds for row in block.matmuls if row.routed), default=0)

    @cached_property
    def tensor_unit(self) -> int:
        """The greatest common divisor of the sizes that tensor parallelism splits; tp must divide it."""
        sizes = [self.vocab_size]
        for block, _ in self.kinds:
            sizes += [block.core.heads, block.core.kv_heads]
            sizes += [row.n if row.split == "column" else row.k for row in block.matmuls if row.split != "none"]
        return gcd(*sizes)


Model: TypeAlias = ModelShape | Blueprint


def attention_rows(
    d: int, heads: int, kv_heads: int, d_head: int, *, bias: bool = False, qkv_bias: bool = False
) -> list[Matmul]:
    """Return the matrix products of grouped-query attention."""
    return [
        Matmul("attention.query", d, heads * d_head, "column", qkv_bias),
        Matmul("attention.key", d, kv_heads * d_head, "column", qkv_bias),
        Matmul("attention.value", d, kv_heads * d_head, "column", qkv_bias),
        Matmul("attention.out", heads * d_head, d, "row", bias),
    ]


def mlp_rows(
    name: str, d: int, width: int, *, gated: bool, bias: bool = False, stored: int = 1, passed: int = 1
) -> list[Matmul]:
    """Return the matrix products of an MLP, or of ``stored`` experts. A token uses ``passed`` of the experts."""
    inputs = ("gate", "in") if gated else ("in",)
    return [
        *(Matmul(f"{name}.{side}", d, width, "column", bias, stored, passed) for side in inputs),
        Matmul(f"{name}.out", width, d, "row", bias, stored, passed),
    ]


def expert_rows(d: int, width: int, experts: tuple[int, int], shared: int, *, gated: bool) -> list[Matmul]:
    """Return the matrix products of a mixture of experts. ``experts`` is (routed in a layer, used by a token)."""
    stored, passed = experts
    return [
        Matmul("mlp.router", d, stored, "none"),
        *mlp_rows("mlp.experts", d, width, gated=gated, stored=stored, passed=passed),
        *(mlp_rows("mlp.shared", d, width * shared, gated=gated) if shared else ()),
    ]


@cache
def blueprint(model: Model) -> Blueprint:
    """Return a model as a :class:`Blueprint`; a blueprint is returned unchanged."""
    if isinstance(model, Blueprint):
        return model
    d, heads, kv_heads, d_head = model.d_model, model.n_heads, model.n_kv_heads, model.d_head
    norm = d * (2 if model.norm == "layernorm" and model.bias else 1)
    per_head = model.qk_norm and model.qk_norm_per_head
    biases = {"bias": model.has_bias("attention.out"), "qkv_bias": model.has_bias("attention.query")}
    rows = attention_rows(d, heads, kv_heads, d_head, **biases)
    shared = 0 if per_head or not model.qk_norm else heads + kv_heads if model.qk_norm_whole else 2

    @cache
    def block(window: int | None, has_experts: bool) -> BlockTable:
        mlp = mlp_rows("mlp", d, model.d_ff, gated=model.gated, bias=model.bias)
        if model.experts and has_experts:
            experts = model.experts
            used = experts.number, experts.active
            mlp = expert_rows(d, experts.d_expert, used, experts.shared, gated=model.gated)
        return BlockTable(
            (*rows, *mlp),
            Core(
                heads,
                kv_heads,
                d_head,
                d_head,
                window,
                alibi=model.positions == "alibi",
                softcap=model.attention_softcap is not None,
            ),
            len(model.block_norms) * norm + shared * d_head,
            (heads + kv_heads) * d_head if per_head else 0,
            model.activation,
            qk_norm=model.qk_norm,
            dropout=model.dropout > 0,
            norms=model.block_norms,
        )

    return Blueprint(
        model.seq_len,
        d,
        model.vocab_size,
        tuple(block(model.window_of(layer), model.has_experts(layer)) for layer in range(model.n_layers)),
        model.tied_embeddings,
        positions=model.seq_len * d if model.positions == "learned" else 0,
        embedding_norm=model.embedding_norm,
        embedding_vectors=norm if model.embedding_norm else 0,
        final_vectors=norm,
    )
