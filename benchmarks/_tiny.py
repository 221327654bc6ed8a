"""A tiny recipe and its text, for benchmarks that compare processes of this machine."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import TINY

from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe

TEXT = "".join(f"def function_{i}(x):\n    return x * {i} + {i * i % 97}\n" for i in range(4_000))


@contextmanager
def tiny_recipe() -> Iterator[tuple[Recipe, Path]]:
    """Yield the recipe of the tests on 40 files of text, and a temporary folder with these files and the cache."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["LEAVEN_CACHE"] = f"{name}/cache"
        for number in range(40):
            Path(name, f"{number}.txt").write_text(TEXT[number * 4_000 : (number + 1) * 4_000])
        yield parse_recipe(TINY.replace("SOURCE", f"{name}/*.txt"), "tiny"), Path(name)
