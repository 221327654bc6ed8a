"""Build the blueprints and plans of published runs, also of architectures that leaven cannot build."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

from leaven.catalogue.groups import LayerwiseScaling, PublishedArchitecture
from leaven.catalogue.runs import find_run
from leaven.planning.arrangement import parse_layout
from leaven.planning.blueprint import (
    BlockTable,
    Blueprint,
    Core,
    Matmul,
    attention_rows,
    block_table,
    mlp_rows,
)
from leaven.planning.hardware import parse_cluster
from leaven.planning.layouts import Job
from leaven.planning.plan import ClusterPlan, plan
from leaven.planning.training_codes import TRAINING_CODES, Moments
from leaven.recipe.errors import InputError

_NEEDED = ("n_layers", "d_model", "n_heads", "gated", "norm", "tied_embeddings", "qk_norm")
_EXPERTS = ("experts_per_token", "d_expert")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class LayerWidths(NamedTuple):
    """The number of heads and the MLP's width of one layer."""

    n_heads: int
    n_kv_heads: int
    d_ff: int | None  # None where the layer has experts


def plan_run(id: str, gpus: str, layout: str | None = None, moments: Moments = "adam") -> ClusterPlan:
    """Plan a published run of any architecture by its id, as Megatron with flash attention would train it.

    Sequence length, batch and tokens are those of the run; the vocabulary is padded to a multiple of 128. The limits
    of leaven's own trainer do not apply.

    Raises:
        InputError: if there is no such run, or too little is published to plan it.
    """
    run = find_run(id)
    seq_len = run.data.seq_len if run.data else None
    known = {"sequence length": seq_len, "batch": run.batch_tokens, "number of tokens": run.tokens}
    missing = [name for name, value in known.items() if value is None]
    if seq_len is None or run.batch_tokens is None or run.tokens is None:
        raise InputError(
            f"{id}: no {' and no '.join(missing)} is published; plan a recipe instead: leaven new --from {id}"
        )
    model = published_blueprint(run.arch, seq_len)
    model = replace(model, vocab_size=-(-model.vocab_size // 128) * 128)
    cluster = parse_cluster(gpus)
    asked, micro_batch = parse_layout(layout, cluster.gpus) if layout else (None, None)
    job = Job(
        model,
        _sequences(run.batch_tokens, seq_len) * seq_len,
        cluster,
        micro_batch,
        code=TRAINING_CODES["megatron-flash"].with_moments(moments),
        by_leaven=False,
        compile=asked is not None and asked.compile,
    )
    return plan(job, run.tokens, asked)


def _sequences(batch_tokens: int, seq_len: int) -> int:
    """Return the number of sequences in a batch that was published as a rounded number of tokens.

    It is rounded to a multiple of the largest power of two that changes it by at most 5%: 16M tokens in sequences of
    8,192 are 2,048.
    """
    count = batch_tokens / seq_len
    if count == int(count):
        return int(count)
    units = [2**n for n in range(20, -1, -1)]
    near = [round(count / unit) * unit for unit in units]
    return next((sequences for sequences in near if abs(sequences / count - 1) <= 0.05), max(round(count), 1))


def published_blueprint(
    arch: PublishedArchitecture, seq_len: int, windows: Sequence[int | None] = (None,), *, dropout: bool = False
) -> Blueprint:
    """Return the blueprint of a published architecture at a sequence length.

    ``windows`` are the attention windows (in keys) of successive layers, repeated cyclically; None means all keys. If
    only some layers have experts, the layers without experts come first.

    Raises:
        InputError: if a part of the shape is not published; the message names it.
    """
    missing = [name for name in _NEEDED if getattr(arch, name) is None]
    missing += [] if arch.vocab_padded or arch.vocab_size else ["vocab_size"]
    missing += [name for name in (_EXPERTS if arch.n_experts else ()) if getattr(arch, name) is None]
    missing += [name for name in (_LATENT if arch.kv_lora_rank else ("n_kv_heads",)) if getattr(arch, name) is None]
    widths = _layer_widths(arch)
    if missing == ["n_heads", "n_kv_heads"] and arch.layerwise_scaling and widths:  # they differ by layer
        missing = []
    if missing or widths is None:
        raise InputError(
            f"the shape is not published in full: {', '.join(missing or ['d_ff'])} is not known; "
            "plan a run with a complete shape"
        )
    d, vocab = arch.d_model or 0, arch.vocab_padded or arch.vocab_size or 0
    gains = _gains(arch)
    made: dict[tuple[LayerWidths, int | None], BlockTable] = {}
    blocks = []
    for layer, window in zip(widths, islice(cycle(windows), len(widths)), strict=True):
        key = (layer, window)
        if key not in made:
            made[key] = _block(arch, layer, window, dropout=dropout)
        blocks.append(made[key])
    return Blueprint(
        seq_len,
        d,
        vocab,
        tuple(blocks),
        bool(arch.tied_embeddings),
        positions=seq_len * d if arch.positional == "learned" else 0,
        embedding_norm=arch.embedding_norm,
        embedding_vectors=d * gains if arch.embedding_norm else 0,
        final_vectors=d * gains,
    )


def _layer_widths(arch: PublishedArchitecture) -> Sequence[LayerWidths] | None:
    """Return the widths of each layer, or None if they are not published."""
    if arch.layerwise_scaling is not None:
        return _scaled_widths(arch, arch.layerwise_scaling)
    n_kv_heads = arch.n_heads if arch.kv_lora_rank is not None else arch.n_kv_heads
    if arch.n_layers is None or arch.n_heads is None or n_kv_heads is None:
        return None
    n_dense = arch.n_layers if arch.n_experts is None else (arch.n_dense_layers or 0)
    if n_dense and arch.d_ff is None:
        return None
    dense, sparse = (LayerWidths(arch.n_heads, n_kv_heads, width) for width in (arch.d_ff, None))
    return [dense] * n_dense + [sparse] * (arch.n_layers - n_dense)


def _scaled_widths(arch: PublishedArchitecture, scaling: LayerwiseScaling) -> Sequence[LayerWidths] | None:
    """Return the layer widths of OpenELM, which differ from layer to layer.

    Multipliers are linear over the layers and rounded to 0.01; widths are rounded to whole groups of heads. Source:
    apple/corenet, corenet/modeling/models/language_modeling/general_gpt.py.
    """
    if arch.n_layers is None or arch.d_model is None or arch.d_head is None:
        return None

    def width(ends: tuple[float, float], layer: int, divisor: int) -> int:
        """Return the multiple of ``divisor`` that is nearest to a layer's exact width, but at least 90% of it."""
        first, last = ends
        exact = round(first + (last - first) * layer / ((arch.n_layers or 0) - 1), 2) * (arch.d_model or 0)
        rounded = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        return rounded + divisor if rounded < 0.9 * exact else rounded

    widths = []
    for layer in range(arch.n_layers):
        n_heads = width(scaling.qkv_multipliers, layer, arch.d_head * scaling.gqa_groups) // arch.d_head
        d_ff = width(scaling.ffn_multipliers, layer, scaling.ffn_divisor)
        widths.append(LayerWidths(n_heads, n_heads // scaling.gqa_groups, d_ff))
    return widths


def _gains(arch: PublishedArchitecture) -> int:
    """Return the number of parameters that a norm has per channel."""
    bias = arch.bias if arch.norm_bias is None else arch.norm_bias
    return (1 + (arch.norm == "layernorm" and bool(bias))) if arch.norm_affine else 0


def _block(arch: PublishedArchitecture, layer: LayerWidths, window: int | None, *, dropout: bool) -> BlockTable:
    heads, kv_heads, d_ff = layer
    d, gain = arch.d_model or 0, _gains(arch)
    bias, gated = bool(arch.bias), bool(arch.gated)
    gains, split_gains = 2 * d * gain, 0
    if (rank := arch.kv_lora_rank) is not None:
        matmuls, core = _latent(arch, heads, rank, window)
        gains += (rank + (arch.q_lora_rank or 0)) * gain
    else:
        head = arch.d_head or d // heads
        qkv_bias = bool(arch.bias if arch.qkv_bias is None else arch.qkv_bias)
        matmuls = attention_rows(d, heads, kv_heads, head, bias=bias, qkv_bias=qkv_bias)
        core = Core(heads, kv_heads, head, head, window)
        if arch.positional == "relative":  # Transformer-XL projects the encoding of each distance
            matmuls.append(Matmul("attention.distance", d, d, "column"))
        if arch.qk_norm and arch.qk_norm_width == "head":
            gains += 2 * head * gain
        elif arch.qk_norm:
            split_gains = (heads + kv_heads) * head * gain
    matmuls += _experts(arch, gated) if d_ff is None else mlp_rows("mlp", d, d_ff, gated=gated, bias=bias)
    activation = arch.activation or ("swiglu" if gated else "gelu")
    return block_table(matmuls, core, gains, split_gains, activation, qk_norm=bool(arch.qk_norm), dropout=dropout)


def _latent(arch: PublishedArchitecture, heads: int, rank: int, window: int | None) -> tuple[list[Matmul], Core]:
    """Return the matrix products and the core of multi-head latent attention (arXiv 2405.04434, section 2.1).

    The projections to a latent are not split: every tensor-parallel rank stores them in full, as in Megatron.
    """
    d = arch.d_model or 0
    nope, rope, value = arch.qk_nope_head_dim or 0, arch.qk_rope_head_dim or 0, arch.v_head_dim or 0
    queries = arch.q_lora_rank
    rows = [Matmul("attention.query", queries or d, heads * (nope + rope), "column")]
    if queries is not None:
        rows.insert(0, Matmul("attention.query_latent", d, queries, "none"))
    rows += [
        Matmul("attention.latent", d, rank + rope, "none"),
        Matmul("attention.key_value", rank, heads * (nope + value), "column"),
        Matmul("attention.out", heads * value, d, "row"),
    ]
    return rows, Core(heads, heads, nope + rope, value, window)


def _experts(arch: PublishedArchitecture, gated: bool) -> list[Matmul]:
    """Return the matrix products of the router, of the routed experts, and of the shared experts as one wider MLP."""
    d, width, routed, shared = arch.d_model or 0, arch.d_expert or 0, arch.n_experts or 0, arch.n_shared_experts or 0
    rows = [Matmul("router", d, routed, "none")]
    rows += mlp_rows("experts", d, width, gated=gated, stored=routed, passed=arch.experts_per_token or 0)
    return rows + (mlp_rows("shared", d, width * shared, gated=gated) if shared else [])
