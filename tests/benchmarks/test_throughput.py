"""Test benchmarks/throughput.py: all libraries train a model of one shape, and missing libraries are named."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.throughput import CASES

from leaven.recipe.files import read_recipe

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "throughput.py"


@pytest.mark.slow
def test_tiny(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--tiny", "--json", str(tmp_path / "table.json")]
    arms = ["leaven", "leaven, GPT-2", "transformers", "litgpt", "nanogpt", "transformers+malloc"]
    command += ["--arms", ";".join(arms)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (table,) = json.loads((tmp_path / "table.json").read_text())
    there = [name for name in arms if find_spec(re.split(r"[,+]", name)[0])]
    assert [row["arm"] for row in table["rows"]] == there
    for name in arms:
        assert (f"; {name} is missing" in output) == (name not in there)
    # d_ff 192, d 64, V 128: attention, MLP, two norms, embedding and unembedding, final norm
    assert table["params"] == 4 * 64 * 64 + 3 * 192 * 64 + 2 * 64 + 2 * 128 * 64 + 64
    assert all(row["tokens_per_second"][1] > 0 and row["peak_mib"] > 0 for row in table["rows"])


def test_the_case_of_the_gpu_is_the_example() -> None:
    recipe = read_recipe(ROOT / "examples" / "350m.toml")
    assert CASES["350m"][0].model_dump() == recipe.model.model_dump() | {"vocab_size": 50_304}
