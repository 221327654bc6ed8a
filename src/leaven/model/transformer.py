"""The transformer, from its shape. Names and shapes of the parameters are those of ``ModelShape.parameters()``.

Shape suffixes: B sequences, T positions, D d_model, F d_ff, H query heads, K kv heads, E d_head, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaven.recipe.shape import ModelShape

NORM_EPS = 1e-6


class RMSNorm(nn.RMSNorm):
    """Computed in the dtype of its gain (fp32), whatever the dtype of the input; torch mixes the two slowly."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class PerHeadNorm(nn.Module):
    """A norm over each head by itself, with a gain for every entry of every head."""

    def __init__(self, shape: ModelShape, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, shape.d_head))
        self.centred = shape.norm == "layernorm"

    def forward(self, x_BTHE: Tensor) -> Tensor:
        wide_BTHE, size = x_BTHE.to(self.weight.dtype), self.weight.shape[1:]
        norm = F.layer_norm if self.centred else F.rms_norm
        return (norm(wide_BTHE, size, eps=NORM_EPS) * self.weight).to(x_BTHE.dtype)


class Attention(nn.ModuleDict):
    def __init__(self, shape: ModelShape, scale: float) -> None:
        d, d_q, d_kv = shape.d_model, shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
        super().__init__(
            {
                "query": nn.Linear(d, d_q, shape.bias),
                "key": nn.Linear(d, d_kv, shape.bias),
                "value": nn.Linear(d, d_kv, shape.bias),
                "out": nn.Linear(d_q, d, shape.bias),
            }
        )
        self.d_head, self.dropout, self.scale = shape.d_head, shape.dropout, scale

    def forward(self, x_BTD: Tensor, norm: nn.ModuleDict, positions: "Positions") -> Tensor:
        # The number of heads is read off the tensor, so that a slice of the heads works as well.
        q_BTHE, k_BTKE, v_BTKE = (
            self[side](x_BTD).unflatten(-1, (-1, self.d_head)) for side in ("query", "key", "value")
        )
        if "query" in norm:
            q_BTHE, k_BTKE = norm["query"](q_BTHE), norm["key"](k_BTKE)
        q_BHTE, k_BKTE, v_BKTE = (
            x.transpose(1, 2) for x in (positions.rotate(q_BTHE), positions.rotate(k_BTKE), v_BTKE)
        )
        y_BHTE = F.scaled_dot_product_attention(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            attn_mask=positions.bias_HTT,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=positions.bias_HTT is None,
            scale=self.scale,
            enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
        )
        branch_BTD: Tensor = self["out"](y_BHTE.transpose(1, 2).flatten(-2))
        return branch_BTD


