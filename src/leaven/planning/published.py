"""The planner's table of a published architecture, also of one that leaven does not build."""

from collections.abc import Sequence
from itertools import cycle, islice

from leaven.catalogue.counting import Widths, layer_widths
from leaven.catalogue.groups import PublishedArchitecture
from leaven.planning.blueprint import BlockTable, Blueprint, Core, Matmul
from leaven.recipe.errors import InputError

_NEEDED = ("n_layers", "d_model", "n_heads", "gated", "norm", "tied_embeddings", "qk_norm")
_EXPERTS = ("experts_per_token", "d_expert")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def published_blueprint(
    arch: PublishedArchitecture, seq_len: int, windows: Sequence[int | None] = (None,), *, dropout: bool = False
) -> Blueprint:
    """The table of a published architecture at a sequence length.

    ``windows``: keys that a query sees in one layer after the other, and again from the first; None for all of them.
    Where a source has experts in some layers only, the ones without are taken for the first.

    Raises:
        InputError: naming what of the shape is not published.
    """
    missing = [name for name in _NEEDED if getattr(arch, name) is None]
    missing += [] if arch.vocab_padded or arch.vocab_size else ["vocab_size"]
    missing += [name for name in (_EXPERTS if arch.n_experts else ()) if getattr(arch, name) is None]
    missing += [name for name in (_LATENT if arch.kv_lora_rank else ("n_kv_heads",)) if getattr(arch, name) is None]
    widths = layer_widths(arch)
    if missing == ["n_heads", "n_kv_heads"] and arch.layerwise_scaling and widths:  # they differ by layer
        missing = []
    if missing or widths is None:
        raise InputError(
            f"the shape is not published in full: {', '.join(missing or ['d_ff'])} is not known; "
            "plan a recipe of a shape that is"
        )
    d, vocab = arch.d_model or 0, arch.vocab_padded or arch.vocab_size or 0
    gains = _gains(arch)
    made: dict[tuple[Widths, int | None], BlockTable] = {}
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


def _gains(arch: PublishedArchitecture) -> int:
    """Parameters of a norm over one channel."""
    bias = arch.bias if arch.norm_bias is None else arch.norm_bias
    return (1 + (arch.norm == "layernorm" and bool(bias))) if arch.norm_affine else 0


def _block(arch: PublishedArchitecture, layer: Widths, window: int | None, *, dropout: bool) -> BlockTable:
    heads, kv_heads, d_ff = layer
    d, gains = arch.d_model or 0, _gains(arch)
    if arch.kv_lora_rank is not None:
        matmuls, core, vectors, split_vectors = _latent(arch, heads, arch.kv_lora_rank, window)
    else:
        matmuls, core, vectors, split_vectors = _grouped(arch, heads, kv_heads, window)
    matmuls += _experts(arch) if d_ff is None else _mlp(arch, "mlp", d_ff, bias=bool(arch.bias))
    for row in matmuls:
        if row.bias and row.split == "row":
            vectors += row.n
        elif row.bias:
            split_vectors += row.n
    activation = arch.activation or ("swiglu" if arch.gated else "gelu")
    return BlockTable(
        tuple(matmuls), core, vectors + 2 * d * gains, split_vectors, activation, bool(arch.qk_norm), dropout
    )


def _grouped(
    arch: PublishedArchitecture, heads: int, kv_heads: int, window: int | None
) -> tuple[list[Matmul], Core, int, int]:
    """Heads that share keys and values in groups; the vectors are those of the norms of queries and keys."""
    d = arch.d_model or 0
    head = arch.d_head or d // heads
    bias, qkv_bias = bool(arch.bias), bool(arch.bias if arch.qkv_bias is None else arch.qkv_bias)
    rows = [
        Matmul("attention.query", d, heads * head, "column", qkv_bias),
        Matmul("attention.key", d, kv_heads * head, "column", qkv_bias),
        Matmul("attention.value", d, kv_heads * head, "column", qkv_bias),
        Matmul("attention.out", heads * head, d, "row", bias),
    ]
    if arch.positional == "relative":  # Transformer-XL projects the encoding of each distance
        rows.append(Matmul("attention.distance", d, d, "column"))
    shared, wide = 0, 0
    if arch.qk_norm and arch.qk_norm_width == "head":
        shared = 2 * head * _gains(arch)
    elif arch.qk_norm:
        wide = (heads + kv_heads) * head * _gains(arch)
    return rows, Core(heads, kv_heads, head, head, window), shared, wide


def _latent(
    arch: PublishedArchitecture, heads: int, rank: int, window: int | None
) -> tuple[list[Matmul], Core, int, int]:
    """MLA (arXiv 2405.04434, section 2.1). What leads to a latent is whole on every tensor rank, as in Megatron."""
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
    return rows, Core(heads, heads, nope + rope, value, window), (rank + (queries or 0)) * _gains(arch), 0


def _mlp(
    arch: PublishedArchitecture, name: str, width: int, *, bias: bool, stored: int = 1, passed: int = 1
) -> list[Matmul]:
    d = arch.d_model or 0
    inputs = ("gate", "in") if arch.gated else ("in",)
    return [
        *(Matmul(f"{name}.{side}", d, width, "column", bias, stored, passed) for side in inputs),
        Matmul(f"{name}.out", width, d, "row", bias, stored, passed),
    ]


def _experts(arch: PublishedArchitecture) -> list[Matmul]:
    """The router, the experts that it chooses from, and the ones that every token passes, as one wider MLP."""
    width, routed, shared = arch.d_expert or 0, arch.n_experts or 0, arch.n_shared_experts or 0
    rows = [Matmul("router", arch.d_model or 0, routed, "none")]
    rows += _mlp(arch, "experts", width, bias=False, stored=routed, passed=arch.experts_per_token or 0)
    return rows + (_mlp(arch, "shared", width * shared, bias=False) if shared else [])
