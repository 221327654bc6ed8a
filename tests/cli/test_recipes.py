"""The verbs of the catalogue and the planner: one JSON document with the keys others build on, or readable text."""

import csv
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
    assert len(rows) >= 110
    keys = ["id", "params", "tokens", "peak_lr", "batch_tokens", "source"]
    assert all(list(row)[:6] == keys for row in rows)
    assert [row["params"] for row in rows] == sorted(row["params"] for row in rows)
    by_id = {row["id"]: row for row in rows}
    assert by_id["bloom-176b"]["source"].startswith("bigscience-workshop/bigscience: train/tr11-176B-ml")
    assert by_id["nemotron-4-15b"]["peak_lr"] is None
    assert by_id["deepseek-v3"]["params_active"] == 37_000_000_000


def test_recipes_list_takes_filters_and_all_hold() -> None:
    def ids(*options: str) -> list[str]:
        return [row["id"] for row in document("recipes", "list", *options)]

    assert ids("--params", "5B..10B", "--where", "arch.norm_placement=output") == ["olmo2-7b", "olmo3-7b"]
    assert ids("--kind", "moe", "--optimizer", "adamw", "--tokens", "10T..") == ["mimo-v2-flash", "deepseek-v3"]
    assert ids("--family", "olmo 2") == ["olmo2-7b", "olmo2-13b", "olmo2-32b"]
    two = ids("--where", "schedule.shape=wsd", "--where", "optim.weight_decay<0.1", "--params", "..1B")
    assert two == ["smollm-135m", "smollm2-135m", "smollm2-360m"]
    assert ids("--params", "2T..") == []
    assert run("recipes", "list", "--params", "2T..") == "no published run is so\n"
    with pytest.raises(InputError, match="no run has kind 'sparse'; did you mean "):
        run("recipes", "list", "--kind", "sparse")
    with pytest.raises(InputError, match="'7B' is no range; write for example 1B..10B, ..10B or 1B.."):
        run("recipes", "list", "--params", "7B")


def test_recipes_list_as_a_spreadsheet_reads_it() -> None:
    rows = list(csv.DictReader(run("recipes", "list", "--csv").splitlines()))
    assert [row["id"] for row in rows] == [row["id"] for row in document("recipes", "list")]
    by_id = {row["id"]: row for row in rows}
    assert float(by_id["pythia-70m"]["peak_lr"]) == 1e-3
    assert by_id["idefics-80b"]["tokens"] == ""
    assert by_id["opt-66b"]["lineage"] == "gpt3-table"


def test_recipes_show() -> None:
    assert document("recipes", "show", "bloom-176b")["arch"]["n_layers"] == 70
    text = run("recipes", "show", "bloom-176b")
    assert "optim.weight_decay" in text
    assert "moe, 1.04 T parameters, 32.6 B active, 15.5 T tokens" in run("recipes", "show", "kimi-k2")
    with pytest.raises(InputError, match=r"did you mean bloom-\w+, bloom-\w+ or bloom-\w+\?"):
        run("recipes", "show", "bloom")


def test_recipes_show_tells_what_went_wrong_and_what_was_done() -> None:
    troubles = document("recipes", "show", "marin-32b")["instabilities"]
    assert len(troubles) == 3
    flowing = " ".join(run("recipes", "show", "marin-32b").split())
    for trouble in troubles:
        for part in ("what", "action", "outcome", "source"):
            assert trouble[part] in flowing


def test_recipes_nearest_reads_quantities() -> None:
    rows = document("recipes", "nearest", "--params", "7B", "--tokens", "2T", "--limit", "3")
    assert rows[0]["id"] == "olmo-7b"
    assert len({row["lineage"] for row in rows}) == len(rows) == 3
    assert all(row["within_factor"] and row["same_stack"] for row in rows)  # no stack asked for: all are of it
    assert "olmo-7b" in run("recipes", "nearest", "--params", "7B", "--tokens", "2T")


