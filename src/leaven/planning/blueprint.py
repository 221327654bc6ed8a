"""The planner's model: a table of operators, from which FLOPs, memory and time are counted.

A :class:`Blueprint` can describe more than leaven builds: experts, latent attention, widths that change from layer to
layer. It is made from a :class:`ModelShape` or from the architecture of a published run. Each row of a block says how
tensor parallelism splits it and how many of its copies a token passes, so the code that counts need not know which
kind of model it is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Literal, TypeAlias

from leaven.recipe.shape import ModelShape

Split = Literal["column", "row", "none"]
Attention = Literal["full", "causal"]


@dataclass(frozen=True)
class Matmul:
    """A product of a block: ``k`` inputs become ``n`` outputs for every token."""

    name: str
    k: int
    n: int
    split: Split  # tensor parallelism splits the outputs (column), the inputs (row, then all-reduce), or nothing
    bias: bool = False
    stored: int = 1  # copies that exist: the number of experts
    passed: int = 1  # copies that a token passes

    @property
    def routed(self) -> bool:
        """Whether it belongs to one of many experts, which the ``ep`` ranks share out."""
        return self.stored > 1

    @property
    def size(self) -> int:
        """Weights of all copies."""
        return self.stored * self.k * self.n

    @property
    def flops(self) -> int:
        """Operations of a forward pass, per token."""
        return 2 * self.passed * self.k * self.n

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Return (k, n) on a tensor rank; if a size does not divide it is rounded up, as padding would."""
        return -(-self.k // (tp if self.split == "row" else 1)), -(-self.n // (tp if self.split == "column" else 1))


@dataclass(frozen=True)
class Core:
    """Scores, softmax and the weighted sum of values."""

    heads: int
    kv_heads: int
    d_qk: int  # width of a head's queries and keys
    d_v: int  # width of a head's values
    window: int | None = None  # keys that a query sees at most; None for all

    def keys(self, seq_len: int, attention: Attention = "full") -> float:
        """Return the mean number of keys that a query sees: its window, or the part that is not in the future."""
        window = min(self.window or seq_len, seq_len)
        return window if attention == "full" else window * (1 - window / (2 * seq_len))

    def flops(self, seq_len: int, attention: Attention = "full") -> float:
        """Return the operations of a forward pass per token: a product with the keys and one with the values."""
        return 2 * self.heads * (self.d_qk + self.d_v) * self.keys(seq_len, attention)


@dataclass(frozen=True)
class BlockTable:
    """One layer."""

    matmuls: tuple[Matmul, ...]
    core: Core
    vectors: int  # parameters of gains and biases that every tensor rank holds
    split_vectors: int  # parameters of gains and biases that tensor ranks split
    activation: str
    qk_norm: bool = False
    dropout: bool = False

    @cached_property
    def matrices(self) -> int:
        """Weights of the matrices without those of routed experts."""
        return sum(row.size for row in self.matmuls if not row.routed)

    @cached_property
    def experts(self) -> int:
        """Weights of the routed experts."""
        return sum(row.size for row in self.matmuls if row.routed)

    @property
    def params(self) -> int:
        return self.matrices + self.experts + self.vectors + self.split_vectors

    @cached_property
    def active(self) -> int:
        """Parameters that one token passes."""
        return self.params - sum((row.stored - row.passed) * row.k * row.n for row in self.matmuls)

    @cached_property
    def whole(self) -> int:
        """Parameters that every tensor rank holds in full."""
        return self.vectors + sum(row.size for row in self.matmuls if not row.routed and row.split == "none")

    @cached_property
    def cut(self) -> int:
        """Parameters that tensor ranks split, without those of routed experts."""
        return self.params - self.experts - self.whole


@dataclass(frozen=True)
class Blueprint:
    """A model for the planner: its blocks in order, and its two ends."""

    seq_len: int
    d_model: int
    vocab_size: int
    blocks: tuple[BlockTable, ...]
    tied: bool  # the unembedding is the embedding
    positions: int = 0  # weights of learned positions
    embedding_norm: bool = False
    embedding_vectors: int = 0  # of the norm after the embedding
    final_vectors: int = 0  # of the norm before the unembedding

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
        """The different blocks with their counts."""
        return tuple(Counter(self.blocks).items())

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.d_model

    @cached_property
    def ends(self) -> int:
        """All parameters outside the blocks."""
        return self.embedding * (1 if self.tied else 2) + self.positions + self.embedding_vectors + self.final_vectors

    @cached_property
    def params(self) -> int:
        return self.ends + sum(count * block.params for block, count in self.kinds)

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token passes; of routed experts only those it is sent to."""
        return self.ends + sum(count * block.active for block, count in self.kinds)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer, 0 where there are none."""
        return max((row.stored for block, _ in self.kinds for row in block.matmuls if row.routed), default=0)

    @cached_property
    def tensor_unit(self) -> int:
        """What a tensor degree must divide: heads, key-value heads, every split width, and the vocabulary."""
        sizes = [self.vocab_size]
        for block, _ in self.kinds:
            sizes += [block.core.heads, block.core.kv_heads]
            sizes += [row.n if row.split == "column" else row.k for row in block.matmuls if row.split != "none"]
        return gcd(*sizes)


Model: TypeAlias = ModelShape | Blueprint
"""A model as the planner accepts it."""


def attention_rows(
    d: int, heads: int, kv_heads: int, d_head: int, *, bias: bool = False, qkv_bias: bool = False
) -> list[Matmul]:
    """Return the products around grouped-query attention."""
    return [
        Matmul("attention.query", d, heads * d_head, "column", qkv_bias),
        Matmul("attention.key", d, kv_heads * d_head, "column", qkv_bias),
        Matmul("attention.value", d, kv_heads * d_head, "column", qkv_bias),
        Matmul("attention.out", heads * d_head, d, "row", bias),
    ]


def mlp_rows(
    name: str, d: int, width: int, *, gated: bool, bias: bool = False, stored: int = 1, passed: int = 1
) -> list[Matmul]:
    """Return the products of an MLP, or of ``stored`` experts of which a token passes ``passed``."""
    inputs = ("gate", "in") if gated else ("in",)
    return [
        *(Matmul(f"{name}.{side}", d, width, "column", bias, stored, passed) for side in inputs),
        Matmul(f"{name}.out", width, d, "row", bias, stored, passed),
    ]


def block_table(
    matmuls: Sequence[Matmul],
    core: Core,
    gains: int,
    split_gains: int,
    activation: str,
    *,
    qk_norm: bool = False,
    dropout: bool = False,
) -> BlockTable:
    """Return a layer with the biases of its products. ``gains`` and ``split_gains`` are parameters of its norms.

    The bias of a row-parallel product is added after the sum over ranks, so every rank holds all of it.
    """
    shared, split = (sum(row.n for row in matmuls if row.bias and row.split == how) for how in ("row", "column"))
    return BlockTable(tuple(matmuls), core, gains + shared, split_gains + split, activation, qk_norm, dropout)


@cache
def blueprint(model: Model) -> Blueprint:
    """Return the table of a model that leaven can build. A table is returned as it is."""
    if isinstance(model, Blueprint):
        return model
    d, heads, kv_heads, d_head = model.d_model, model.n_heads, model.n_kv_heads, model.d_head
    norm = d * (2 if model.norm == "layernorm" and model.bias else 1)
    per_head = model.qk_norm and model.qk_norm_per_head
    rows = attention_rows(d, heads, kv_heads, d_head, bias=model.bias, qkv_bias=model.bias)
    block = block_table(
        rows + mlp_rows("mlp", d, model.d_ff, gated=model.gated, bias=model.bias),
        Core(heads, kv_heads, d_head, d_head),
        2 * norm + (2 * d_head if model.qk_norm and not per_head else 0),
        (heads + kv_heads) * d_head if per_head else 0,
        model.activation,
        qk_norm=model.qk_norm,
        dropout=model.dropout > 0,
    )
    return Blueprint(
        model.seq_len,
        d,
        model.vocab_size,
        (block,) * model.n_layers,
        model.tied_embeddings,
        positions=model.seq_len * d if model.positions == "learned" else 0,
        embedding_norm=model.embedding_norm,
        embedding_vectors=norm if model.embedding_norm else 0,
        final_vectors=norm,
    )
