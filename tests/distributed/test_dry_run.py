"""The planner against the dry run, and the dry run against real processes."""

import json
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.pool import Pool
from tests.distributed.test_large import LLAMA_70B
from torch import Tensor

from leaven.distributed.process_group import join_process_group
from leaven.documents.checks import MemoryCheckRow
from leaven.errors import InputError
from leaven.planning.memory import stage_memory
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.verification.allocation_tracker import AllocationTracker
from leaven.verification.dry_run import NoText, StepMemory, dry_run, two_steps
from leaven.verification.memory import LIMITS, arrangement, compare, ranks_to_check, rehearsal, tensors, with_layout

pytestmark = pytest.mark.xdist_group("ranks")  # the worker that has imported torch for its processes

SMALL: dict[str, Any] = {
    "model.vocab_size": 1024,
    "model.n_layers": 4,
    "model.d_model": 256,
    "model.n_heads": 4,
    "model.n_kv_heads": 4,
    "model.d_head": 64,
    "model.d_ff": 704,
    "model.seq_len": 256,
    "batch.tokens": 256 * 64,
    "data.tokens": 256 * 64 * 8,
    "batch.micro_batch": 2,
    "precision.compute": "bf16",
}

FEW = {"batch.tokens": 256 * 16, "data.tokens": 256 * 16 * 8}  # for real steps of experts


def taken(recipe: Recipe) -> StepMemory:
    """Return the memory of a step in a process of a real run, measured with the tracker of the dry run."""
    with join_process_group(recipe.layout, torch.device("cpu")) as group, AllocationTracker(Tensor) as tracker:
        training = Training(recipe, NoText(recipe.model.vocab_size), device="cpu", group=group)  # type: ignore[arg-type]
        return two_steps(training, tracker, training.step)


EXPERTS: dict[str, Any] = {"number": 8, "active": 2, "d_expert": 352, "shared": 1, "dense_layers": 1}
# Every expert is active, so their real load is even, as in a dry run.
ALL_ACTIVE = FEW | {
    "model.experts": EXPERTS | {"number": 4, "active": 4, "balance": "none", "dense_layers": 0},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param("tp=1", {}, marks=pytest.mark.slow),
        pytest.param("tp=2,recompute=full", {}, marks=pytest.mark.slow),
        pytest.param("pp=2", {}, marks=pytest.mark.slow),
        ("dp=2,zero=3", {}),
        pytest.param("dp=2,tp=2,pp=2,zero=1", {}, marks=pytest.mark.slow),
        ("dp=2,ep=2", ALL_ACTIVE),
    ],
)
def test_a_dry_run_finds_the_memory_of_real_processes(
    layout: str, model: dict[str, Any], ranks: Pool, tiny: Recipe
) -> None:
    recipe = rehearsal(with_layout(tiny.replace(SMALL | {"model.n_layers": 1 + ("pp" in layout)} | model), layout))
    rank = recipe.layout.ranks - 1
    real, dry = ranks(recipe.layout.ranks, taken, recipe)[rank], fresh(recipe, rank, "cpu")
    assert dry.stays.total() == pytest.approx(real.stays.total(), rel=LIMITS["between steps"])
    assert dry.peak.total() == pytest.approx(real.peak.total(), rel=LIMITS["peak"])
    # Real collectives have buffers of their own, so the peak may be at another moment.
    assert dry.peak["logits"] == pytest.approx(real.peak["logits"], rel=LIMITS["peak"])


def fresh(recipe: Recipe, rank: int, device: str) -> StepMemory:
    """Return a dry run in a new process: torch remembers meshes, so a process can be one rank of one layout only."""
    pool = Pool()
    try:
        return pool(1, dry_run, recipe, rank, device)[0]  # type: ignore[no-any-return]
    finally:
        pool.close()


