"""A run that is saved with one layout and resumed with another has the same losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.cases import train_and_save
from tests.distributed.conftest import SingleProcess
from tests.distributed.cut_up import whole_checkpoint
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import (
    AVERAGE,
    BIASED,
    COMMON,
    FOUR_LAYERS,
    GPT,
    ISOLATED,
    MUON,
    ONE,
    RUNNING,
    SCALED,
    TIED,
    ZERO_BUBBLE,
    layout,
)

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe

ALL = layout(dp=2, tp=2, pp=2, zero=2)

# In the middle of a ramp, so that another dp also cuts another batch.
CHAINS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "2x2x2, one process, dp3": (TIED | AVERAGE, [ALL, layout(), layout(dp=3, zero=1)]),
    "one process, 2x2x2 zero3, pp2": (RUNNING | SCALED, [layout(), ALL | {"layout.zero": 3}, layout(pp=2)]),
    "muon: dp3, 2x2x2 zero2, one process": (MUON, [layout(dp=3, zero=1), ALL, layout()]),
    "experts: 2x2x2 ep2, one process, dp4 ep2 zero3, dp3": (
        BIASED,
        [ALL | {"layout.ep": 2}, layout(), layout(dp=4, zero=3, ep=2), layout(dp=3, zero=2)],
    ),
    "pp2 zero-bubble, tp2": (FOUR_LAYERS, [layout(pp=2, **ZERO_BUBBLE), layout(tp=2)]),
    "pp4, tp4, dp2 zero3": (GPT | FOUR_LAYERS, [layout(pp=4), layout(tp=4), layout(dp=2, zero=3)]),
    "dp4 zero3 on two nodes, dp2 zero0, dp3 zero2": (
        ISOLATED,
        [layout(dp=4, zero=3, dp_replicate=2), layout(dp=2), layout(dp=3, zero=2)],
    ),
}


def follow(
    ranks: Pool,
    single_process: SingleProcess,
    tiny: Recipe,
    changes: dict[str, Any],
    chain: list[dict[str, Any]],
    folder: Path,
) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of two steps in each layout of a chain, and the result of one uninterrupted process. Each
    layout begins with the checkpoint of the layout before it."""
    changes = COMMON | ONE | changes
    losses: list[float] = []
    for number, how in enumerate(chain):
        recipe = tiny.replace(changes | how)
        tokens = prepare(recipe.data, recipe.model.vocab_size)
        work = recipe, tokens, 2, folder / str(number - 1) if number else None, folder / str(number)
        if recipe.layout.ranks == 1:
            losses += train_and_save(*work)
        else:
            losses += ranks(recipe.layout.ranks, train_and_save, *work)[0]
    return losses, single_process(tiny.replace(changes), 2 * len(chain) - 1, "float64")


QUICK = {"experts: 2x2x2 ep2, one process, dp4 ep2 zero3, dp3"}  # `make test-slow` runs all


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "chain"),
    [pytest.param(*CHAINS[name], id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CHAINS],
)
def test_any_layout_resumes_from_any_other(
    changes: dict[str, Any],
    chain: list[dict[str, Any]],
    ranks: Pool,
    single_process: SingleProcess,
    tiny: Recipe,
    tmp_path: Path,
) -> None:
    losses, expected = follow(ranks, single_process, tiny, changes, chain, tmp_path)
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-12)
    end = whole_checkpoint(tmp_path / str(len(chain) - 1))
    for (kind, name), average in expected["averages"].items():
        torch.testing.assert_close(end.optimizer[f"{kind}.{name}"], average, rtol=1e-9, atol=1e-11)
