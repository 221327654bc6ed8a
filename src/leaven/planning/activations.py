"""Compute the size of the activations that a transformer block saves for its backward pass, in bytes per token.

Autograd saves the inputs of matrix products, norms and activation functions, the dropout masks, and the tensors that
the backward pass of attention reads. Context parallelism gives a rank fewer tokens, but does not change the bytes per
token.
"""

from dataclasses import dataclass
from functools import cache

from leaven.planning.blueprint import BlockTable
from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode
from leaven.recipe.layout import Recompute

# Number of saved tensors of the MLP's width: input and output of the activation function, and in a gated MLP also the
# gate before and after its activation. The backward pass of ReLU needs only the output.
_MLP_TENSORS = {"relu": 1, "gelu": 2, "squared_relu": 2, "xielu": 2, "swiglu": 4, "geglu": 4}


@dataclass(frozen=True)
class Kept:
    """The activation memory of one block on one rank, in bytes per token."""

    stays: float  # activations saved until the backward pass of the micro-batch
    once: float  # activations that exist only while the block is recomputed
    gradients: float  # peak memory of the gradients of activations within the block


@cache
def operators_kept(
    block: BlockTable, d_model: int, seq_len: int, tp: int, code: TrainingCode = LEAVEN_BF16
) -> dict[str, float]:
    """Return the bytes per token that each operator of a block saves on one tensor-parallel rank.

    Nothing is recomputed in the backward pass.

    For b sequences of length s, width h, a heads, d_ff = 4h, t tensor-parallel ranks and bf16, a GPT block with
    dropout and without a flash kernel saves s b h (10 + 24/t + 5 a s/(h t)) bytes (Korthikanti 2022, arXiv
    2205.05198, equation 2). With sequence parallelism the whole sum is divided by t (equation 4). Tokens are assumed
    to be spread evenly over experts. A token is stored once for each expert that it is sent to.
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
    # The latents of multi-head latent attention are saved before and after their norm.
    latents = sum(row.n for name, row in rows.items() if name in {"attention.latent", "attention.query_latent"})
    if latents:
        found["attention.latents"] = e * latents * (1 / stretch + 1 / gathered)
    if block.qk_norm:
        found["norm.query_key"] = e * (q + k) / tp
    if not code.flash_attention:
        # The probabilities; with dropout also the mask and the probabilities after dropout.
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
        found["experts.outputs"] = e * experts.passed * d / stretch  # for the gradients of the router's weights
    if block.dropout:
        found["dropout"] = 2 * d / stretch
    return found


@cache
def block_kept(
    block: BlockTable, d_model: int, seq_len: int, tp: int, *, recompute: Recompute, code: TrainingCode = LEAVEN_BF16
) -> Kept:
    """Return the activation memory of a block under the given recomputation, summed over its operators."""
    by_operator = operators_kept(block, d_model, seq_len, tp, code)
    everything, core = sum(by_operator.values()), by_operator.get("attention.core", 0.0)
    stretch = tp if code.sequence_parallel else 1
    block_input = code.residual * d_model / stretch
    if recompute == "none":
        stays = everything
    elif recompute == "full":
        stays = block_input
    elif code.selective == "core":  # 0 with a flash kernel, which saves no scores
        stays = everything - core
    else:
        # torchtitan saves the outputs of every second matrix product.
        every_second = sum(
            code.element * row.n * row.passed / (tp if row.split == "column" else stretch)
            for row in block.matmuls[::2]
        )
        stays = block_input + by_operator["attention.out"] + every_second
    # The peak is in the MLP (gradients of its tensors and of its gathered output) or, without a flash kernel, in
    # attention (gradients of scores and probabilities). At that time, the saved tensors of the MLP are already free.
    e = code.element
    mlp = sum(by_operator.get(name, 0.0) for name in ("mlp", "shared", "experts", "experts.inputs"))
    widths = sum(row.n * row.passed for row in block.matmuls if row.name.endswith((".in", ".gate")))
    gradients = e * widths / tp + e * d_model
    scores = 0.0 if code.flash_attention else 2 * e * block.core.heads * seq_len / tp
    return Kept(stays, everything - stays, max(gradients, scores - mlp))
