"""Compute the bytes that a block moves and saves outside its matrix products, from factors of a training code.

The bytes per token are the sum of width x factor over the block's widths. Each width has two pairs of factors:

- ``moved``: (forward pass, backward pass), the bytes that kernels read plus those that they write;
- ``saved``: (saved, temporary), the bytes kept for the backward pass, and the peak of temporary bytes.

benchmarks/traced_kernels.py measures them. It runs the blocks of a training code at many sizes, on fake tensors
(FakeTensorMode). Matrix products and flash attention do not count. An RMSNorm counts as one fused kernel.
"""

from leaven.planning.blueprint import BlockTable

Factors = tuple[tuple[str, tuple[float, float]], ...]


def traced(
    block: BlockTable, d_model: int, factors: Factors, *, tp: int, ep: int, split_sequence: bool
) -> tuple[float, float]:
    """Return the sum of width x first factor and the sum of width x second factor, for one block on one rank.

    ``factors``: (name of a width, (first factor, second factor)). ``tp`` ranks split heads and hidden widths. With
    ``split_sequence``, they also split the tokens of the residual stream, so its width counts as d_model / tp.
    """
    widths = _widths(block, d_model / tp if split_sequence else d_model, tp, ep)
    first = sum(widths.get(name, 0.0) * both[0] for name, both in factors)
    return first, sum(widths.get(name, 0.0) * both[1] for name, both in factors)


def _widths(block: BlockTable, stream: float, tp: int, ep: int) -> dict[str, float]:
    core, rows = block.core, {row.name: row for row in block.matmuls}
    outputs = sum(name.endswith("_out") for name in block.norms)
    found = {"stream": stream, "norms": stream * (len(block.norms) - outputs), "output_norms": stream * outputs}
    if block.dropout:
        found["dropout"] = stream
    if "attention.latent" in rows:  # multi-head latent attention
        latents = ("attention.latent", "attention.query_latent")
        found["latents"] = sum(rows[name].n for name in latents if name in rows)
        found |= {"latent_queries": core.heads * core.d_qk / tp, "latent_values": core.heads * core.d_v / tp}
    else:
        found |= {"queries": core.heads * core.d_qk / tp, "keys": core.kv_heads * (core.d_qk + core.d_v) / tp}
    if block.qk_norm:
        found["normed"] = (core.heads + core.kv_heads) * core.d_qk / tp
    for name in ("mlp", "mlp.shared"):
        if f"{name}.in" in rows:
            found["hidden" if f"{name}.gate" in rows else "plain_hidden"] = rows[f"{name}.in"].n / tp
    if "mlp.shared.in" in rows:
        found["shared"] = stream
    if "mlp.experts.in" in rows:
        experts = rows["mlp.experts.in"]
        hidden = "routed_hidden" if "mlp.experts.gate" in rows else "plain_routed_hidden"
        found |= {"experts": stream, "routed": experts.passed * stream, hidden: experts.passed * experts.n / tp}
        if ep > 1:
            found["exchanged"] = experts.passed * stream
    return found
