"""docs/spaces.md says what the spaces have; its tables are made here."""

import re
from pathlib import Path

import pytest

from leaven.recipe.files import read_recipe
from leaven.tuning.space import REACH, SETS, Space, space

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spaces.md").read_text()
LLAMA = read_recipe(ROOT / "benchmarks" / "tuning" / "proxy.toml")


def table(around: Space) -> str:
    """A row for all modules, and for all points, of one quantity."""
    rows: dict[str, list[str]] = {}
    reach = {}
    for dimension in around.dimensions:
        # The module's name, or the number of the point.
        found = re.search(r"(?<=modules\.).+(?=\.)|(?<=\[)\d+(?=\])", dimension.path)
        pattern = f"{dimension.path[: found.start()]}*{dimension.path[found.end() :]}" if found else dimension.path
        rows.setdefault(pattern, []).append(found[0] if found else "")
        reach[pattern] = f"{dimension.low:g} to +{dimension.high:g} | {dimension.scale:g}"
    lines = ["| values | how many | of | octaves | scale |", "|---|---|---|---|---|"]
    for pattern, names in rows.items():
        every = "every module" if len(names) == len(LLAMA.model.modules) else ", ".join(names)
        lines.append(f"| `{pattern}` | {len(names)} | {every} | {reach[pattern]} |")
    return "\n".join(lines)


@pytest.mark.parametrize("which", SETS)
def test_the_page_has_the_values_of_each_space(which: str) -> None:
    around = space(LLAMA, which)
    assert f"## `{which}`: {len(around.dimensions)} values\n" in PAGE
    assert table(around) in PAGE


def test_the_page_has_the_reasons() -> None:
    for quantity, reach in REACH.items():
        assert f"| `{quantity}` | ±{reach.octaves:g} | {reach.why} |" in PAGE
