"""The shape of the model and the list of its parameters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from leaven.recipe.base import Part
from leaven.recipe.experts import Experts

Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "output", "sandwich"]
AttentionBias = Literal["none", "qkv", "all"]
Activation = Literal["swiglu", "geglu", "gelu", "relu", "squared_relu"]
GATED = {"swiglu", "geglu"}
Positions = Literal["rope", "learned", "alibi"]
_BRANCHES = ("attention", "mlp")
# The last matrices of the residual branches of a block. Their output is added to the residual stream, after a norm if
# ``norm_placement`` is not "pre". A block has attention.out, and either mlp.out or those of its experts.
BRANCH_ENDS = ("attention.out", "mlp.out", "mlp.experts.out", "mlp.shared.out")


class Role(StrEnum):
    """The role of a parameter in a scaling rule: where it is, and which of its dimensions grow with the width.

    For matrices, comments give "fan in -> fan out". A "fixed" dimension, such as the vocabulary, does not grow.
    """

    EMBEDDING = "embedding"  # fixed -> width: token and learned position embeddings
    EMBEDDING_NORM = "embedding_norm"  # gain over the width, before the first block
    EMBEDDING_BIAS = "embedding_bias"  # bias of the embedding norm
    HIDDEN_WEIGHT = "hidden_weight"  # width -> width, inside a block
    HIDDEN_BIAS = "hidden_bias"  # bias over the width, of a matrix or a layer norm inside a block
    HIDDEN_NORM = "hidden_norm"  # gain over the width, inside a block
    OUTPUT_NORM = "output_norm"  # gain of a norm on a branch's output
    QK_NORM = "qk_norm"  # gain of queries or keys over d_head, shared by all heads
    FINAL_NORM = "final_norm"  # gain over the width, after the last block
    FINAL_BIAS = "final_bias"  # bias of the final norm
    EXPERT_WEIGHT = "expert_weight"  # width -> width, a matrix for each routed expert of a block
    ROUTER = "router"  # width -> fixed: the logits of the experts, inside a block
    UNEMBEDDING = "unembedding"  # width -> fixed
    UNEMBEDDING_BIAS = "unembedding_bias"  # bias over the vocabulary; leaven's own models have none
    TIED_EMBEDDING = "tied_embedding"  # embedding and unembedding in one matrix

    @property
    def is_matrix(self) -> bool:
        return self in {
            Role.EMBEDDING,
            Role.HIDDEN_WEIGHT,
            Role.EXPERT_WEIGHT,
            Role.ROUTER,
            Role.UNEMBEDDING,
            Role.TIED_EMBEDDING,
        }

    @property
    def in_branches(self) -> bool:
        """Return whether parameters with this role are matrices of attention, MLPs or experts."""
        return self in {Role.HIDDEN_WEIGHT, Role.EXPERT_WEIGHT}


@dataclass(frozen=True)
class Parameter:
    name: str
    # (fan out, fan in) for a matrix, as in ``nn.Linear``; (experts, fan out, fan in) for the matrices of the routed
    # experts; (vocabulary or positions, width) for an embedding
    shape: tuple[int, ...]
    role: Role
    module: str  # the module NAME in ``hyperparameters.modules.NAME``, where multipliers are set
    layer: int | None = None  # index of the block; None outside the blocks

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# Bounds on sizes, at least ten times those of any published model. With larger sizes, listing the parameters takes
# minutes, training a tokenizer aborts the process, and products of sizes overflow 64 bits.
MAX_LAYERS = 2_000
Depth = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
Width = Annotated[int, Field(gt=0, le=2**22)]


class ModelShape(Part):
    """The shape of a decoder-only transformer: its sizes and architecture options."""

    n_layers: Depth
    d_model: Width
    n_heads: Width
    n_kv_heads: Width
    d_head: Width
    d_attention: Width | None = None  # n_heads x d_head; None: it equals d_model (unlike most Qwen3 models)
    d_ff: Width
    vocab_size: int = Field(gt=1, le=2**22)
    seq_len: int = Field(gt=0, le=2**30)
    norm: Norm = "rmsnorm"
    norm_eps: float = Field(default=1e-6, gt=0, le=1)
    activation: Activation = "swiglu"
    positions: Positions = "rope"
    rope_theta: float = Field(default=10_000.0, gt=0)
    qk_norm: bool = False
    qk_norm_per_head: bool = False  # QK-norm has a separate gain for each head; otherwise all heads share one gain
    tied_embeddings: bool = False
    embedding_norm: bool = False  # the token embedding is normalised before positions are added (BLOOM)
    bias: bool = False
    # Rate of GPT-2's three dropouts: on the input of the first block, the attention weights, and each branch.
    dropout: float = Field(default=0.0, ge=0, lt=1)
    # pre: before each branch; output: on the output of each branch, with none before it (OLMo 2); sandwich: both
    # (Gemma 2).
    norm_placement: NormPlacement = "pre"
    parallel_branches: bool = False  # attention and MLP read the same input, through one norm (GPT-J, Phi, Command R)
    qk_norm_whole: bool = False  # QK-norm normalises all heads together, as one vector (OLMo 2)
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)  # share of each head that rotary positions rotate
    attention_bias: AttentionBias | None = None  # which attention matrices have biases; None: as ``bias``
    attention_softcap: float | None = Field(default=None, gt=0)  # scores become cap tanh(score / cap) (Gemma 2)
    logit_softcap: float | None = Field(default=None, gt=0)  # logits become cap tanh(logit / cap) (Gemma 2)
    window: int | None = Field(default=None, gt=0)  # number of tokens a token attends to, itself included (Mistral)
    global_every: int = Field(default=0, ge=0)  # every n-th layer ignores ``window`` (Gemma 2: 2); 0: no layer does
    experts: Experts | None = None  # a mixture of experts in place of the MLPs

    added: ClassVar = (
        "norm_placement",
        "parallel_branches",
        "qk_norm_whole",
        "rotary_fraction",
        "attention_bias",
        "attention_softcap",
        "logit_softcap",
        "window",
        "global_every",
        "experts",
    )

    @model_validator(mode="after")
    def _validate_heads(self) -> "ModelShape":
        stated = "d_attention" if self.d_attention else "d_model"
        width, heads = self.d_attention or self.d_model, self.n_heads * self.d_head
        if width != heads:
            raise ValueError(
                f"{stated} {width} is not n_heads x d_head = {self.n_heads} x {self.d_head} = {heads}; "
                f"set {stated} = {heads}"
                + (f" or d_head = {width // self.n_heads}" if width % self.n_heads == 0 else "")
                + ("" if self.d_attention else f", or add d_attention = {heads} and keep d_model")
            )
        if self.n_heads % self.n_kv_heads:
            divisors = [k for k in range(1, self.n_heads + 1) if self.n_heads % k == 0]
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}; set n_kv_heads to "
                f"{' or '.join(map(str, divisors[:12]))}{' or another divisor' if len(divisors) > 12 else ''}"
            )
        if self.qk_norm_per_head and not self.qk_norm:
            raise ValueError("qk_norm_per_head needs qk_norm; set qk_norm = true")
        if self.qk_norm_whole and (self.qk_norm_per_head or not self.qk_norm):
            raise ValueError("qk_norm_whole needs qk_norm = true and qk_norm_per_head = false; set both")
        odd = self.d_rotary % 2 or abs(self.d_head * self.rotary_fraction - self.d_rotary) > 1e-9
        if self.rotary_fraction != 1 and (self.positions != "rope" or odd or not self.d_rotary):
            raise ValueError(
                f"rotary_fraction x d_head = {self.rotary_fraction:g} x {self.d_head} must be a positive even "
                'number, and positions must be "rope"; set another rotary_fraction, or positions = "rope"'
            )
        if self.attention_softcap and (self.dropout or self.positions == "alibi"):
            raise ValueError(
                "attention_softcap supports neither dropout nor ALiBi; remove attention_softcap, or set dropout = 0 "
                'and a value of positions other than "alibi", such as "rope"'
            )
        if self.global_every and not self.window:
            raise ValueError("global_every needs a sliding window; set window, or remove global_every")
        if self.positions == "rope" and self.d_head % 2:
            raise ValueError(f"rotary positions need an even d_head, not {self.d_head}; set an even d_head")
        return self

    @model_validator(mode="after")
    def _validate_experts(self) -> "ModelShape":
        if self.experts is None:
            return self
        if self.bias:
            raise ValueError(
                'experts have no biases; set bias = false (and attention_bias = "all" to keep biases in attention)'
            )
        if self.norm_placement != "pre":
            raise ValueError('experts need norm_placement = "pre"; set it, or remove [model.experts]')
        if self.experts.dense_layers >= self.n_layers:
            raise ValueError(
                f"experts.dense_layers {self.experts.dense_layers}: none of the {self.n_layers} layers has experts; "
                "lower dense_layers, or remove [model.experts]"
            )
        return self

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def d_rotary(self) -> int:
        return round(self.d_head * self.rotary_fraction)

    def has_bias(self, module: str) -> bool:
        """Return whether a matrix of a block, such as ``attention.out``, has a bias."""
        if self.attention_bias is None or not module.startswith("attention."):
            return self.bias
        return self.attention_bias == "all" or (self.attention_bias == "qkv" and module != "attention.out")

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None. Layers count from 0."""
        return None if self.global_every and (layer + 1) % self.global_every == 0 else self.window

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer (counted from 0) has experts in place of one MLP."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def branch_ends(self) -> tuple[str, ...]:
        experts = self.experts
        found = {
            "mlp.out": not experts or bool(experts.dense_layers),
            "mlp.experts.out": bool(experts),
            "mlp.shared.out": bool(experts and experts.shared),
        }
        return tuple(end for end in BRANCH_ENDS if found.get(end, True))

    @property
    def block_norms(self) -> tuple[str, ...]:
        """Return the names of a block's norms: ``mlp`` is the norm before the MLP, ``mlp_out`` the norm after it."""
        found = []
        for branch in _BRANCHES:
            shared = self.parallel_branches and branch == "mlp"
            if self.norm_placement != "output" and not shared:
                found.append(branch)
            if self.norm_placement != "pre":
                found.append(f"{branch}_out")
        return tuple(found)

    def parameters(self) -> Iterator[Parameter]:
        d, d_q, d_kv = self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        embedding = Role.TIED_EMBEDDING if self.tied_embeddings else Role.EMBEDDING
        yield Parameter("embedding.weight", (self.vocab_size, d), embedding, "embedding")
        if self.embedding_norm:
            yield from self._norm("", "embedding", None)
        if self.positions == "learned":
            yield Parameter("positions.weight", (self.seq_len, d), Role.EMBEDDING, "positions")
        attention = {
            "attention.query": (d_q, d),
            "attention.key": (d_kv, d),
            "attention.value": (d_kv, d),
            "attention.out": (d, d_q),
        }
        for layer in range(self.n_layers):
            for branch in _BRANCHES:
                if branch in self.block_norms:
                    yield from self._norm(f"layers.{layer}.", branch, layer)
                if branch == "attention" and self.qk_norm:
                    yield from self._qk_norms(layer)
                matrices = attention if branch == "attention" else self._mlp(layer)
                for module, shape in matrices.items():
                    name = f"layers.{layer}.{module}"
                    yield Parameter(f"{name}.weight", shape, _role(module), module, layer)
                    if self.has_bias(module):
                        yield Parameter(f"{name}.bias", shape[:1], Role.HIDDEN_BIAS, "biases", layer)
                if f"{branch}_out" in self.block_norms:
                    yield from self._norm(f"layers.{layer}.", f"{branch}_out", layer)
        yield from self._norm("", "final", None)
        if not self.tied_embeddings:
            yield Parameter("unembedding.weight", (self.vocab_size, d), Role.UNEMBEDDING, "unembedding")

    def _mlp(self, layer: int) -> dict[str, tuple[int, ...]]:
        def mlp(prefix: str, width: int, *experts: int) -> dict[str, tuple[int, ...]]:
            sides = ("gate", "in") if self.gated else ("in",)
            inputs = {f"{prefix}.{side}": (*experts, width, self.d_model) for side in sides}
            return {**inputs, f"{prefix}.out": (*experts, self.d_model, width)}

        experts = self.experts
        if experts is None or not self.has_experts(layer):
            return mlp("mlp", self.d_ff)
        shared = mlp("mlp.shared", experts.shared * experts.d_expert) if experts.shared else {}
        routed = mlp("mlp.experts", experts.d_expert, experts.number)
        return {"mlp.router": (experts.number, self.d_model), **routed, **shared}

    def _qk_norms(self, layer: int) -> Iterator[Parameter]:
        for side, heads in (("query", self.n_heads), ("key", self.n_kv_heads)):
            shape = (heads, self.d_head) if self.qk_norm_per_head else (self.d_head,)
            if self.qk_norm_whole:
                shape = (heads * self.d_head,)
            # A gain that heads do not share scales as an ordinary gain over the width.
            role = Role.HIDDEN_NORM if self.qk_norm_per_head or self.qk_norm_whole else Role.QK_NORM
            yield Parameter(f"layers.{layer}.norm.{side}.weight", shape, role, f"norm.{side}", layer)

    def _norm(self, prefix: str, which: str, layer: int | None) -> Iterator[Parameter]:
        roles = {
            "embedding": (Role.EMBEDDING_NORM, Role.EMBEDDING_BIAS),
            "final": (Role.FINAL_NORM, Role.FINAL_BIAS),
            "attention_out": (Role.OUTPUT_NORM, Role.HIDDEN_BIAS),
            "mlp_out": (Role.OUTPUT_NORM, Role.HIDDEN_BIAS),
        }
        gain, bias = roles.get(which, (Role.HIDDEN_NORM, Role.HIDDEN_BIAS))
        name = f"{prefix}norm.{which}"
        yield Parameter(f"{name}.weight", (self.d_model,), gain, f"norm.{which}", layer)
        if self.norm == "layernorm" and self.bias:
            yield Parameter(f"{name}.bias", (self.d_model,), bias, "biases", layer)

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the modules that can have multipliers."""
        return tuple(self.roles)

    @property
    def roles(self) -> dict[str, Role]:
        """Return {module: role}. All biases are one module, ``biases``, which gets the role of the last bias."""
        return {parameter.module: parameter.role for parameter in self.parameters()}

    @property
    def params(self) -> int:
        return sum(parameter.size for parameter in self.parameters())

    @property
    def params_active(self) -> int:
        """Return the number of parameters that one token uses. Of the routed experts, only the active ones count."""
        return sum(self._used(parameter) for parameter in self.parameters())

    @property
    def params_non_embedding(self) -> int:
        """Return ``params_active`` without token embedding, position embedding and unembedding."""
        outside = {Role.EMBEDDING, Role.TIED_EMBEDDING, Role.UNEMBEDDING}
        return sum(self._used(parameter) for parameter in self.parameters() if parameter.role not in outside)

    def _used(self, parameter: Parameter) -> int:
        if self.experts is None or parameter.role is not Role.EXPERT_WEIGHT:
            return parameter.size
        return parameter.size * self.experts.active // self.experts.number

    def width_unit(self, step: int | None = None) -> int:
        """Return the smallest d_model that keeps d_attention / d_model and makes d_attention a multiple of ``step``.

        By default, ``step`` is the width of the query heads that share one key-value head.
        """
        step = step or self.d_head * self.n_heads // self.n_kv_heads
        return self.d_model * step // math.gcd(self.n_heads * self.d_head, self.d_model * step)

    def scaled(
        self,
        width: int,
        depth: int,
        *,
        d_ff: int | None = None,
        d_head: int | None = None,
        n_kv_heads: int | None = None,
    ) -> "ModelShape":
        """Return this shape at another width (d_model) and depth (n_layers), or raise ValueError.

        Kept by default: d_ff / d_model, d_head, n_heads / n_kv_heads. Always kept: d_attention / d_model,
        d_expert / d_ff and the number of experts.
        """
        d_head = d_head or self.d_head
        group = 1 if n_kv_heads else self.n_heads // self.n_kv_heads
        step = d_head * group
        together = self.n_heads * self.d_head  # width of all heads at the present d_model
        if width % (unit := self.width_unit(step)):
            lower = max(width // unit, 1) * unit
            heads_of = f"groups of {group} heads" if group > 1 else "heads"
            raise ValueError(
                f"width {width} does not give a whole number of {heads_of} of size {d_head}; "
                f"give {lower} or {lower + unit}"
            )
        if d_ff is None and self.d_ff * width % self.d_model:
            raise ValueError(
                f"width {width} makes d_ff = {self.d_ff} x {width} / {self.d_model} not a whole number; "
                f"choose a d_ff that is a simple multiple of d_model"
            )
        heads = width * together // (self.d_model * d_head)
        d_ff = d_ff or self.d_ff * width // self.d_model
        changes: dict[str, Any] = {
            "d_attention": heads * d_head if self.d_attention else None,
            "n_layers": depth,
            "d_model": width,
            "n_heads": heads,
            "n_kv_heads": n_kv_heads or heads // group,
            "d_head": d_head,
            "d_ff": d_ff,
        }
        if self.experts is not None:
            if self.experts.d_expert * d_ff % self.d_ff:
                raise ValueError(
                    f"at width {width}, experts.d_expert is {self.experts.d_expert} x {d_ff} / {self.d_ff}, which is "
                    "not a whole number; choose a d_expert that is a simple fraction of d_ff"
                )
            changes["experts"] = self.experts.model_dump() | {"d_expert": self.experts.d_expert * d_ff // self.d_ff}
        try:
            return ModelShape.model_validate(self.model_dump() | changes)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _role(module: str) -> Role:
    if module.startswith("mlp.experts."):
        return Role.EXPERT_WEIGHT
    return Role.ROUTER if module == "mlp.router" else Role.HIDDEN_WEIGHT