class FreshPool(nullcontext[Any]):
    """Stands in for the WorkerPool of `leaven check memory`, whose processes import torch anew."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> "FreshPool":
        return self

    def submit(self, function: Any, recipe: Recipe, rank: int) -> "Future[StepMemory]":
        assert function is dry_run
        future: Future[StepMemory] = Future()
        future.set_result(fresh(recipe, rank, "cuda"))
        return future


def compared(recipe: Recipe) -> list[MemoryCheckRow]:
    """Return the rows of the first, second and last stage. Each dry run has its own process."""
    short = rehearsal(recipe)
    layout = short.layout
    rows = []
    for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
        rank = stage * layout.ranks // layout.pp
        found = fresh(short, rank, "cuda")
        rows += compare(rank, stage, stage_memory(recipe.model, arrangement(short), stage, tensors(recipe)), found)
    return [row for row in rows if row.passed is not None]


MANY = {"number": 16, "active": 4, "d_expert": 176, "router": "sigmoid"}
MIXED = {"model.n_layers": 3, "model.experts": EXPERTS}
TWO = {"model.n_layers": 2}
LONG = {"model.seq_len": 2048, "batch.tokens": 2048 * 16, "data.tokens": 2048 * 64}  # masks are a large part
SOFTCAPS = {"model.attention_softcap": 50.0, "model.logit_softcap": 30.0}
FP32 = {  # a model of 127 k parameters, whose states are smaller than its activations
    "model.vocab_size": 512, "model.n_layers": 2, "model.d_model": 64, "model.d_head": 16, "model.d_ff": 160,
    "model.seq_len": 128, "batch.tokens": 128 * 16, "data.tokens": 128 * 64, "precision.compute": "fp32",
    "model.qk_norm": True, "model.tied_embeddings": True,
}  # fmt: skip
WIDE_FP32 = FP32 | {"model.d_model": 512, "model.d_head": 128, "model.d_ff": 1536}  # its states are larger
# With few blocks, ZeRO 3 prefetches none at the peak of memory, and the planner is too high: by 5.1% with two blocks,
# and by 7.4% with three blocks with experts.
QUICK: list[tuple[str, dict[str, Any]]] = [
    ("dp=8,zero=3", {"model.n_layers": 3}),
    ("tp=2,recompute=full", TWO | {"model.n_kv_heads": 2}),
    ("pp=2", {"model.tied_embeddings": True}),
    ("dp=8,zero=2,mbs=2", TWO | {"hyperparameters.optimizer": "muon"}),
    ("dp=8,ep=4,zero=1", MIXED),
    ("dp=8,zero=1,mbs=2", FP32),
    ("tp=1", TWO | {"model.norm_placement": "output", "model.qk_norm_whole": True, "model.parallel_branches": True}),
    ("tp=1", TWO | {"model.norm_placement": "sandwich", "model.window": 32, **SOFTCAPS}),
    ("tp=1,mbs=2", TWO | LONG | {"data.documents": "isolated"}),
]
# For `make test-slow`: these have no feature that the quick cases or tests/planning/test_memory.py lack.
SLOW: list[tuple[str, dict[str, Any]]] = [
    ("tp=1", TWO),
    ("tp=1", MIXED),
    ("tp=1,recompute=full", TWO),
    ("dp=8", TWO),
    ("dp=8,zero=1", TWO),
    ("dp=8,zero=2", TWO),
    ("tp=2", TWO | {"model.n_kv_heads": 2}),
    ("pp=2,schedule=gpipe,recompute=full", {"batch.tokens": 256 * 8}),
    ("tp=1,mbs=4", MIXED | {"model.experts": MANY}),
    ("tp=1,recompute=full", MIXED),
    ("dp=8,zero=1", MIXED),
    ("dp=8,zero=3", MIXED | {"model.n_layers": 6}),
    ("tp=2", MIXED),
    ("pp=2", MIXED | {"model.n_layers": 4}),
    ("dp=4,tp=2,ep=2,zero=1", MIXED),
    ("dp=8,zero=2,mbs=2", FP32),
    ("dp=8,zero=1,mbs=1", FP32),
    ("dp=8,zero=3,mbs=2", FP32),
    ("tp=1,mbs=16", FP32),
    ("tp=1,mbs=16", WIDE_FP32),
    ("tp=2,mbs=2", WIDE_FP32 | {"model.n_kv_heads": 2}),
    ("pp=2,mbs=8", WIDE_FP32),
    ("tp=1,mbs=2", TWO | LONG | {"model.window": 64, "model.global_every": 2, "data.documents": "isolated"}),
    ("tp=1,mbs=1,recompute=full", TWO | LONG | {"model.positions": "alibi"}),
    ("tp=2,mbs=1", TWO | LONG | {"model.n_kv_heads": 2} | {"model.positions": "alibi", "data.documents": "isolated"}),
    ("tp=8,pp=8,dp=8,zero=1", LLAMA_70B | {"model.n_layers": 80}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "model"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_planner_predicts_the_dry_run(layout: str, model: dict[str, Any], tiny: Recipe) -> None:
    for row in compared(with_layout(tiny.replace(SMALL | model), layout)):
        assert row.passed, row


OUTSIDE = {
    "pp=4,schedule=zero-bubble": (8, "what the second half of a backward pass needs is not counted"),
    "pp=2,schedule=interleaved,stages_per_rank=2": (
        4,
        "activations in transit to a small last stage are not counted",
    ),
    "dp=2,tp=2,pp=2,zero=3": (4, "buffers of gradients are counted together with activations that are freed by then"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "layers"),
    [pytest.param(name, n, marks=pytest.mark.xfail(strict=True, reason=why)) for name, (n, why) in OUTSIDE.items()],
)
def test_layouts_that_the_planner_predicts_wrongly(layout: str, layers: int, tiny: Recipe) -> None:
    rows = compared(with_layout(tiny.replace(SMALL | {"model.n_layers": layers}), layout))
    assert all(row.passed for row in rows), rows


def test_which_ranks_are_checked(tiny: Recipe) -> None:
    layout = with_layout(tiny.replace(SMALL), "dp=2,tp=2,pp=4").layout
    assert ranks_to_check(layout) == [0, 4, 12]
    assert ranks_to_check(layout, all_stages=True) == [0, 4, 8, 12]
    assert ranks_to_check(layout, [7, 3, 7]) == [3, 7]
    with pytest.raises(InputError, match="--rank 16: the layout has ranks 0 to 15"):
        ranks_to_check(layout, [16])


def test_check_memory_from_the_command_line(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text does not exist, and no step reads it."""
    from typer.testing import CliRunner  # not in the processes that import this file

    from leaven.cli import app

    monkeypatch.setattr("leaven.verification.memory.WorkerPool", FreshPool)
    before = sorted(tiny_file.parent.iterdir())
    options = ["--set", "data.source=nowhere/*.txt", "--layout", "dp=4,zero=1", "--rank", "3", "--json"]
    ran = CliRunner().invoke(app, ["check", "memory", str(tiny_file), *options])
    document = json.loads(ran.stdout)
    assert ran.exit_code == (0 if document["passed"] else 1)
    rows = {row["part"]: row for row in document["rows"]}
    assert {"between steps", "peak", "weights", "activations"} <= rows.keys()
    assert rows["peak"]["rank"] == 3
    assert rows["peak"]["passed"] == (abs(rows["peak"]["planned_gib"] / rows["peak"]["dry_gib"] - 1) <= 0.05)
    assert sorted(tiny_file.parent.iterdir()) == before
