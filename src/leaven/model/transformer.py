"""The transformer that a model shape describes, and its pipeline stages.

Parameters have the names and shapes of ``ModelShape.parameters()``.

Shape suffixes: B sequences, T positions, D d_model, F d_ff, H query heads, K key/value heads, E d_head,
V vocabulary. For cosines and sines, E is d_rotary / 2.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaven.model.experts import MixtureOfExperts, SequenceWeights, activated
from leaven.model.kernels import causal_attention, linear, prefers_causal_attention, rms_norm, rotate
from leaven.model.loss import IGNORED, ZLoss, cross_entropy
from leaven.recipe.shape import ModelShape


class RMSNorm(nn.RMSNorm):
    """An RMSNorm that computes in fp32, the dtype of its gain. Its output has the dtype in which matrix products
    are computed, such as bf16 with autocast."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = _compute_dtype(x)
        if x.is_cpu and not torch.compiler.is_compiling():
            return rms_norm(x, self.weight, self.eps or 0.0, dtype)
        return super().forward(x.to(self.weight.dtype)).to(dtype)  # torch is slow with two dtypes


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product with input x is computed. Autocast leaves float64 as it is."""
    device = x.device.type
    lower = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lower else x.dtype


class Linear(nn.Linear):
    """A linear layer. Without a bias, it multiplies with :func:`leaven.model.kernels.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) if self.bias is None else super().forward(x)


class PerHeadNorm(nn.Module):
    """A norm over the entries of each head. The gain has the shape (heads, d_head): one value for each entry."""

    def __init__(self, shape: ModelShape, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, shape.d_head))
        self.centred, self.eps = shape.norm == "layernorm", shape.norm_eps

    def forward(self, x_BTHE: Tensor) -> Tensor:
        wide_BTHE, size = x_BTHE.to(self.weight.dtype), self.weight.shape[1:]
        norm = F.layer_norm if self.centred else F.rms_norm
        return (norm(wide_BTHE, size, eps=self.eps) * self.weight).to(x_BTHE.dtype)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape, scale: float, window: int | None) -> None:
        d, d_q, d_kv = shape.d_model, shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
        super().__init__()
        self.query = Linear(d, d_q, shape.has_bias("attention.query"))
        self.key = Linear(d, d_kv, shape.has_bias("attention.key"))
        self.value = Linear(d, d_kv, shape.has_bias("attention.value"))
        self.out = Linear(d_q, d, shape.has_bias("attention.out"))
        self.d_head, self.dropout, self.scale = shape.d_head, shape.dropout, scale
        self.window, self.softcap, self.norms_whole = window, shape.attention_softcap, shape.qk_norm_whole

    def forward(self, x_BTD: Tensor, norm: nn.ModuleDict, positions: "Positions") -> Tensor:
        # The number of heads follows from the tensor, because a tensor-parallel rank has only some of the heads.
        q_BTD, k_BTD = self.query(x_BTD), self.key(x_BTD)
        if "query" in norm and self.norms_whole:
            q_BTD, k_BTD = norm["query"](q_BTD), norm["key"](k_BTD)
        q_BTHE, k_BTKE, v_BTKE = (
            side_BTD.unflatten(-1, (-1, self.d_head)) for side_BTD in (q_BTD, k_BTD, self.value(x_BTD))
        )
        if "query" in norm and not self.norms_whole:
            q_BTHE, k_BTKE = norm["query"](q_BTHE), norm["key"](k_BTKE)
        q_BHTE, k_BKTE, v_BKTE = positions.rotate(q_BTHE), positions.rotate(k_BTKE), v_BTKE.transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        if self.softcap or (prefers_causal_attention(x_BTD.device.type) and positions.plain and not dropout):
            y_BHTE = causal_attention(
                q_BHTE,
                k_BKTE,
                v_BKTE,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                allowed_B1TT=positions.allowed_B1TT,
            )
        else:
            mask_HTT = None if positions.plain and self.window is None else positions.masks[self.window]
            y_BHTE = F.scaled_dot_product_attention(
                q_BHTE,
                k_BKTE,
                v_BKTE,
                attn_mask=mask_HTT,
                dropout_p=dropout,
                is_causal=mask_HTT is None,
                scale=self.scale,
                enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
            )
        branch_BTD: Tensor = self.out(y_BHTE.transpose(1, 2).flatten(-2))
        return branch_BTD


class MLP(nn.Module):
    gate: nn.Linear  # only in a gated MLP

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        for name in ("gate", "in") if shape.gated else ("in",):  # "in" is a Python keyword: no attribute name
            self.add_module(name, Linear(shape.d_model, width, shape.bias))
        self.out = Linear(width, shape.d_model, shape.bias)
        self.activation, self.gated = shape.activation, shape.gated

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF = self.gate(x_BTD) if self.gated else None
        branch_BTD: Tensor = self.out(activated(self.activation, getattr(self, "in")(x_BTD), gate_BTF))
        return branch_BTD


class Block(nn.Module):
    """A transformer block. By default, it computes x + a * attention(norm(x)), then x + m * mlp(norm(x)) with
    constant a and m, which follow output norms, if any. Parallel branches both read the same input."""

    def __init__(
        self,
        shape: ModelShape,
        multipliers: Mapping[str, float],
        attention_scale: float,
        layer: int,
        router_losses: tuple[float, float],
    ) -> None:
        super().__init__()
        norms = {name: _norm(shape, shape.d_model) for name in shape.block_norms}
        for side, heads in (("query", shape.n_heads), ("key", shape.n_kv_heads)) if shape.qk_norm else ():
            if shape.qk_norm_per_head:
                norms[side] = PerHeadNorm(shape, heads)
            else:
                size = heads * shape.d_head if shape.qk_norm_whole else shape.d_head
                norms[side] = _norm(shape, size, bias=False)
        self.norm = nn.ModuleDict(norms)
        self.attention = Attention(shape, attention_scale, shape.window_of(layer))
        self.dropout, self.parallel = shape.dropout, shape.parallel_branches

        def multiplier(end: str) -> float:
            return multipliers.get(f"layers.{layer}.{end}.weight", 1.0)

        self.attention_multiplier = multiplier("attention.out")
        self.mlp: MLP | MixtureOfExperts
        if shape.experts is not None and shape.has_experts(layer):
            self.mlp_multiplier = multiplier("mlp.experts.out")
            shared = MLP(shape, shape.experts.shared * shape.experts.d_expert) if shape.experts.shared else None
            relative = multiplier("mlp.shared.out") / self.mlp_multiplier
            self.mlp = MixtureOfExperts(shape, shared, relative, router_losses)
        else:
            self.mlp_multiplier = multiplier("mlp.out")
            self.mlp = MLP(shape, shape.d_ff)

    def forward(self, x_BTD: Tensor, positions: "Positions") -> Tensor:
        y_BTD = self._input("attention", x_BTD)
        branch_BTD = self._output("attention", self.attention(y_BTD, self.norm, positions))
        x_BTD = _added(x_BTD, branch_BTD, self.attention_multiplier)
        if not self.parallel:
            y_BTD = self._input("mlp", x_BTD)
        mixture = isinstance(self.mlp, MixtureOfExperts)
        branch_BTD = self._output("mlp", self.mlp(y_BTD, positions.sequences) if mixture else self.mlp(y_BTD))
        return _added(x_BTD, branch_BTD, self.mlp_multiplier)

    def _input(self, branch: str, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.norm[branch](x_BTD) if branch in self.norm else x_BTD.to(_compute_dtype(x_BTD))
        return y_BTD

    def _output(self, branch: str, y_BTD: Tensor) -> Tensor:
        if f"{branch}_out" in self.norm:
            y_BTD = self.norm[f"{branch}_out"](y_BTD)
        return F.dropout(y_BTD, self.dropout, self.training)


def _added(x_BTD: Tensor, branch_BTD: Tensor, multiplier: float) -> Tensor:
    if torch.compiler.is_compiling():  # it would compile again for each ``alpha``, and give up after eight
        return x_BTD + branch_BTD.to(x_BTD.dtype) * multiplier
    return torch.add(x_BTD, branch_BTD, alpha=multiplier)


class Transformer(nn.Module):
    """A decoder-only transformer from tokens to logits. :func:`leaven.model.initialisation.build_model` makes one.

    Args:
        multipliers: factors on the outputs of branches and on the logits, by name of the last weight of the branch or
            model, such as ``layers.0.mlp.out.weight``; the default is 1.
        attention_scale: factor on query . key; the default is 1 / sqrt(d_head).
        router_losses: coefficients of the routers' balance loss and z-loss.
    """

    def __init__(
        self,
        shape: ModelShape,
        multipliers: Mapping[str, float] | None = None,
        attention_scale: float | None = None,
        router_losses: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        multipliers = multipliers or {}
        scale = 1 / math.sqrt(shape.d_head) if attention_scale is None else attention_scale
        self.shape = shape
        self.has_multipliers = any(m != 1.0 for m in multipliers.values()) or scale != 1 / math.sqrt(shape.d_head)
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        if shape.positions == "learned":
            self.positions = nn.Embedding(shape.seq_len, shape.d_model)
        self.layers = nn.ModuleList(
            Block(shape, multipliers, scale, layer, router_losses) for layer in range(shape.n_layers)
        )
        ends = ("embedding", "final") if shape.embedding_norm else ("final",)
        self.norm = nn.ModuleDict({end: _norm(shape, shape.d_model) for end in ends})
        if not shape.tied_embeddings:
            self.unembedding = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        readout = "embedding.weight" if shape.tied_embeddings else "unembedding.weight"
        self.logit_multiplier = multipliers.get(readout, 1.0)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T), in fp32 or wider. ``documents_BT``: see :meth:`hidden`."""
        logits_BTV = F.linear(self.hidden(tokens_BT, documents_BT), self.readout)
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return self.capped(logits_BTV if self.logit_multiplier == 1.0 else logits_BTV * self.logit_multiplier)

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.shape.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def readout(self) -> Tensor:
        """The (V, D) unembedding matrix without ``logit_multiplier``."""
        return self.embedding.weight if self.shape.tied_embeddings else self.unembedding.weight

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the input of the unembedding, (B, T, D). ``documents_BT`` has the index of each token's document,
        never decreasing along T. If given, positions begin at 0 in every document, and tokens attend only to
        their own document. Raise ValueError if T exceeds the learned positions."""
        x_BTD = self.through_layers(self.embed(tokens_BT, documents_BT), tokens_BT.shape[1], documents_BT)
        hidden_BTD: Tensor = self.norm["final"](x_BTD)
        return hidden_BTD

    def embed(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the input of the first block, (B, T, D). Raise ValueError if T exceeds the learned positions."""
        x_BTD: Tensor = self.embedding(tokens_BT)
        if "embedding" in self.norm:
            x_BTD = self.norm["embedding"](x_BTD)
        if self.shape.positions == "learned":
            if tokens_BT.shape[1] > self.shape.seq_len:
                raise ValueError(
                    f"the sequence has {tokens_BT.shape[1]} tokens, but the model has learned only seq_len = "
                    f"{self.shape.seq_len} positions; pass at most {self.shape.seq_len} tokens"
                )
            x_BTD = x_BTD + self.positions(places(documents_BT, tokens_BT))
        return F.dropout(x_BTD, self.shape.dropout, self.training)

    def through_layers(
        self,
        x_BTD: Tensor,
        length: int,
        documents_BT: Tensor | None = None,
        sequences: SequenceWeights | None = None,
    ) -> Tensor:
        """Run the blocks on ``x_BTD``, and return (B, T, D). ``length`` is the length of a whole sequence. With
        tensor parallelism, T is the length of a rank's part of the sequence. With ``sequences``, the backward pass
        adds the gradients of the routers' losses."""
        positions = Positions(self.shape, length, x_BTD, documents_BT, sequences)
        for block in self.layers.children():
            x_BTD = block(x_BTD, positions)
        return x_BTD


class Positions:
    """Rotary cosines and sines, and the masks of the attention scores, for one forward pass.

    - ``cos_TE`` and ``sin_TE``: (T, d_rotary / 2), or (B, T, d_rotary / 2) with ``documents_BT``.
    - ``masks``: the mask of each attention window (None: all earlier positions), which is added to the scores. It is
      (T, T), or (B, 1, T, T) with ``documents_BT``. With ALiBi, it is (H, T, T) or (B, H, T, T). Plain causal
      attention has no mask. Masks have the dtype of the matrix products. Otherwise each layer would convert its
      mask, and autograd would save every copy.
    - ``allowed_B1TT``, for attention with a softcap, instead of masks: whether a query may attend to a key. It is
      None without ``documents_BT``.
    """

    def __init__(
        self,
        shape: ModelShape,
        length: int,
        like: Tensor,
        documents_BT: Tensor | None = None,
        sequences: SequenceWeights | None = None,
    ) -> None:
        self.sequences = sequences  # for the routers of experts
        self.cos_TE = self.sin_TE = None
        if shape.positions == "rope":
            device = torch.device("cpu") if like.device.type == "mps" else like.device  # mps lacks float64
            places_T = torch.arange(length, device=device, dtype=torch.float64)
            # Su et al. 2021, arXiv 2104.09864; entry i of a head is paired with entry i + E/2, as in Llama.
            exponents_E = torch.arange(0, shape.d_rotary, 2, device=device, dtype=torch.float64) / shape.d_rotary
            angles_TE = torch.outer(places_T, shape.rope_theta**-exponents_E)
            self.cos_TE = angles_TE.cos().to(like.device, like.dtype)
            self.sin_TE = angles_TE.sin().to(like.device, like.dtype)
        if documents_BT is not None and self.cos_TE is not None and self.sin_TE is not None:
            within_BT = places(documents_BT, documents_BT)
            self.cos_TE, self.sin_TE = self.cos_TE[within_BT], self.sin_TE[within_BT]
        self.plain = documents_BT is None and shape.positions != "alibi"
        self.masks: dict[int | None, Tensor] = {}
        self.allowed_B1TT: Tensor | None = None
        if shape.attention_softcap:
            if documents_BT is not None:
                self.allowed_B1TT = allowed(length, like, documents_BT)
            return
        for window in {shape.window_of(layer) for layer in range(shape.n_layers)}:
            if window is None and self.plain:
                continue
            if shape.positions == "alibi":
                self.masks[window] = alibi_mask(shape.n_heads, length, like, documents_BT, window)
            else:
                minus_inf = torch.full((), -torch.inf, device=like.device, dtype=_compute_dtype(like))
                allowed_BTT = allowed(length, like, documents_BT, window)
                self.masks[window] = torch.where(allowed_BTT, torch.zeros_like(minus_inf), minus_inf)

    def rotate(self, x_BTHE: Tensor) -> Tensor:
        """Return queries or keys as (B, H, T, E), rotated if the positions are rotary."""
        if self.cos_TE is None or self.sin_TE is None:
            return x_BTHE.transpose(1, 2)
        size, cos_TE, sin_TE = 2 * self.cos_TE.shape[-1], self.cos_TE.to(x_BTHE.dtype), self.sin_TE.to(x_BTHE.dtype)
        if size == x_BTHE.shape[-1]:
            return rotate(x_BTHE, cos_TE, sin_TE)
        rest_BHTE = x_BTHE[..., size:].transpose(1, 2)
        return torch.cat((rotate(x_BTHE[..., :size], cos_TE, sin_TE), rest_BHTE), dim=-1)


def places(documents_BT: Tensor | None, tokens_BT: Tensor) -> Tensor:
    """Return token positions in their documents (B, T) or, without ``documents_BT``, in the sequence (T,)."""
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    if documents_BT is None:
        return place_T
    first_BT = documents_BT.diff(dim=1, prepend=documents_BT[:, :1] - 1) != 0
    return place_T - (place_T * first_BT).cummax(1).values


def allowed(length: int, like: Tensor, documents_BT: Tensor | None = None, window: int | None = None) -> Tensor:
    """Return whether each query (row) may attend to each key (column): (T, T), or (B, 1, T, T) with documents."""
    place_T = torch.arange(length, device=like.device)
    allowed_BTT = place_T <= place_T[:, None]
    if window:
        allowed_BTT &= place_T > place_T[:, None] - window
    if documents_BT is not None:
        allowed_BTT = allowed_BTT & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    return allowed_BTT


def alibi_mask(
    n_heads: int, length: int, like: Tensor, documents_BT: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return the bias of ALiBi, and minus infinity where :func:`allowed` is False: (H, T, T), or (B, H, T, T) with
    documents."""
    device = torch.device("cpu") if like.device.type == "mps" else like.device  # mps lacks float64
    # The bias of a key depends only on its distance, so (H, 2 T - 1) values are computed in float64.
    distance_R = torch.arange(1 - length, length, device=device, dtype=torch.float64)
    slopes_H = torch.tensor(alibi_slopes(n_heads), device=device, dtype=torch.float64)
    far_R = (distance_R > 0) | (distance_R <= -(window or length))
    bias_HR = (slopes_H[:, None] * distance_R).masked_fill(far_R, -torch.inf).to(like.device, like.dtype)
    rows_HTT = bias_HR.to(_compute_dtype(like)).unfold(-1, length, 1)  # a view, the last query first
    if documents_BT is None:
        return rows_HTT.flip(-2)
    mask_BHTT = rows_HTT.expand(len(documents_BT), -1, -1, -1).flip(-2)
    return mask_BHTT.masked_fill_(documents_BT[:, None, :, None] != documents_BT[:, None, None, :], -torch.inf)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return the ALiBi slope of each of n heads (Press et al. 2021, arXiv 2108.12409). If n is a power of two,
    head i = 1, ..., n has the slope 2^(-8 i / n). Otherwise, p is the largest power of two below n. The
    first p heads have the slopes of p heads. The others have the 1st, 3rd, 5th, ... slope of 2 p heads."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)]


def _norm(shape: ModelShape, size: int, bias: bool | None = None) -> nn.Module:
    if shape.norm == "rmsnorm":
        return RMSNorm(size, eps=shape.norm_eps)
    return nn.LayerNorm(size, eps=shape.norm_eps, bias=shape.bias if bias is None else bias)


class Stage(nn.Module):
    """A pipeline stage: the layers ``first`` to ``last - 1`` of a model, in the first stage with the embedding, in
    the last with final norm, unembedding and loss. The constructor removes all other modules from ``model``.

    Args:
        dtype: the dtype of matrix products.
        splits_backward: whether the gradients of inputs and of parameters are computed in two backward passes.
    """

    def __init__(
        self, model: Transformer, first: int, last: int, dtype: torch.dtype, *, splits_backward: bool = False
    ) -> None:
        super().__init__()
        shape = model.shape
        self.begins, self.ends = first == 0, last == shape.n_layers
        for layer in range(shape.n_layers):
            if not first <= layer < last:
                model.layers[layer] = None  # type: ignore[assignment]  # children() skips it
        if not self.begins:
            if shape.embedding_norm:
                del model.norm["embedding"]
            if shape.positions == "learned":
                del model.positions
            if not (self.ends and shape.tied_embeddings):
                del model.embedding
        if not self.ends:
            del model.norm["final"]
            if not shape.tied_embeddings:
                del model.unembedding
        self.model, self.dtype, self.splits_backward = model, dtype, splits_backward
        self.factor: Tensor | float = 1.0  # multiplies the loss; set it before a forward pass
        self.loss: Callable[..., Tensor] = cross_entropy
        self.z_loss: ZLoss | None = None  # added to the gradients

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.model.layers.children() if isinstance(block, Block)]

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, documents_BT: Tensor | None = None) -> Tensor:
        """Return the activations (B, T, D), or in the last stage the loss (1,), a sum in nats times :attr:`factor`.
        ``x`` is the output of the previous stage or, in the first stage, the tokens (B, T)."""
        model, lower = self.model, self.dtype not in {torch.float32, torch.float64}
        # Within another autocast, torch would keep cast weights from step to step. No weight is cast twice in a pass.
        with torch.autocast(x.device.type, self.dtype, enabled=lower, cache_enabled=False):
            if self.begins:
                x = model.embed(x, documents_BT)
            sequences = None
            if model.shape.experts and targets_BT is not None:
                sequences = SequenceWeights((targets_BT != IGNORED).sum(1), self.factor)
            x_BTD = model.through_layers(x, model.shape.seq_len, documents_BT, sequences)
            if not self.ends:
                return x_BTD
            hidden_BTD = model.norm["final"](x_BTD)
        assert targets_BT is not None
        loss = self.loss(
            hidden_BTD,
            model.readout,
            targets_BT,
            multiplier=model.logit_multiplier,
            softcap=model.shape.logit_softcap,
            factor=self.factor,
            compute=self.dtype if lower else None,
            repeatable=self.splits_backward,
            z_loss=self.z_loss,
        )
        return torch.stack((loss,))  # FSDP's hooks do not accept a view
