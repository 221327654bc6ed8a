"""What a block keeps for its backward pass, by operator, in bytes per token.

It is what autograd needs: the inputs of products, norms and activations, the dropout masks, and what the attention
kernel reads again. With context parallelism a rank has fewer tokens; nothing else changes.
"""

from dataclasses import dataclass
from functools import cache

from leaven.planning.blueprint import BlockTable
from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode
from leaven.recipe.layout import Recompute

# Tensors of the MLP's width that its backward pass needs: before and after the activation; if gated, also the gate
# and its activation. The gradient of a rectified unit follows from its output.
_MLP_TENSORS = {"relu": 1, "gelu": 2, "squared_relu": 2, "xielu": 2, "swiglu": 4, "geglu": 4}


@dataclass(frozen=True)
class Kept:
    """Bytes per token of one block on one rank."""

    stays: float  # for every micro-batch in flight
    once: float  # while one block is recomputed
    gradients: float  # peak within one block


@cache
def operators_kept(
    block: BlockTable, d_model: int, seq_len: int, tp: int, code: TrainingCode = LEAVEN_BF16
) -> dict[str, float]:
    """Return the bytes per token that a block keeps without recomputation, by operator, on one of ``tp`` ranks.

    For a GPT with d_ff = 4h in bf16 this is s b h (10 + 24/t + 5 a s/(h t)) (Korthikanti 2022, arXiv 2205.05198,
    equation 2); with sequence parallelism all of it is divided by t (equation 4). The rows of an expert count for the
    tokens routed to it, assumed to be spread evenly; each expert that a token goes to has its own copy.
    """
    d, e, core = d_model, code.element, block.core
    stretch = tp if code.sequence_parallel else 1
    gathered = 1 if code.gathered_inputs else stretch
    q, k, v = core.heads * core.d_qk, core.kv_heads * core.d_qk, core.kv_heads * core.d_v
    rows = {row.name: row for row in block.matmuls}
    found = {
        "norm.attention": code.residual * d / stretch,
        "attention.inputs": e * d / gathered,
        "attention.query": e * q / tp,
        "attention.key": e * k / tp,
        "attention.value": e * v / tp,
        "attention.out": e * core.heads * core.d_v / tp,
    }
    # A latent is kept before its norm and after, where it is the input of a product.
    latents = sum(row.n for name, row in rows.items() if name in {"attention.latent", "attention.query_latent"})
    if latents:
        found["attention.latents"] = e * latents * (1 / stretch + 1 / gathered)
    if block.qk_norm:
        found["norm.query_key"] = e * (q + k) / tp
    if not code.flash_attention:
        # The probabilities; with dropout also their mask, and what it leaves of them.
        found["attention.core"] = core.heads * seq_len * ((2 * e + 1) if block.dropout else e) / tp
    found["norm.mlp"] = code.residual * d / stretch
    tensors = _MLP_TENSORS[block.activation]
    if "mlp.in" in rows or "shared.in" in rows:
        found["mlp.inputs"] = e * d / gathered
    for mlp in ("mlp", "shared"):
        if f"{mlp}.in" in rows:
            found[mlp] = e * tensors * rows[f"{mlp}.in"].n / tp
    if "experts.in" in rows:
        experts = rows["experts.in"]
        found["router"] = 4 * experts.stored / stretch
        found["experts.inputs"] = e * experts.passed * d / gathered
        found["experts"] = e * tensors * experts.passed * experts.n / tp
        found["experts.outputs"] = e * experts.passed * d / stretch  # their weights have gradients
    if block.dropout:
        found["dropout"] = 2 * d / stretch
    return found


@cache
def block_kept(
    block: BlockTable, d_model: int, seq_len: int, tp: int, *, recompute: Recompute, code: TrainingCode = LEAVEN_BF16
) -> Kept:
    """Return the sum of :func:`operators_kept` under a mode of recomputation."""
    by_operator = operators_kept(block, d_model, seq_len, tp, code)
    everything, core = sum(by_operator.values()), by_operator.get("attention.core", 0.0)
    stretch = tp if code.sequence_parallel else 1
    block_input = code.residual * d_model / stretch
    if recompute == "none":
        stays = everything
    elif recompute == "full":
        stays = block_input
    elif code.selective == "core":  # a flash kernel recomputes it anyway, so nothing is saved
        stays = everything - core
    else:
        stays = block_input + by_operator["attention.out"] + _every_second_product(block, tp, code)
    # Backwards through the MLP: gradients of its tensors and, gathered, of its output. Backwards through the core
    # without a flash kernel: of the scores and of the probabilities, when what the MLP kept is gone.
    e = code.element
    mlp = sum(by_operator.get(name, 0.0) for name in ("mlp", "shared", "experts", "experts.inputs"))
    widths = sum(row.n * row.passed for row in block.matmuls if row.name.endswith((".in", ".gate")))
    gradients = e * widths / tp + e * d_model
    scores = 0.0 if code.flash_attention else 2 * e * block.core.heads * seq_len / tp
    return Kept(stays, everything - stays, max(gradients, scores - mlp))


def _every_second_product(block: BlockTable, tp: int, code: TrainingCode) -> float:
    """Return bytes per token of the outputs of the first, third, ... product of a block, as torchtitan keeps them."""
    stretch = tp if code.sequence_parallel else 1
    kept = block.matmuls[::2]
    return sum(code.element * row.n * row.passed / (tp if row.split == "column" else stretch) for row in kept)
