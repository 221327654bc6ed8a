"""What the kernels between products move: the factors of training codes, and the tracer that found them."""

import torch
import torch.nn.functional as F
from benchmarks.planner.models import EXPERTS
from benchmarks.traced_kernels import trace
from torch import Tensor, nn

from leaven.catalogue.runs import find_run
from leaven.planning.accelerators import accelerators
from leaven.planning.memory import block_kept
from leaven.planning.operators import Work, block_operators
from leaven.planning.published import published_blueprint
from leaven.planning.traced import traced_bytes
from leaven.planning.training_codes import TRAINING_CODES

CODES = [code for code in TRAINING_CODES.values() if code.traced]
QWEN3 = published_blueprint(EXPERTS["qwen3-235b-a22b"], 4096).blocks[-1]
DEEPSEEK = published_blueprint(find_run("deepseek-v3").arch, 4096)


def test_a_block_of_qwen3_in_torchtitan() -> None:
    titan = dict(TRAINING_CODES["torchtitan-experts"].traced)
    found = traced_bytes(QWEN3, 4096, 1, titan)
    stream, queries, keys = 4096, 64 * 128, 4 * 2 * 128
    routed, hidden = 8 * 4096, 8 * 1536
    assert found.forward == 20 * stream + 32 * queries + 14 * keys + 10 * stream + 32 * routed + 10 * hidden
    assert found.saved == 8 * stream + 10 * queries + keys + 6 * routed + 8 * hidden
    half = traced_bytes(QWEN3, 4096, 2, titan)  # tensor parallelism splits heads and hidden widths alone
    assert found.forward - half.forward == (32 * queries + 14 * keys + 10 * hidden) / 2


def test_every_traced_code_has_the_factors_of_every_block() -> None:
    assert {code.name for code in CODES} == {"torchtitan-experts", "torchtitan-deepep", "prime-rl"}
    for code in CODES:
        for block, d_model in ((QWEN3, 4096), (DEEPSEEK.blocks[0], 7168), (DEEPSEEK.blocks[-1], 7168)):
            found = traced_bytes(block, d_model, 1, dict(code.traced))
            assert 0 < found.forward < found.backward
            assert 0 < found.temporary < found.saved


def test_the_kernels_between_products_take_the_time_of_their_bytes() -> None:
    code, b200 = TRAINING_CODES["torchtitan-experts"], accelerators()["B200-SXM-180GB"]
    operators = {each.name: each for each in block_operators(QWEN3, Work(8192, 4096, 4096), b200, code)}
    moved = 8192 * traced_bytes(QWEN3, 4096, 1, dict(code.traced)).forward
    assert operators["between products"].forward == moved / (8e12 * code.traced_share)
    assert not operators.keys() & {"norms and residuals", "activation", "sorting", "positions"}


def test_torchs_grouped_product_is_slower_on_a_b200() -> None:
    code, b200 = TRAINING_CODES["torchtitan-experts"], accelerators()["B200-SXM-180GB"]
    work = Work(8192, 4096, 4096)
    (experts, fast) = (
        next(each for each in block_operators(QWEN3, work, b200, of) if each.name.startswith("mlp.experts"))
        for of in (code, TRAINING_CODES["torchtitan"])
    )
    assert experts.forward / fast.forward == 1087 / 787


def test_selective_recomputation_keeps_what_expert_ranks_exchanged() -> None:
    code = TRAINING_CODES["torchtitan-experts"]
    one, eight = (block_kept(QWEN3, 4096, 4096, 1, ep, recompute="selective", code=code).stays for ep in (1, 8))
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