def test_recipes_nearest_puts_the_stack_first(recipe: str) -> None:
    asked = ("--params", "7B", "--tokens", "2T", "--norm-placement", "output", "--qk-norm", "--limit", "4")
    rows = document("recipes", "nearest", *asked)
    assert [row["same_stack"] for row in rows] == [True, False, False, False]
    assert rows[0]["id"] == "olmo2-7b"
    assert "1 of these 4 of the stack asked for: output, qk-norm" in run("recipes", "nearest", *asked)
    like = document("recipes", "nearest", "--like", recipe, "--qk-norm")
    assert like[0]["id"] == "openelm-270m"
    stacks = [row["same_stack"] for row in document("recipes", "nearest", "--like", recipe)]
    assert stacks == sorted(stacks, reverse=True)
    assert stacks[0]


def test_recipes_nearest_says_by_how_much_it_is_outside() -> None:
    (row,) = document("recipes", "nearest", "--params", "5M", "--tokens", "100M", "--limit", "1")
    assert row["id"] == "pythia-70m"
    assert row["within_factor"] is False
    assert row["size_ratio"] == pytest.approx(14.085, abs=1e-3)
    said = "no published run is within a factor of 4 of 5 M parameters: pythia-70m is 14.1x larger"
    assert said in run("recipes", "nearest", "--params", "5M", "--tokens", "100M")
    wider = run("recipes", "nearest", "--params", "5M", "--tokens", "100M", "--factor", "15")
    assert "no published run" not in wider


def test_recipes_diff() -> None:
    rows = document("recipes", "diff", "pythia-70m", "gpt-neox-20b")
    decay = {"path": "optim.weight_decay", "a": 0.1, "b": 0.01, "schema": "leaven.difference/1"}
    assert decay in rows
    assert "optim.weight_decay" in run("recipes", "diff", "pythia-70m", "gpt-neox-20b")


def test_recipes_nearest_tells_the_adam_of_a_recipe_from_that_of_papers(tmp_path: Path) -> None:
    path = tmp_path / "adam.toml"
    path.write_text(RECIPE.replace("lr = 0.004", 'lr = 0.004\noptimizer = "adam"'))
    assert "adds its decay to the gradient (L2)" in run("recipes", "nearest", "--like", str(path))


def test_recipes_diff_of_a_run_and_a_recipe(recipe: str) -> None:
    rows = {row["path"]: row for row in document("recipes", "diff", "smollm2-135m", recipe)}
    depth = {"path": "model.n_layers", "a": 30, "b": 12, "counterpart": True}
    assert rows["model.n_layers"] == depth | {"schema": "leaven.recipe-difference/1"}
    assert rows["schedule.decay"]["a"] == "wsd"
    kind = rows["init.kind"]
    assert (kind["a"], kind["b"], kind["counterpart"]) == ("scaled_normal", None, False)
    text = run("recipes", "diff", recipe, "smollm2-135m")
    assert text.index("hyperparameters.lr") < text.index("without a counterpart") < text.index("init.kind")
    assert document("recipes", "diff", recipe, recipe) == []


def test_a_recipe_is_compared_as_it_is_trained(recipe: str, tmp_path: Path) -> None:
    """Its lr is in base coordinates: at four times the width hidden matrices get a quarter."""
    base = "[scaling]\nalpha = 1.0\ntoken_exponent = 0.0\n"
    base += "base = { width = 192, depth = 12, batch_tokens = 524288, tokens = 2400000000 }\n"
    moved = tmp_path / "moved.toml"
    moved.write_text(RECIPE + base)
    rows = {row["path"]: row for row in document("recipes", "diff", "pythia-160m", str(moved))}
    assert rows["hyperparameters.lr"]["b"] == pytest.approx(0.001)
    plain = {row["path"]: row for row in document("recipes", "diff", "pythia-160m", recipe)}
    assert plain["hyperparameters.lr"]["b"] == pytest.approx(0.004)
