"""The planner's model: one table of operators, from which FLOPs, memory and time are counted.

A :class:`Blueprint` is wider than the models that leaven builds: experts, latent attention, widths that change from
layer to layer. It is made from a :class:`ModelShape`, or from the architecture of a published run. Every row of a
block says how tensor parallelism cuts it and how many of its copies a token passes, so that nothing that is counted
from it has to know which kind of model it is.
"""

from collections import Counter
from collections.abc import Iterator
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
    split: Split  # tensor parallelism cuts the outputs (column), the inputs (row, an all-reduce follows), or nothing
    bias: bool = False
    stored: int = 1  # copies that exist, of an expert's matrix
    passed: int = 1  # of those, the ones that a token passes

    @property
    def routed(self) -> bool:
        """Whether it is one of many experts': these are shared out over the ``ep`` ranks."""
        return self.stored > 1

    @property
    def size(self) -> int:
        """Weights, of all copies."""
        return self.stored * self.k * self.n

    @property
    def flops(self) -> int:
        """Operations of a forward pass, per token."""
        return 2 * self.passed * self.k * self.n

    def on_rank(self, tp: int) -> tuple[int, int]:
        """(k, n) of a tensor rank; what does not divide is rounded up, as padding would."""
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
        """Keys that a query meets on average: all of its window, or of them those that are not in the future."""
        window = min(self.window or seq_len, seq_len)
        return window if attention == "full" else window * (1 - window / (2 * seq_len))

    def flops(self, seq_len: int, attention: Attention = "full") -> float:
        """Operations of a forward pass, per token: a product with the keys and one with the values."""
        return 2 * self.heads * (self.d_qk + self.d_v) * self.keys(seq_len, attention)


@dataclass(frozen=True)
class BlockTable:
    """One layer."""

    matmuls: tuple[Matmul, ...]
    core: Core
    vectors: int  # gains and biases that every tensor rank has
    split_vectors: int  # gains and biases that tensor ranks share out
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
        """The parameters that one token passes."""
        return self.params - sum((row.stored - row.passed) * row.k * row.n for row in self.matmuls)

    @cached_property
    def whole(self) -> int:
        """The parameters that every tensor rank has."""
        return self.vectors + sum(row.size for row in self.matmuls if not row.routed and row.split == "none")

    @cached_property
    def cut(self) -> int:
        """The parameters that tensor ranks share, without those of routed experts."""
        return self.params - self.experts - self.whole

    def row(self, name: str) -> Matmul:
        return next(row for row in self.matmuls if row.name == name)


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
        """The different blocks, and how many there are of each."""
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
        """What a tensor degree must divide: heads, key-value heads, every width that is cut, and the vocabulary."""
        sizes = [self.vocab_size]
        for block, _ in self.kinds:
            sizes += [block.core.heads, block.core.kv_heads]
            sizes += [row.n if row.split == "column" else row.k for row in block.matmuls if row.split != "none"]
        return gcd(*sizes)

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self.blocks)


Model: TypeAlias = ModelShape | Blueprint
"""What the planner takes as a model."""


@cache
def blueprint(model: Model) -> Blueprint:
    """The table of a model that leaven can build; a table is returned as it is."""
    if isinstance(model, Blueprint):
        return model
    d, d_q, d_kv = model.d_model, model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    bias = model.bias
    norm = d * (2 if model.norm == "layernorm" and bias else 1)
    matmuls = (
        Matmul("attention.query", d, d_q, "column", bias),
        Matmul("attention.key", d, d_kv, "column", bias),
        Matmul("attention.value", d, d_kv, "column", bias),
        Matmul("attention.out", d_q, d, "row", bias),
        *((Matmul("mlp.gate", d, model.d_ff, "column", bias),) if model.gated else ()),
        Matmul("mlp.in", d, model.d_ff, "column", bias),
        Matmul("mlp.out", model.d_ff, d, "row", bias),
    )
    per_head = model.qk_norm and model.qk_norm_per_head
    block = BlockTable(
        matmuls,
        Core(model.n_heads, model.n_kv_heads, model.d_head, model.d_head),
        # The bias of a row-parallel product is added after the sum over ranks, so every rank has all of it.
        vectors=2 * norm
        + sum(row.n for row in matmuls if row.bias and row.split == "row")
        + (2 * model.d_head if model.qk_norm and not per_head else 0),
        split_vectors=sum(row.n for row in matmuls if row.bias and row.split == "column")
        + (d_q + d_kv if per_head else 0),
        activation=model.activation,
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
