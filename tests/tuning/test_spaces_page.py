"""docs/spaces.md says what the spaces have; its tables are made here."""

import re
from pathlib import Path

import pytest

from leaven.recipe.files import read_recipe
from leaven.tuning.document import Dimension
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
        reach[pattern] = f"{', '.join(dimension.levels)} | |" if dimension.levels else _reach(around, dimension)
    lines = ["| values | how many | of | from and to | first box | scale |", "|---|---|---|---|---|---|"]
    for pattern, names in rows.items():
        every = "every module" if len(names) == len(LLAMA.model.modules) else ", ".join(names)
        lines.append(f"| `{pattern}` | {len(names)} | {every} | {reach[pattern]} |")
    return "\n".join(lines)


def _reach(around: Space, dimension: Dimension) -> str:
    path, ends = dimension.path, sorted((dimension.low, dimension.high))
    values = sorted(float(around.values({path: end})[path]) for end in ends)
    low, high = dimension.box
    unit = " tenths" if dimension.unit == "tenth" else ""
    return f"{values[0]:,.6g} to {values[1]:,.6g} | {low:.3g} to {high:+.3g}{unit} | {dimension.scale:g}"


@pytest.mark.parametrize("which", SETS)
def test_the_page_has_the_values_of_each_space(which: str) -> None:
    around = space(LLAMA, which)
    assert f"## `{which}`: {len(around.dimensions)} values\n" in PAGE
    assert table(around) in PAGE


def bounds() -> str:
    lines = ["| value | from | to | first box | because |", "|---|---|---|---|---|"]
    for quantity, reach in REACH.items():
        of = " of the run" if reach.of_run else ""
        low, high = (f"{end:.5g}{of if end else ''}" for end in (reach.low, reach.high))
        lines.append(f"| `{quantity}` | {low} | {high} | ±{reach.near:g} | {reach.why} |")
    return "\n".join(lines)


def test_the_page_has_the_bounds_and_their_reasons() -> None:
    assert bounds() in PAGE
