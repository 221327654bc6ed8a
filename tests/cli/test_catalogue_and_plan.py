"""The verbs of the catalogue and the planner: one JSON document with the keys others build on, or readable text."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from leaven.cli.laws import laws
from leaven.cli.plan import plan
from leaven.cli.recipes import app as recipes
from leaven.recipe.errors import InputError

app = typer.Typer()
app.add_typer(recipes, name="recipes")
app.command()(laws)
app.command()(plan)

RECIPE = """
name = "wheat-120m"
[model]
n_layers = 12
d_model = 768
n_heads = 12
n_kv_heads = 12
d_head = 64
d_ff = 2048
vocab_size = 32768
seq_len = 1024
[data]
tokens = 2400000000
[batch]
tokens = 524288
[hyperparameters]
lr = 0.004
init_std = 0.02
[precision]
compute = "bf16"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "wheat.toml"
    path.write_text(RECIPE)
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception:
        raise result.exception
    return result.stdout


def document(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_recipes_list() -> None:
    rows = document("recipes", "list")
    assert len(rows) >= 10
    assert all(list(row) == ["id", "params", "tokens", "peak_lr", "batch_tokens", "source"] for row in rows)
    assert [row["params"] for row in rows] == sorted(row["params"] for row in rows)
    assert "bloom-176b" in run("recipes", "list")


def test_recipes_show() -> None:
    assert document("recipes", "show", "bloom-176b")["arch"]["n_layers"] == 70
    text = run("recipes", "show", "bloom-176b")
    assert "optim.weight_decay" in text
    with pytest.raises(InputError, match="did you mean bloom-176b"):
        run("recipes", "show", "bloom")


def test_recipes_nearest_reads_quantities() -> None:
    rows = document("recipes", "nearest", "--params", "7B", "--tokens", "2T", "--limit", "3")
    assert rows[0]["id"] == "olmo2-7b"
    assert len({row["lineage"] for row in rows}) == len(rows) == 3
    assert "olmo2-7b" in run("recipes", "nearest", "--params", "7B", "--tokens", "2T")


def test_recipes_diff() -> None:
    rows = document("recipes", "diff", "pythia-70m", "gpt-neox-20b")
    assert {"path": "optim.weight_decay", "a": 0.1, "b": 0.01} in rows
    assert "optim.weight_decay" in run("recipes", "diff", "pythia-70m", "gpt-neox-20b")


def test_laws() -> None:
    rows = document("laws", "--params", "1B", "--tokens", "20B")
    assert len(rows) == 10
    assert all({"law", "lr", "batch_tokens", "in_range", "conditions", "source"} <= row.keys() for row in rows)
    (silent,) = (row for row in rows if row["law"] == "Bjorck 2024")
    assert silent["lr"] is None
    assert "a spread of 6x" in run("laws", "--params", "1B", "--tokens", "20B")


@pytest.mark.parametrize("verb", [("recipes", "nearest"), ("laws",)])
def test_nothing_is_neither_near_nor_lawful(verb: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="both must be above 0"):
        run(*verb, "--params", "1B", "--tokens", "0")


def test_plan(recipe: str) -> None:
    found = document("plan", recipe, "--gpus", "8xH100-80GB")
    assert list(found) == ["layout", "memory", "speed", "days", "gpu_hours", "flops_convention", "alternatives"]
    assert found["memory"]["fits"] is True
    text = run("plan", recipe, "--gpus", "8xH100-80GB", "--layout", "tp=2,zero=1,mbs=4")
    assert "dp 4 · tp 2 · pp 1 · zero 1 · micro-batch 4 · accumulate 32 · recompute none" in text
    assert [line.split("  ")[0] for line in text.splitlines()][:3] == ["layout", "memory / GPU", "speed"]


def test_plan_says_what_it_cannot_do(recipe: str) -> None:
    with pytest.raises(InputError, match=r"--set precision\.compute=bf16"):
        run("plan", recipe, "--gpus", "8xH100", "--set", "precision.compute=fp32")
    with pytest.raises(InputError, match="tp of 1, 2 or 4 works"):
        run("plan", recipe, "--gpus", "8xH100", "--layout", "tp=8")
    with pytest.raises(InputError, match="divide over dp 8 x micro-batch 3"):
        run("plan", recipe, "--gpus", "8xH100", "--layout", "dp=8", "--set", "batch.micro_batch=3")
