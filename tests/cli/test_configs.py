import json
from pathlib import Path

import pytest
from tests.cli.conftest import Verb
from tests.interop.configs.recipes import LLAMA
from tests.interop.configs.test_from_torchtitan import saved
from tests.interop.configs.test_import import assert_same

from leaven.recipe.files import read_recipe


@pytest.fixture
def plain(tiny_file: Path) -> Path:
    tiny_file.write_text(tiny_file.read_text().replace("qk_norm = true", "qk_norm = false"))
    assert not LLAMA["model.qk_norm"]
    return tiny_file


@pytest.mark.parametrize("target", ["nanotron", "transformers", "deepspeed"])
def test_an_export_without_losses_is_written(leaven: Verb, plain: Path, tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    code, said, err = leaven("export", "config", plain, "--to", target, "-o", out, "--json")
    assert (code, err) == (0, "")
    printed = json.loads(said)
    assert (printed["path"], printed["lost"]) == (str(out), [])
    assert out.exists()
    code, _, err = leaven("export", "config", plain, "--to", target, "-o", out)
    assert (code, err) == (2, f"error: {out} exists already; give another name\n")


def test_an_export_goes_to_a_device(leaven: Verb, plain: Path) -> None:
    code, said, err = leaven("export", "config", plain, "--to", "nanotron", "-o", "/dev/null")
    assert (code, err) == (0, "")
    assert "/dev/null" in said
    assert leaven("export", "config", plain, "--to", "megatron", "-o", "/dev/null", "--lossy")[0] == 0
    code, _, err = leaven("export", "config", plain, "--to", "transformers", "-o", "/dev/null")  # a folder
    assert (code, err) == (2, "error: /dev/null exists already; give another name\n")


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "litgpt"])
def test_losses_are_listed_and_need_lossy(leaven: Verb, plain: Path, tmp_path: Path, target: str) -> None:
    out, before = tmp_path / "out", sorted(tmp_path.iterdir())
    code, said, err = leaven("export", "config", plain, "--to", target, "-o", out)
    assert (code, said) == (2, "")
    *lost, last = err.splitlines()
    assert lost
    assert all(line.startswith("lost: ") and " = " in line for line in lost)
    assert last.startswith(f"error: {plain}: ")
    assert "--lossy" in last
    assert sorted(tmp_path.iterdir()) == before
    code, said, err = leaven("export", "config", plain, "--to", target, "-o", out, "--lossy", "--json")
    assert (code, err) == (0, "")
    found = json.loads(said)["lost"]
    assert [f"lost: {each['key']} = {each['value']}: {each['why']}" for each in found] == lost
    assert all(each["why"] in out.read_text() for each in found)


def test_leaven_imports_what_torchtitan_saves(leaven: Verb, plain: Path, tmp_path: Path) -> None:
    layout = {"data.documents": "isolated", "layout.dp": 16, "batch.tokens": 512}
    recipe, saved_file, again = read_recipe(plain).replace(layout), tmp_path / "config.json", tmp_path / "again.toml"
    saved_file.write_text(json.dumps(saved(recipe)))
    assert leaven("import", "config", saved_file, "--from", "torchtitan", "-o", again)[0] == 0
    assert_same(recipe, read_recipe(again))


def test_an_exported_config_is_imported_again(leaven: Verb, plain: Path, tmp_path: Path) -> None:
    script, recipe = tmp_path / "args.sh", tmp_path / "again one.toml"
    assert leaven("export", "config", plain, "--to", "megatron", "-o", script, "--lossy")[0] == 0
    code, said, err = leaven("import", "config", script, "--from", "megatron", "-o", recipe)
    assert code == 0
    assert "unknown   layout.dp" in err
    assert said.startswith(f"wrote {recipe} (")
    assert read_recipe(recipe).name == "again-one"
    assert read_recipe(recipe).hyperparameters.lr == 0.01
    code, said, _ = leaven("import", "config", script, "--from", "megatron", "--json")
    assert code == 0
    assert json.loads(said)["recipe"]["why"]["hyperparameters.lr"] == "--lr"
    code, said, _ = leaven("import", "config", script, "--from", "megatron")
    (tmp_path / "printed.toml").write_text(said)
    assert read_recipe(tmp_path / "printed.toml").model == read_recipe(plain).model


def test_losses_of_new_recipes_name_a_different_value(leaven: Verb, tmp_path: Path) -> None:
    """No target says "x: would be x"."""
    recipe = tmp_path / "new.toml"
    assert leaven("new", recipe, "--params", "125M", "--tokens", "2.5B")[0] == 0
    for to in ("megatron", "torchtitan", "deepspeed", "nanotron", "transformers", "litgpt", "megatron-module"):
        code, _, err = leaven("export", "config", recipe, "--to", to, "-o", tmp_path / to)
        lost = [line for line in err.splitlines() if line.startswith("lost: ")]
        assert code == (2 if lost else 0), err
        for line in lost:
            value, separator, instead = line.partition(" = ")[2].partition(": would be ")
            assert not separator or value != instead.partition(":")[0], line