class MLP(nn.ModuleDict):
    def __init__(self, shape: ModelShape) -> None:
        inputs = ("gate", "in") if shape.gated else ("in",)
        super().__init__({name: nn.Linear(shape.d_model, shape.d_ff, shape.bias) for name in inputs})
        self["out"] = nn.Linear(shape.d_ff, shape.d_model, shape.bias)
        self.activation = shape.activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF: Tensor = self["in"](x_BTD)
        match self.activation:
            case "swiglu":
                h_BTF = F.silu(self["gate"](x_BTD)) * h_BTF
            case "gelu":
                h_BTF = F.gelu(h_BTF, approximate="tanh")
            case "relu":
                h_BTF = F.relu(h_BTF)
            case "squared_relu":
                h_BTF = F.relu(h_BTF).square()
        branch_BTD: Tensor = self["out"](h_BTF)
        return branch_BTD


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each branch times its multiplier."""

    def __init__(
        self, shape: ModelShape, multipliers: Mapping[str, float], attention_scale: float, layer: int
    ) -> None:
        super().__init__()
        norms = {"attention": _norm(shape, shape.d_model), "mlp": _norm(shape, shape.d_model)}
        if shape.qk_norm_per_head:
            norms |= {"query": PerHeadNorm(shape, shape.n_heads), "key": PerHeadNorm(shape, shape.n_kv_heads)}
        elif shape.qk_norm:
            norms |= {side: _norm(shape, shape.d_head, bias=False) for side in ("query", "key")}
        self.norm = nn.ModuleDict(norms)
        self.attention = Attention(shape, attention_scale)
        self.mlp = MLP(shape)
        self.dropout = shape.dropout
        self.attention_multiplier = multipliers.get(f"layers.{layer}.attention.out.weight", 1.0)
        self.mlp_multiplier = multipliers.get(f"layers.{layer}.mlp.out.weight", 1.0)

    def forward(self, x_BTD: Tensor, positions: "Positions") -> Tensor:
        branch_BTD = self.attention(self.norm["attention"](x_BTD), self.norm, positions)
        x_BTD = x_BTD + self.attention_multiplier * F.dropout(branch_BTD, self.dropout, self.training)
        branch_BTD = self.mlp(self.norm["mlp"](x_BTD))
        return x_BTD + self.mlp_multiplier * F.dropout(branch_BTD, self.dropout, self.training)


class Transformer(nn.Module):
    """Tokens to logits.

    ``multipliers`` are the forward multipliers of the parameter table by parameter name; what is absent is 1.
    ``attention_scale`` multiplies query . key; it is 1 / sqrt(d_head) if none is given. The parameters are whatever
    torch made of them: :func:`leaven.model.initialise.initialise` gives them their values.
    """

    def __init__(
        self,
        shape: ModelShape,
        multipliers: Mapping[str, float] | None = None,
        attention_scale: float | None = None,
    ) -> None:
        super().__init__()
        multipliers = multipliers or {}
        scale = 1 / math.sqrt(shape.d_head) if attention_scale is None else attention_scale
        self.shape = shape
        self.has_multipliers = any(m != 1.0 for m in multipliers.values()) or scale != 1 / math.sqrt(shape.d_head)
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        if shape.positions == "learned":
            self.positions = nn.Embedding(shape.seq_len, shape.d_model)
        self.layers = nn.ModuleList(Block(shape, multipliers, scale, layer) for layer in range(shape.n_layers))
        self.norm = nn.ModuleDict({"final": _norm(shape, shape.d_model)})
        if not shape.tied_embeddings:
            self.unembedding = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        readout = "embedding.weight" if shape.tied_embeddings else "unembedding.weight"
        self.logit_multiplier = multipliers.get(readout, 1.0)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) in fp32 (or wider, where the parameters are) for tokens (B, T)."""
        x_BTD = self.embedding(tokens_BT)
        if self.shape.positions == "learned":
            x_BTD = x_BTD + self.positions.weight[: tokens_BT.shape[1]]
        x_BTD = F.dropout(x_BTD, self.shape.dropout, self.training)
        positions = Positions(self.shape, tokens_BT.shape[1], x_BTD)
        for block in self.layers:
            x_BTD = block(x_BTD, positions)
        readout = self.embedding if self.shape.tied_embeddings else self.unembedding
        logits_BTV = F.linear(self.norm["final"](x_BTD), readout.weight)
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return logits_BTV if self.logit_multiplier == 1.0 else logits_BTV * self.logit_multiplier


class Positions:
    """How attention knows where a token is. Computed anew for every forward: nothing to store, nothing to load."""

    def __init__(self, shape: ModelShape, length: int, like: Tensor) -> None:
        self.bias_HTT: Tensor | None = None
        self.cos_TE = self.sin_TE = None
        places_T = torch.arange(length, device=like.device, dtype=torch.float64)
        if shape.positions == "rope":
            # Su et al. 2021, arXiv 2104.09864; halves of the head are rotated against each other, as in Llama.
            exponents_E = torch.arange(0, shape.d_head, 2, device=like.device, dtype=torch.float64) / shape.d_head
            angles_TE = torch.outer(places_T, shape.rope_theta**-exponents_E).repeat(1, 2)
            self.cos_TE, self.sin_TE = angles_TE.cos().to(like.dtype), angles_TE.sin().to(like.dtype)
        elif shape.positions == "alibi":
            distance_TT = places_T[None, :] - places_T[:, None]
            slopes_H = torch.tensor(alibi_slopes(shape.n_heads), device=like.device, dtype=torch.float64)
            bias_HTT = slopes_H[:, None, None] * distance_TT
            self.bias_HTT = bias_HTT.masked_fill(distance_TT > 0, -torch.inf).to(like.dtype)

    def rotate(self, x_BTHE: Tensor) -> Tensor:
        if self.cos_TE is None or self.sin_TE is None:
            return x_BTHE
        left, right = x_BTHE.chunk(2, dim=-1)
        turned_BTHE = torch.cat((-right, left), dim=-1)
        cos_T1E, sin_T1E = self.cos_TE[:, None].to(x_BTHE.dtype), self.sin_TE[:, None].to(x_BTHE.dtype)
        return x_BTHE * cos_T1E + turned_BTHE * sin_T1E


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8 i / n) for the i-th of n heads, n a power of two; other counts take every other slope of 2n for the rest
    (Press et al. 2021, arXiv 2108.12409, and their released code)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)]


def _norm(shape: ModelShape, size: int, bias: bool | None = None) -> nn.Module:
    if shape.norm == "rmsnorm":
        return RMSNorm(size, eps=NORM_EPS)
    return nn.LayerNorm(size, eps=NORM_EPS, bias=shape.bias if bias is None else bias)
