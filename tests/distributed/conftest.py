"""A pool of ranks for all tests of this folder, and runs of a single process to compare with."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tests.distributed.cases import train
from tests.distributed.pool import Pool

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe

SingleProcess = Callable[[Recipe, int, str], dict[str, Any]]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def single_process() -> SingleProcess:
    return once()


def once() -> SingleProcess:
    """Return a function that trains a recipe on one process and remembers the result for other layouts."""

    @cache
    def trained(recipe_json: str, steps: int, dtype: str) -> dict[str, Any]:
        recipe = Recipe.model_validate_json(recipe_json)
        return train(recipe, prepare(recipe.data, recipe.model.vocab_size), steps, dtype)

    return lambda recipe, steps, dtype: trained(recipe.model_dump_json(), steps, dtype)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests with ranks on one xdist worker: with eight processes for each of several workers, all would be
    slow."""
    for item in items:
        if "zero-bubble" in item.name and torch.__version__ < "2.13":
            item.add_marker(pytest.mark.skip(reason="torch before 2.13 computes wrong gradients: it is refused"))
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
