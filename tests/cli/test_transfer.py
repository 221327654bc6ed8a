"""leaven transfer: what it refuses to write, and --like."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Verb

from leaven.recipe.files import read_recipe, write_recipe


@pytest.fixture
def target_file(tiny_file: Path, tmp_path: Path) -> Path:
    small = read_recipe(tiny_file)
    path = tmp_path / "target.toml"
    changes = {"name": "target", "model": small.model.scaled(32, 4).model_dump(), "data.tokens": 40_960}
    write_recipe(small.replace(changes | {"scaling.base": small.base.model_dump()}), path)
    return path


def test_like_takes_tuned_values_to_a_target(
    leaven: Verb, tiny_file: Path, target_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned.toml"
    tuned = tiny_file.read_text().replace("lr = 0.01", "lr = 0.03")
    tiny_file.write_text(tuned)
    code, printed, _ = leaven("transfer", tiny_file, "--like", target_file, "-o", out, "--json")
    assert code == 0
    assert json.loads(printed)["ratios"]["width"] == 2
    written, target = read_recipe(out), read_recipe(target_file)
    assert (written.hyperparameters.lr, target.hyperparameters.lr) == (0.03, 0.01)
    assert (written.model, written.data, written.batch) == (target.model, target.data, target.batch)


def test_an_existing_file_is_replaced_only_by_force_and_an_input_never(
    leaven: Verb, tiny_file: Path, target_file: Path, tmp_path: Path
) -> None:
    out, before = tmp_path / "big.toml", tiny_file.read_text()
    out.write_text("precious")
    code, _, err = leaven("transfer", tiny_file, "--width", "32", "-o", out)
    assert (code, err.count("\n"), out.read_text()) == (2, 1, "precious")
    assert "--force" in err
    assert leaven("transfer", tiny_file, "--width", "32", "-o", out, "--force")[0] == 0
    assert read_recipe(out).model.d_model == 32
    for path in (tiny_file, tmp_path / "." / tiny_file.name):
        code, _, err = leaven("transfer", tiny_file, "--width", "32", "-o", path, "--force")
        assert (code, err.count("\n"), tiny_file.read_text()) == (2, 1, before)
    code, _, err = leaven("transfer", tiny_file, "--like", target_file, "-o", target_file, "--force")
    assert (code, "recipe that is read" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "no target: give --width"),
        ("--set hyperparameters.lr=0.1", "no target"),
        ("--like LIKE --width 32", "leave out the other sizes"),
        ("--like nowhere.toml", "nowhere.toml: no such file"),
        ("--like LIKE --set model.vocab_size=640", "not one family: model.vocab_size is 320"),
        ("--tokens 1", "less than one batch"),
        ("--width 1e9", "the widest published model"),
    ],
)
def test_what_is_no_transfer_is_one_line(
    leaven: Verb, tiny_file: Path, target_file: Path, tmp_path: Path, options: str, says: str
) -> None:
    words = [str(target_file) if word == "LIKE" else word for word in options.split()]
    out = tmp_path / "out.toml"
    code, printed, err = leaven("transfer", tiny_file, *words, "-o", out)
    assert (code, printed, err.count("\n"), out.exists()) == (2, "", 1, False)
    assert says in err
