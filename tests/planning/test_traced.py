"""What the kernels between products move: the factors of training codes, and the tracer that found them."""

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.planner import stacks
from benchmarks.planner.judge import judge
from benchmarks.planner.models import EXPERTS
from benchmarks.planner.tables import read
from benchmarks.planner_accuracy import LATER_TABLES
from benchmarks.traced_kernels import SEQ_LEN, SEQUENCES, leaven_block, trace
from torch import Tensor, nn

from leaven.catalogue.runs import find_run
from leaven.planning.accelerators import Accelerator
from leaven.planning.blueprint import BlockTable, blueprint
from leaven.planning.hardware import find_accelerator
from leaven.planning.memory import block_kept
from leaven.planning.operators import Operator, Work, block_operators
from leaven.planning.published import published_blueprint
from leaven.planning.timing import _recomputed
from leaven.planning.traced import _widths, traced
from leaven.planning.training_codes import LEAVEN_BF16, TRAINING_CODES, TrainingCode
from leaven.recipe.shape import ModelShape

OUTPUTS = ModelShape(
    n_layers=1, d_model=4096, n_heads=32, n_kv_heads=8, d_head=128, d_ff=8192, vocab_size=512, seq_len=4096,
    qk_norm=True, norm_placement="sandwich",
)  # fmt: skip


def replaced(shape: ModelShape, **values: Any) -> ModelShape:
    return ModelShape.model_validate(shape.model_dump() | values)


CODES = [code for code in TRAINING_CODES.values() if code.moved]
QWEN3 = published_blueprint(EXPERTS["qwen3-235b-a22b"], 4096).blocks[-1]
DEEPSEEK = published_blueprint(find_run("deepseek-v3").arch, 4096).blocks[-1]
TITAN, B200, WORK = TRAINING_CODES["torchtitan-experts"], find_accelerator("B200"), Work(8192, 4096, 4096)
ONE: dict[str, Any] = {"tp": 1, "ep": 1, "split_sequence": True}


def test_a_block_of_qwen3_in_torchtitan() -> None:
    stream, queries, keys = 4096, 64 * 128, 4 * 2 * 128
    routed, hidden = 8 * 4096, 8 * 1536
    forward = 20 * stream + 32 * queries + 14 * keys + 10 * stream + 32 * routed + 10 * hidden
    assert traced(QWEN3, 4096, TITAN.moved, **ONE)[0] == forward
    saved = 8 * stream + 10 * queries + keys + 6 * routed + 8 * hidden
    assert traced(QWEN3, 4096, TITAN.saved, **ONE) == (saved, 3 * stream + 6 * routed)
    # Two tensor-parallel ranks split everything if they also split the sequence, and else heads and hidden widths.
    half, heads = (traced(QWEN3, 4096, TITAN.moved, tp=2, ep=1, split_sequence=split)[0] for split in (True, False))
    assert half == forward / 2
    assert heads == forward - (32 * queries + 14 * keys + 10 * hidden) / 2


def test_a_block_of_deepseek_in_torchtitan() -> None:
    queries, values, latents, routed, hidden = 128 * 192, 128 * 128, 512 + 64 + 1536, 8 * 7168, 8 * 2048
    found = traced(DEEPSEEK, 7168, TITAN.moved, **ONE)[1]
    of_attention = 42 * 7168 + 14 * queries + 4 * values + 7 * latents
    assert found == of_attention + 20 * 7168 + 12 * 7168 + 18 * 2048 + 50 * routed + 18 * hidden


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_every_factor_is_used(code: TrainingCode) -> None:
    ungated = replace(QWEN3, matmuls=tuple(row for row in QWEN3.matmuls if not row.name.endswith(".gate")))
    known = set(_widths(ungated, 64, 1, 2))
    for shape in (OUTPUTS, replaced(OUTPUTS, activation="gelu", dropout=0.1)):
        known |= set(_widths(blueprint(shape).blocks[0], 64, 1, 1))
    known |= {name for block in (QWEN3, DEEPSEEK) for name in _widths(block, 64, 1, 2)}
    for factors in (code.moved, code.saved):
        assert {name for name, _ in factors} <= known


@pytest.mark.long
@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
def test_leavens_own_blocks_move_what_the_planner_says(fp32: bool) -> None:
    code, draw = TRAINING_CODES["leaven-fp32" if fp32 else "leaven-bf16"], random.Random(1)
    for _ in range(6):
        widths, found = leaven_block(draw, fp32)
        for position, kind in enumerate(("forward", "backward")):
            planned = sum(widths.get(name, 0.0) * both[position] for name, both in code.moved)
            assert planned == pytest.approx(found[kind] / (SEQUENCES * SEQ_LEN), rel=0.1), (widths, kind)


