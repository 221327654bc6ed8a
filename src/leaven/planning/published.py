"""Plan published runs, even if leaven cannot build the model, for example with latent attention."""

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from leaven.catalogue.groups import LayerwiseScaling, PublishedArchitecture
from leaven.catalogue.runs import find_run, load_runs
from leaven.errors import InputError
from leaven.planning.blueprint import BlockTable, Blueprint, Core, Matmul, attention_rows, expert_rows, mlp_rows
from leaven.planning.hardware import parse_cluster
from leaven.planning.layouts import Job
from leaven.planning.plan import ClusterPlan, plan
from leaven.planning.training_codes import Moments, training_code
from leaven.recipe.batch import Batch
from leaven.recipe.recipe import Recipe


class LayerWidths(NamedTuple):
    n_heads: int
    n_kv_heads: int
    d_ff: int | None  # width of the MLP; None if the layer has experts


def plan_run(
    id: str, gpus: str, layout: str | None = None, moments: Moments = "adam", code: str | None = None
) -> ClusterPlan:
    """Plan a published run. The vocabulary is padded to a multiple of 128.

    ``layout`` is text such as ``tp=8,pp=12``, by default the fastest that fits. ``moments`` is the optimizer
    whose states are counted. ``code`` names the training code, by default Megatron-LM with flash attention.
    Raise InputError as :func:`plan`, or if a name is unknown or too little is published.
    """
    run = find_run(id)
    seq_len = run.data.seq_len if run.data else None
    known = {"sequence length": seq_len, "batch": run.batch_tokens, "number of tokens": run.tokens}
    if seq_len is None or run.batch_tokens is None or run.tokens is None:
        missing = [name for name, value in known.items() if value is None]
        raise InputError(
            f"{id}: no {' and no '.join(missing)} is published; plan a recipe instead: leaven new --from {id}"
        )
    model = published_blueprint(run.arch, seq_len)
    model = replace(model, vocab_size=-(-model.vocab_size // 128) * 128)
    batch = Batch(tokens=_sequences(run.batch_tokens, seq_len) * seq_len)
    planned = training_code("megatron-flash" if code is None else code).with_moments(moments)
    return plan(Job(model, batch, parse_cluster(gpus), planned, by_leaven=False), run.tokens, layout)


class KnownCluster(NamedTuple):
    """The cluster of a recipe, such as ``64xH100-80GB``, and the reason why this cluster is assumed."""

    cluster: str
    reason: str


def known_cluster(recipe: Recipe) -> KnownCluster | None:
    """Return the cluster on which a recipe is probably trained, or None if it is not known.

    If ``leaven new --gpus`` chose the layout for a cluster, and the layout still has one rank per GPU, return this
    cluster. Otherwise, return the cluster of a published run with the same n_layers, d_model and d_ff, the same
    tokens (within 1%), and as many GPUs as the layout has ranks. A layout of one rank matches any number of GPUs.
    """
    # A recipe has no key for a cluster. ``leaven new --gpus`` writes it only into the reason for the layout, as the
    # message "reason" of [cluster] in catalogue/messages.toml.
    if planned_for := re.search(r"fits (\S+):", recipe.why.get("layout.dp", "")):
        with suppress(InputError):
            cluster = parse_cluster(planned_for[1])
            if cluster.gpus == recipe.layout.ranks:
                return KnownCluster(str(cluster), f"the layout of {recipe.name} was chosen for {cluster}")
    model = recipe.model
    for run in load_runs():
        arch, used = run.arch, run.hardware
        shape = (arch.n_layers, arch.d_model, arch.d_ff) == (model.n_layers, model.d_model, model.d_ff)
        if shape and run.tokens and abs(recipe.data.tokens / run.tokens - 1) < 0.01 and used and used.count:
            with suppress(InputError):  # accelerators that the planner does not know
                cluster = parse_cluster(f"{used.count}x{used.accelerator}")
                if recipe.layout.ranks in (1, cluster.gpus):
                    return KnownCluster(str(cluster), f"{run.id} was trained on {cluster}")
    return None


def _sequences(batch_tokens: int, seq_len: int) -> int:
    """Return the sequences in a published batch. A fraction such as 1,953.1 becomes a round number near it: 2,048."""
    count = batch_tokens / seq_len
    if count == int(count):
        return int(count)
    near = [round(count / 2**n) * 2**n for n in range(20, -1, -1)]
    return next((sequences for sequences in near if abs(sequences / count - 1) <= 0.05), max(round(count), 1))


def published_blueprint(arch: PublishedArchitecture, seq_len: int) -> Blueprint:
    """Return a published architecture as a blueprint, with full attention. Raise InputError if a size is unknown."""
    d, gain = _known(arch, "d_model"), _gains(arch)
    layers = _layer_widths(arch)
    blocks = {layer: _block(arch, layer) for layer in dict.fromkeys(layers)}
    return Blueprint(
        seq_len,
        d,
        arch.vocab_padded or _known(arch, "vocab_size"),
        tuple(blocks[layer] for layer in layers),
        _known(arch, "tied_embeddings"),
        positions=seq_len * d if arch.positional == "learned" else 0,
        embedding_norm=arch.embedding_norm,
        embedding_vectors=d * gain if arch.embedding_norm else 0,
        final_vectors=d * gain,
    )


def _known(arch: PublishedArchitecture, name: str) -> Any:
    value = getattr(arch, name)
    if value is None:
        raise InputError(f"the shape is not published in full: {name} is not known; plan a run with a complete shape")
    return value


def _layer_widths(arch: PublishedArchitecture) -> list[LayerWidths]:
    if arch.layerwise_scaling is not None:
        return _scaled_widths(arch, arch.layerwise_scaling)
    n_layers, n_heads = _known(arch, "n_layers"), _known(arch, "n_heads")
    n_kv_heads = n_heads if arch.kv_lora_rank is not None else _known(arch, "n_kv_heads")
    n_dense = n_layers if arch.n_experts is None else (arch.n_dense_layers or 0)
    dense = [LayerWidths(n_heads, n_kv_heads, _known(arch, "d_ff"))] * n_dense if n_dense else []
    return dense + [LayerWidths(n_heads, n_kv_heads, None)] * (n_layers - n_dense)


def _scaled_widths(arch: PublishedArchitecture, scaling: LayerwiseScaling) -> list[LayerWidths]:
    """Return the layer widths of OpenELM, as in general_gpt.py of apple/corenet."""
    n_layers, d, d_head = _known(arch, "n_layers"), _known(arch, "d_model"), _known(arch, "d_head")

    def width(ends: tuple[float, float], layer: int, divisor: int) -> int:
        """Return a layer's width, a multiple of ``divisor``. ``ends``: width / d_model of first and last layer."""
        first, last = ends
        exact = round(first + (last - first) * layer / (n_layers - 1), 2) * d
        rounded = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        return rounded + divisor if rounded < 0.9 * exact else rounded

    widths = []
    for layer in range(n_layers):
        n_heads = width(scaling.qkv_multipliers, layer, d_head * scaling.gqa_groups) // d_head
        d_ff = width(scaling.ffn_multipliers, layer, scaling.ffn_divisor)
        widths.append(LayerWidths(n_heads, n_heads // scaling.gqa_groups, d_ff))
    return widths


def _gains(arch: PublishedArchitecture) -> int:
    """Return the number of parameters that a norm has per channel: 0, 1 (gain) or 2 (gain and bias)."""
    bias = arch.bias if arch.norm_bias is None else arch.norm_bias
    return (1 + (_known(arch, "norm") == "layernorm" and bool(bias))) if arch.norm_affine else 0


def _block(arch: PublishedArchitecture, layer: LayerWidths) -> BlockTable:
    heads, kv_heads, d_ff = layer
    d, gain, gated, qk_norm = arch.d_model or 0, _gains(arch), _known(arch, "gated"), _known(arch, "qk_norm")
    bias = bool(arch.bias)
    gains, split_gains = 2 * d * gain, 0
    if (rank := arch.kv_lora_rank) is not None:
        matmuls, core = _latent(arch, heads, rank)
        gains += (rank + (arch.q_lora_rank or 0)) * gain
    else:
        head = arch.d_head or d // heads
        qkv_bias = bias if arch.qkv_bias is None else arch.qkv_bias
        matmuls = attention_rows(d, heads, kv_heads, head, bias=bias, qkv_bias=qkv_bias)
        core = Core(heads, kv_heads, head, head, alibi=arch.positional == "alibi")
        if arch.positional == "relative":  # Transformer-XL projects the encoding of each distance
            matmuls.append(Matmul("attention.distance", d, d, "column"))
        if qk_norm and arch.qk_norm_width == "head":
            gains += 2 * head * gain
        elif qk_norm:
            split_gains = (heads + kv_heads) * head * gain
    if d_ff is not None:
        matmuls += mlp_rows("mlp", d, d_ff, gated=gated, bias=bias)
    else:
        width, routed, passed = (_known(arch, name) for name in ("d_expert", "n_experts", "experts_per_token"))
        matmuls += expert_rows(d, width, (routed, passed), arch.n_shared_experts or 0, gated=gated)
    activation = arch.activation or ("swiglu" if gated else "gelu")
    return BlockTable(tuple(matmuls), core, gains, split_gains, activation, qk_norm=qk_norm)


def _latent(arch: PublishedArchitecture, heads: int, rank: int) -> tuple[list[Matmul], Core]:
    """Return the matrix products and the core of multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    d, queries = arch.d_model or 0, arch.q_lora_rank
    nope, rope, value = (_known(arch, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rows = [Matmul("attention.query", queries or d, heads * (nope + rope), "column")]
    # "none": as in Megatron, every tensor-parallel rank stores projections to a latent in full.
    if queries is not None:
        rows.insert(0, Matmul("attention.query_latent", d, queries, "none"))
    rows += [
        Matmul("attention.latent", d, rank + rope, "none"),
        Matmul("attention.key_value", rank, heads * (nope + value), "column"),
        Matmul("attention.out", heads * value, d, "row"),
    ]
    return rows, Core(heads, heads, nope + rope, value)
