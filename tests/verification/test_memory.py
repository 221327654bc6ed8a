"""The planner against the dry run, and the dry run against real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.pool import Pool
from torch import Tensor

from leaven.distributed.world import joined
from leaven.planning.memory import stage_memory
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.verification.dry_run import NoText, Taken, dry_run, two_steps
from leaven.verification.ledger import Ledger
from leaven.verification.memory import LIMITS, Row, compare, looked_at, rehearsal, tensors, with_layout

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


def taken(recipe: Recipe) -> Taken:
    """In a real process among real ones, by the same ledger."""
    with joined(recipe.layout, torch.device("cpu")) as world, Ledger(Tensor) as ledger:
        training = Training(recipe, NoText(recipe.model.vocab_size), device="cpu", world=world)  # type: ignore[arg-type]
        return two_steps(training, ledger, training.step)


def rehearsed(recipe: Recipe) -> Taken:
    return dry_run(recipe, int(os.environ["RANK"]), "cpu")


@pytest.mark.parametrize(
    "layout",
    ["tp=1", "tp=2,recompute=full", "pp=2", "dp=2,zero=3", "dp=2,tp=2,pp=2,zero=1"],
)
def test_a_dry_run_finds_what_real_processes_take(layout: str, ranks: Pool, tiny: Recipe) -> None:
    recipe = rehearsal(with_layout(tiny.replace(SMALL | {"model.n_layers": 2}), layout)).recipe
    count = recipe.layout.ranks
    for real, dry in zip(ranks(count, taken, recipe), ranks(count, rehearsed, recipe), strict=True):
        assert dry.stays.total() == pytest.approx(real.stays.total(), rel=LIMITS["between steps"])
        assert dry.peak.total() == pytest.approx(real.peak.total(), rel=LIMITS["peak"])
        assert dry.peak["logits"] == real.peak["logits"]


def judged(recipe: Recipe, ranks: Pool) -> list[Row]:
    """The rows of the first, second and last stage, each in a process that is that rank."""
    subject = rehearsal(recipe)
    layout = subject.how.layout
    rows = []
    for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
        rank = stage * layout.ranks // layout.pp
        (found,) = ranks(1, dry_run, subject.recipe, rank)
        rows += compare(rank, stage, stage_memory(recipe.model, subject.how, stage, tensors(recipe)), found)
    return [row for row in rows if row.passed is not None]


GRID = [
    "tp=1",
    "tp=1,recompute=full",
    "dp=8,zero=0",
    "dp=8,zero=1",
    "dp=8,zero=2",
    "dp=8,zero=3",
    "dp=8,zero=3,recompute=full",
    "tp=2",
    "tp=4,dp=2,zero=1,recompute=full",
    "pp=4",
    "pp=4,recompute=full",
    "pp=4,dp=4,zero=2",
    "pp=4,dp=4,zero=3",
    "pp=4,schedule=gpipe",
    "pp=2,schedule=interleaved,stages_per_rank=2",
    "dp=2,tp=2,pp=2,zero=1",
    "dp=64,tp=4,pp=2,zero=1,recompute=full",
]
