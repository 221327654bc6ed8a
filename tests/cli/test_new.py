import json
import shlex
from pathlib import Path

import pytest
from tests.cli.conftest import Verb, document
from tests.data.written import documents, megatron

from leaven.catalogue.runs import find_run
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.units import format_parameters
from leaven.scaling.table import parameter_table


def test_every_printed_command_works(leaven: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("my fields/new wheat.toml")
    path.parent.mkdir()
    code, said, err = leaven("new", path, "--params", "1B", "--tokens", "20B", "--gpus", "8xH100-80GB")
    assert (code, err) == (0, "")
    assert said.splitlines()[0].startswith("1 size")
    for verb in (("show",), ("plan", "--gpus", "8xH100-80GB")):
        assert leaven(verb[0], path, *verb[1:])[0] == 0
    lines = said.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("next"))
    typed = (shlex.split(line.removeprefix("next"))[1:] for line in lines[first:])
    check, plan_proxy, tune, back, check_tuned, coordinates, plan = typed
    wheat, proxy = read_recipe(path), read_recipe(path.with_stem("new wheat-proxy"))
    assert wheat.base_shape == proxy.model
    assert (wheat.layout.ranks, proxy.layout.ranks) == (8, 1)
    assert leaven(*check)[0] == 0
    assert leaven(*plan_proxy)[0] == 0
    assert tune[:2] == ["tune", str(path.with_stem("new wheat-proxy"))]
    best = Path(back[1])
    best.parent.mkdir(parents=True)
    why = proxy.why | {"hyperparameters.lr": "study x, trial 0"}  # as if the proxy's own values were the best
    write_recipe(proxy.replace({"why": why}), best)
    code, _, err = leaven(*back)
    assert (code, err) == (0, "")  # no warning of what new itself proposed
    tuned = read_recipe(path.with_stem("new wheat-tuned"))
    assert (tuned.model, tuned.layout, tuned.batch) == (wheat.model, wheat.layout, wheat.batch)
    assert parameter_table(tuned).rows == parameter_table(wheat).rows
    assert coordinates == ["check", "coordinates", str(path.with_stem("new wheat-tuned"))]
    assert leaven(*check_tuned)[0] == 0
    assert leaven(*plan)[0] == 0


@pytest.mark.parametrize("gpus", [(), ("--gpus", "1xRTX-4090")])
def test_a_text_a_machine_and_an_evening_are_enough(
    gpus: tuple[str, ...], leaven: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("It is not the words that count. " * 20_000, encoding="utf-8")
    code, said, err = leaven("new", "mine.toml", "--source", "mine.txt", "--time", "3h", *gpus)
    assert (code, err) == (0, "")
    recipe = read_recipe(Path("mine.toml"))
    assert recipe.model.vocab_size == 512
    assert recipe.data.tokens == pytest.approx(4 * 640_000 / 1.95, rel=0.01)
    assert "the text has about 328 k tokens, too few for the given time" in said
    plan, check, *_ = (shlex.split(line.removeprefix("next"))[1:] for line in said.splitlines()[-3:])
    assert plan == ["plan", "mine.toml", "--gpus", *(["1xRTX-4090-24GB"] if gpus else ["cpu", "--measure"])]
    assert leaven(*plan[:4])[0] == 0
    assert leaven(*check)[0] == 0


def test_force_replaces_both_recipes_and_leaves_no_proxy_of_another(leaven: Verb, tmp_path: Path) -> None:
    path, size = tmp_path / "wheat.toml", ("--tokens", "1B", "--params")
    proxy = path.with_stem("wheat-proxy")
    assert leaven("new", path, *size, "50M", "--proxy", "2M")[0] == 0
    before = proxy.read_bytes()
    code, _, err = leaven("new", path, *size, "60M", "--proxy", "none", "--force")
    assert (code, err.count("\n"), "remove that file" in err) == (2, 1, True)
    assert (read_recipe(path).model.params < 55e6, proxy.read_bytes()) == (True, before)
    assert leaven("new", path, *size, "60M", "--proxy", "2M", "--force")[0] == 0
    assert read_recipe(path).model.params > 55e6
    assert proxy.read_bytes() != before


@pytest.mark.long
def test_the_recipe_trains_as_written(leaven: Verb, tmp_path: Path, corpus: Path) -> None:
    recipe, run = tmp_path / "tiny.toml", tmp_path / "run"
    small = ("--params", "100k", "--tokens", "40k", "--seq-len", "16", "--vocab", "320")
    assert leaven("new", recipe, *small, "--source", f"{corpus}/*.txt")[0] == 0
    # The first steps are enough: batch, lr and warm-up are those of the recipe.
    code, out, _ = leaven("train", recipe, "--run", run, "--set", "data.tokens=3000", "--json")
    assert code == 0
    assert json.loads(out)["loss"] < 4.5  # log 320 = 5.8


def test_a_recipe_with_experts_passes_the_checks(leaven: Verb, tmp_path: Path) -> None:
    """For what a token uses, in the document and in the comparison with published runs."""
    file = tmp_path / "wheat.toml"
    size = ("--params", "7B", "--tokens", "100B", "--experts", "64", "--active", "8")
    written = document(leaven("new", file, *size, "--json"))
    recipe, proxy = read_recipe(file), read_recipe(tmp_path / "wheat-proxy.toml")
    assert written["params"] == recipe.model.params == pytest.approx(7e9, rel=0.03)
    assert written["params_active"] == recipe.model.params_active < 1.7e9
    assert recipe.model.experts is not None
    assert proxy.model.experts is not None
    assert (proxy.model.experts.number, proxy.model.experts.active) == (64, 8)
    assert leaven("transfer", tmp_path / "wheat-proxy.toml", "--like", file, "-o", tmp_path / "big.toml")[0] == 0
    assert read_recipe(tmp_path / "big.toml").model == recipe.model
    checked = document(leaven("recipes", "check", tmp_path / "wheat-proxy.toml", "--json"))
    assert checked["passed"]
    assert checked["params_active"] == proxy.model.params_active
    _, out, _ = leaven("recipes", "check", file)
    assert f"{format_parameters(recipe.model.params, recipe.model.params_active)}, 100 B tokens" in out


def test_from_takes_the_size_and_length_of_a_run(leaven: Verb, tmp_path: Path) -> None:
    path = tmp_path / "olmo.toml"
    assert leaven("new", path, "--from", "olmo2-7b")[0] == 0
    recipe, run = read_recipe(path), find_run("olmo2-7b")
    assert recipe.model.params == pytest.approx(run.params_total, rel=0.03)
    assert recipe.data.tokens == run.tokens
    assert recipe.hyperparameters.z_loss == 1e-5
    _, _, err = leaven("new", tmp_path / "longer.toml", "--from", "olmo2-7b", "--seq-len", "8192")
    assert "the values are from sequences of 4,096 tokens, and this model has 8,192" in err


def test_a_recipe_for_token_ids_has_their_vocabulary(leaven: Verb, tmp_path: Path) -> None:
    source = megatron(tmp_path / "ids.bin", documents())
    size = ("--params", "1M", "--tokens", "1M", "--source", source)
    code, out, err = leaven("new", tmp_path / "a.toml", *size)
    assert (code, out, list(tmp_path.glob("*.toml"))) == (2, "", [])
    assert f"{source} has token ids; add --vocab COUNT" in err
    assert leaven("new", tmp_path / "a.toml", *size, "--vocab", "300")[0] == 0
    recipe = read_recipe(tmp_path / "a.toml")
    assert (recipe.model.vocab_size, recipe.data.source) == (300, source)
