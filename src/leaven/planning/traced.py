"""Compute what the kernels between the matrix products of a block move and save, from a trace of a training code.

The blocks of a training code were run on tensors without memory, at several sizes (benchmarks/traced_kernels.py). The
bytes that its elementwise kernels read and write, and those that autograd saves, are sums over a few widths of the
block. The factors, in bytes per element and token, are ``traced`` of a training code. Fused kernels are traced as
they are; matrix products and flash attention are not counted.
"""

from collections.abc import Mapping
from typing import NamedTuple

from leaven.planning.blueprint import BlockTable

# Share of the memory bandwidth that a kernel reaches if it only reads and writes.
STREAMED = 0.85


class Traced(NamedTuple):
    """Bytes per token, or per token and element of a width."""

    forward: float  # read and written in a forward pass
    backward: float
    saved: float  # saved for the backward pass
    temporary: float  # peak beside what is saved

    def plus(self, other: "Traced", factor: float) -> "Traced":
        return Traced(*(mine + factor * yours for mine, yours in zip(self, other, strict=True)))


def traced_bytes(block: BlockTable, d_model: int, tp: int, traced: Mapping[str, Traced]) -> Traced:
    """Return the bytes per token of a block on one of ``tp`` ranks, which split all widths but those of d_model."""
    found = Traced(0.0, 0.0, 0.0, 0.0)
    for name, width in _widths(block, d_model, tp).items():
        found = found.plus(traced[name], width)
    return found


def _widths(block: BlockTable, d_model: int, tp: int) -> dict[str, float]:
    """Return the widths to which the traffic of a block is proportional, on one rank."""
    core, rows = block.core, {row.name: row for row in block.matmuls}
    found: dict[str, float] = {"stream": d_model}
    if "attention.latent" in rows:  # multi-head latent attention
        latents = ("attention.latent", "attention.query_latent")
        found["latents"] = sum(rows[name].n for name in latents if name in rows)
        found |= {"latent_queries": core.heads * core.d_qk / tp, "latent_values": core.heads * core.d_v / tp}
    else:
        found |= {"queries": core.heads * core.d_qk / tp, "keys": core.kv_heads * (core.d_qk + core.d_v) / tp}
    if "mlp.in" in rows:
        found["hidden"] = rows["mlp.in"].n / tp
    if "mlp.shared.in" in rows:
        found |= {"shared": d_model, "hidden": rows["mlp.shared.in"].n / tp}
    if "mlp.experts.in" in rows:
        experts = rows["mlp.experts.in"]
        found |= {"experts": d_model, "routed": experts.passed * d_model}
        found["routed_hidden"] = experts.passed * experts.n / tp
    return found
