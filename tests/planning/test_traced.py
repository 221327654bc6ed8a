"""What the kernels between products move: the factors of training codes, and the tracer that found them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.planner.models import EXPERTS
from benchmarks.traced_kernels import trace
from tests.planning.shapes import gpt
from torch import Tensor, nn

from leaven.catalogue.runs import find_run
from leaven.planning.blueprint import blueprint
from leaven.planning.hardware import find_accelerator
from leaven.planning.memory import block_kept
from leaven.planning.operators import EAGER, Work, block_operators
from leaven.planning.published import published_blueprint
from leaven.planning.traced import block_widths, summed
from leaven.planning.training_codes import LEAVEN_BF16, TRAINING_CODES, TrainingCode
from leaven.recipe.shape import ModelShape

CODES = [code for code in TRAINING_CODES.values() if code.moved]
QWEN3 = published_blueprint(EXPERTS["qwen3-235b-a22b"], 4096).blocks[-1]
DEEPSEEK = published_blueprint(find_run("deepseek-v3").arch, 4096)
TITAN, B200 = TRAINING_CODES["torchtitan-experts"], find_accelerator("B200")
WORK = Work(8192, 4096, 4096)


def test_a_block_of_qwen3_in_torchtitan() -> None:
    widths = block_widths(QWEN3, 4096, 1, split_sequence=True)
    stream, queries, keys = 4096, 64 * 128, 4 * 2 * 128
    routed, hidden = 8 * 4096, 8 * 1536
    forward = 20 * stream + 32 * queries + 14 * keys + 10 * stream + 32 * routed + 10 * hidden
    assert summed(widths, TITAN.moved)[0] == forward
    saved = 8 * stream + 10 * queries + keys + 6 * routed + 8 * hidden
    assert summed(widths, TITAN.saved) == (saved, 3 * stream + 6 * routed)
    # Two tensor-parallel ranks split everything if they also split the sequence, and else heads and hidden widths.
    half, heads_alone = (block_widths(QWEN3, 4096, 2, split_sequence=split) for split in (True, False))
    assert summed(half, TITAN.moved)[0] == forward / 2
    assert summed(heads_alone, TITAN.moved)[0] == forward - (32 * queries + 14 * keys + 10 * hidden) / 2


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_all_factors_are_those_of_widths(code: TrainingCode) -> None:
    blocks = [QWEN3, *DEEPSEEK.blocks[::60], blueprint(gpt(1, 64, 1, 64)).blocks[0]]
    sandwich = ModelShape(
        n_layers=1, d_model=64, n_heads=2, n_kv_heads=1, d_head=32, d_ff=128, vocab_size=64, seq_len=64, qk_norm=True,
        norm_placement="sandwich",
    )  # fmt: skip
    known = {
        name
        for block in (*blocks, blueprint(sandwich).blocks[0])
        for name in block_widths(block, 64, 1, split_sequence=False)
    }
    for factors in (code.moved, code.saved):
        assert {name for name, _ in factors} <= known
    for block in (QWEN3, DEEPSEEK.blocks[0], DEEPSEEK.blocks[-1]):
        forward, backward = summed(block_widths(block, 4096, 1, split_sequence=False), code.moved)
        assert 0 < forward < backward


def test_the_kernels_between_products_take_the_time_of_their_bytes() -> None:
    operators = {each.name: each for each in block_operators(QWEN3, WORK, B200, TITAN)}
    moved = 8192 * summed(block_widths(QWEN3, 4096, 1, split_sequence=True), TITAN.moved)[0]
    assert operators["between products"].forward == moved / (8e12 * EAGER)
    assert not operators.keys() & {"norms and residuals", "activation", "sorting", "positions"}


def test_compiled_blocks_have_fused_kernels() -> None:
    compiled = replace(WORK, fused=True)
    for code, eager in ((LEAVEN_BF16, False), (TITAN, True)):  # the graph of torchtitan's block has breaks
        names = {each.name for each in block_operators(QWEN3, compiled, B200, code)}
        assert ("between products" in names) is eager


def test_torchs_grouped_product_is_slower_on_a_b200() -> None:
    (experts, fast) = (
        next(each for each in block_operators(QWEN3, WORK, B200, of) if each.name.startswith("mlp.experts"))
        for of in (TITAN, TRAINING_CODES["torchtitan"])
    )
    assert experts.forward / fast.forward == 1087 / 787


def test_selective_recomputation_keeps_what_expert_ranks_exchanged() -> None:
    one, eight = (block_kept(QWEN3, 4096, 4096, 1, ep, recompute="selective", code=TITAN).stays for ep in (1, 8))
    assert eight - one == 2 * 2 * 8 * 4096


def test_the_tracer_counts_bytes_of_a_module() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(x) * (x @ self.weight)

    def inputs() -> tuple[Tensor]:
        return (torch.empty(64, 256, dtype=torch.bfloat16, requires_grad=True),)

    found = trace(Gate, inputs)
    each = 2 * 64 * 256  # bytes of a tensor
    # Forward: silu reads and writes, the product reads two and writes one. Backward: two products of the gate, the
    # gradient of silu, and the sum of the gradients of the input, three tensors each. Matrix products do not count.
    assert found["forward"] == 5 * each
    assert found["backward"] == 12 * each
    assert found["saved"] == 3 * each  # the input, after silu, and after the matrix product
