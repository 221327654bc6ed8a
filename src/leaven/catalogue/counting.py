"""Count the parameters of a published shape, module by module.

This count is independent of :class:`leaven.recipe.shape.ModelShape`. It covers shapes that leaven does not build
(experts, latent attention, widths that differ by layer), and where both apply they must agree. Symbols: d is d_model,
h heads, k key heads, f the width of an FFN.
"""

from collections.abc import Sequence
from typing import NamedTuple

from leaven.catalogue.groups import LayerwiseScaling, PublishedArchitecture


class Count(NamedTuple):
    total: int
    active: int  # what one token passes through: of the routed experts only those that it is sent to


class _Complete(NamedTuple):
    """The fields that every count needs."""

    n_layers: int
    d_model: int
    vocab: int
    gated: bool
    tied: bool
    qk_norm: bool
    norm_gain: int  # parameters of a norm over one channel: gain, and bias where there is one


class Widths(NamedTuple):
    """Widths of one layer: query heads, key heads, and the FFN's width (None where it has experts)."""

    n_heads: int
    n_kv_heads: int
    d_ff: int | None


def count_parameters(arch: PublishedArchitecture, seq_len: int | None) -> Count | None:
    """Return the parameters that the shape implies, or None if the shape is not published in full.

    Layers that predict further tokens (``mtp_depth``) are left out, as in published totals.
    """
    known = _complete(arch)
    widths = layer_widths(arch)
    if known is None or widths is None or (arch.positional == "learned" and seq_len is None):
        return None
    d = known.d_model
    ends = known.vocab * d * (1 if known.tied else 2)
    if arch.positional == "learned" and seq_len is not None:
        ends += seq_len * d
    ends += (1 + arch.embedding_norm) * d * known.norm_gain
    shared, total, active = 0, 0, 0
    for layer in widths:
        shared += _attention(arch, known, layer)
        shared += 2 * d * known.norm_gain
        if layer.d_ff is not None:
            shared += _ffn(known, layer.d_ff, biased=bool(arch.bias))
        else:
            total += _experts(arch, known, routed=arch.n_experts or 0)
            active += _experts(arch, known, routed=arch.experts_per_token or 0)
    return Count(ends + shared + total, ends + shared + active)


def d_head(arch: PublishedArchitecture) -> int | None:
    if arch.d_head is None and arch.d_model and arch.n_heads:
        return arch.d_model // arch.n_heads
    return arch.d_head


def _complete(arch: PublishedArchitecture) -> _Complete | None:
    vocab = arch.vocab_padded or arch.vocab_size
    if (
        arch.n_layers is None
        or arch.d_model is None
        or vocab is None
        or arch.gated is None
        or arch.norm is None
        or arch.tied_embeddings is None
        or arch.qk_norm is None
    ):
        return None
    norm_bias = arch.bias if arch.norm_bias is None else arch.norm_bias
    gain = (1 + (arch.norm == "layernorm" and bool(norm_bias))) if arch.norm_affine else 0
    return _Complete(arch.n_layers, arch.d_model, vocab, arch.gated, arch.tied_embeddings, arch.qk_norm, gain)


def layer_widths(arch: PublishedArchitecture) -> Sequence[Widths] | None:
    if arch.layerwise_scaling is not None:
        return _scaled_widths(arch, arch.layerwise_scaling)
    n_kv_heads = arch.n_heads if arch.kv_lora_rank is not None else arch.n_kv_heads
    if arch.n_layers is None or arch.n_heads is None or n_kv_heads is None:
        return None
    n_dense = arch.n_layers if arch.n_experts is None else (arch.n_dense_layers or 0)
    if n_dense and arch.d_ff is None:
        return None
    dense, sparse = Widths(arch.n_heads, n_kv_heads, arch.d_ff), Widths(arch.n_heads, n_kv_heads, None)
    return [dense] * n_dense + [sparse] * (arch.n_layers - n_dense)


def _scaled_widths(arch: PublishedArchitecture, scaling: LayerwiseScaling) -> Sequence[Widths] | None:
    """Return the layer widths of OpenELM.

    Multipliers are linear over the layers and rounded to 0.01; widths are rounded to whole groups of heads. Source:
    apple/corenet, corenet/modeling/models/language_modeling/general_gpt.py.
    """
    if arch.n_layers is None or arch.d_model is None or arch.d_head is None:
        return None

    def multipliers(ends: tuple[float, float], n_layers: int) -> list[float]:
        first, last = ends
        return [round(first + (last - first) * n / (n_layers - 1), 2) for n in range(n_layers)]

    found = []
    for qkv, ffn in zip(
        multipliers(scaling.qkv_multipliers, arch.n_layers),
        multipliers(scaling.ffn_multipliers, arch.n_layers),
        strict=True,
    ):
        n_heads = _whole(qkv * arch.d_model, arch.d_head * scaling.gqa_groups) // arch.d_head
        found.append(Widths(n_heads, n_heads // scaling.gqa_groups, _whole(ffn * arch.d_model, scaling.ffn_divisor)))
    return found


def _whole(width: float, divisor: int) -> int:
    """Return the multiple of ``divisor`` nearest to the width, but not below 90% of it."""
    rounded = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded


def _attention(arch: PublishedArchitecture, known: _Complete, layer: Widths) -> int:
    d = known.d_model
    if arch.kv_lora_rank is not None:
        return _latent_attention(arch, known, layer.n_heads, arch.kv_lora_rank)
    head = arch.d_head or d // layer.n_heads
    d_q, d_kv = layer.n_heads * head, layer.n_kv_heads * head
    matrices = d * d_q + 2 * d * d_kv + d_q * d
    qkv_bias = arch.bias if arch.qkv_bias is None else arch.qkv_bias
    biases = (d_q + 2 * d_kv if qkv_bias else 0) + (d if arch.bias else 0)
    # Relative positions after Transformer-XL project the encoding of a distance by one more d x d matrix.
    relative = d * d if arch.positional == "relative" else 0
    gains = 2 * head if arch.qk_norm_width == "head" else d_q + d_kv
    return matrices + biases + relative + (gains * known.norm_gain if known.qk_norm else 0)


def _latent_attention(arch: PublishedArchitecture, known: _Complete, n_heads: int, kv_rank: int) -> int:
    """Return the parameters of MLA (arXiv 2405.04434, section 2.1).

    Keys and values come from one latent; all heads share the rotary keys.
    """
    d = known.d_model
    nope, rope, value = arch.qk_nope_head_dim or 0, arch.qk_rope_head_dim or 0, arch.v_head_dim or 0
    d_q = n_heads * (nope + rope)
    rank = arch.q_lora_rank
    queries = d * d_q if rank is None else d * rank + rank * known.norm_gain + rank * d_q
    keys_values = d * (kv_rank + rope) + kv_rank * known.norm_gain + kv_rank * n_heads * (nope + value)
    return queries + keys_values + n_heads * value * d


def _ffn(known: _Complete, width: int, *, biased: bool) -> int:
    n_in = 2 if known.gated else 1
    return (n_in + 1) * known.d_model * width + (n_in * width + known.d_model if biased else 0)


def _experts(arch: PublishedArchitecture, known: _Complete, *, routed: int) -> int:
    """Return the parameters of the routed experts, the shared ones and the router."""
    each = _ffn(known, arch.d_expert or 0, biased=False)
    return (routed + (arch.n_shared_experts or 0)) * each + known.d_model * (arch.n_experts or 0)
