"""The pool of ranks does not leak threads."""

import os

import pytest
from tests.distributed.cases import train
from tests.distributed.pool import Pool

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_a_case_leaves_no_threads(ranks: Pool, tiny: Recipe) -> None:
    recipe = tiny.replace({"model.n_kv_heads": 2, "layout.tp": 2, "layout.dp": 2, "layout.zero": 3})
    before = ranks(4, threads)
    ranks(4, train, recipe, prepare(recipe.data, recipe.model.vocab_size), 1)
    assert ranks(4, threads) == before