def names(block: BlockTable, work: Work, code: TrainingCode, gpu: Accelerator = B200) -> set[str]:
    return {each.name for each in block_operators(block, work, gpu, code)}


def test_which_kernels_run_one_by_one() -> None:
    dense, compiled = blueprint(OUTPUTS).blocks[0], replace(WORK, fused=True)
    assert "between products" in names(dense, WORK, LEAVEN_BF16)
    assert "between products" in names(blueprint(replaced(OUTPUTS, dropout=0.1)).blocks[0], WORK, LEAVEN_BF16)
    assert "between products" not in names(dense, compiled, LEAVEN_BF16)
    assert "between products" not in names(dense, WORK, LEAVEN_BF16, replace(B200, name="cpu"))
    # Of a block with experts leaven compiles attention alone, torchtitan in effect nothing.
    operators = [
        next(each.forward for each in block_operators(QWEN3, work, B200, code) if each.name == "between products")
        for code in (LEAVEN_BF16, TITAN)
        for work in (WORK, compiled)
    ]
    attention = 16 * 64 * 128 + 6 * 4 * 2 * 128 + 20 * 68 * 128
    assert operators[0] - operators[1] == pytest.approx(8192 * attention / (8e12 * LEAVEN_BF16.eager))
    assert operators[2] == operators[3]


def test_the_kernels_between_products_take_the_time_of_their_bytes() -> None:
    operators = {each.name: each for each in block_operators(QWEN3, WORK, B200, TITAN)}
    assert operators["between products"].forward == 8192 * traced(QWEN3, 4096, TITAN.moved, **ONE)[0] / (
        8e12 * TITAN.eager
    )
    assert not operators.keys() & {"norms and residuals", "activation", "sorting", "positions"}


def test_ranks_that_exchange_tokens_sort_them_again() -> None:
    one, eight = (traced(QWEN3, 4096, LEAVEN_BF16.moved, tp=1, ep=ep, split_sequence=True)[0] for ep in (1, 8))
    assert eight - one == 8 * 8 * 4096


def test_torchs_grouped_product_is_slower_on_a_b200() -> None:
    (experts, fast) = (
        next(each for each in block_operators(QWEN3, WORK, B200, of) if each.name.startswith("mlp.experts"))
        for of in (TITAN, TRAINING_CODES["torchtitan"])
    )
    assert experts.forward / fast.forward == 1087 / 787


def test_selective_recomputation_keeps_what_expert_ranks_exchanged() -> None:
    one, eight = (block_kept(QWEN3, 4096, 4096, 1, ep, recompute="selective", code=TITAN).stays for ep in (1, 8))
    assert eight - one == 2 * 2 * 8 * 4096


def test_selective_recomputation_repeats_products_of_experts() -> None:
    operators = tuple(
        Operator(name, seconds, 2 * seconds, seconds) for name, seconds in (("mlp.in", 2.0), ("mlp.experts.in", 5.0))
    )
    assert _recomputed(operators, 7.0, "selective", TITAN) == 7.0 - 2.0 / 2


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


UNCOUNTED = ("_unsure", "_near", "_natural", "_fp8")
TRACED_ROWS = [  # rows of blind tests: which, how many, mean error with eager = 0.38 and no host_wait, and today
    ("fitted", 37, 0.156, 0.104),
    ("trl", 9, 0.565, 0.520),
    ("uncounted", 56, 0.368, 0.3065),
]


def kind(table: str) -> str:
    if table.endswith(UNCOUNTED):
        return "uncounted"
    return "trl" if "trl" in table else "fitted"


@pytest.mark.long
@pytest.mark.parametrize(("which", "rows", "before", "today"), TRACED_ROWS)
def test_the_errors_that_the_accuracy_page_states(
    which: str, rows: int, before: float, today: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = {name for name, code in TRAINING_CODES.items() if code.host_wait}
    tables = [table for file in LATER_TABLES for table in read(file) if kind(table.id) == which]

    def errors() -> list[float]:
        points = [point for table in tables for point in judge(table).points if point.kind == "time" and point.case]
        return [abs(each.error) for each in points if each.case and each.case.stack.code.name in waiting]

    assert len(errors()) == rows
    assert mean(errors()) == pytest.approx(today, abs=0.0005)
    older = {name: replace(TRAINING_CODES[name], host_wait=0.0, eager=0.38) for name in waiting}
    monkeypatch.setattr(stacks, "TRAINING_CODES", {**TRAINING_CODES, **older})
    assert mean(errors()) == pytest.approx(before, abs=0.0005)
