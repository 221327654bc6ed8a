"""leaven new from published runs and laws, as a user meets it."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.starters import PAGE, renewed

from leaven.catalogue.runs import find_run
from leaven.recipe.files import read_recipe
from leaven.scaling.table import resolve

Verb = Callable[..., tuple[int, str, str]]


def test_what_is_written_goes_through_every_verb(
    leaven: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    path.with_stem("new wheat-proxy").rename(best)  # as if the proxy's own values were the best
    code, _, err = leaven(*back)
    assert (code, err) == (0, "")  # no warning of what new itself proposed
    tuned = read_recipe(path.with_stem("new wheat-tuned"))
    assert (tuned.model, tuned.layout, tuned.batch) == (wheat.model, wheat.layout, wheat.batch)
    assert resolve(tuned).rows == resolve(wheat).rows
    assert coordinates == ["check", "coordinates", str(path.with_stem("new wheat-tuned"))]
    assert leaven(*check_tuned)[0] == 0
    assert leaven(*plan)[0] == 0


def test_what_is_written_trains_as_it_is(leaven: Verb, tmp_path: Path, corpus: Path) -> None:
    recipe, run = tmp_path / "tiny.toml", tmp_path / "run"
    small = ("--params", "1M", "--tokens", "40k", "--seq-len", "16", "--vocab", "320")
    assert leaven("new", recipe, *small, "--source", f"{corpus}/*.txt")[0] == 0
    # A fifth of it, some 40 steps: its batch, lr and warm-up are what they are.
    code, said, _ = leaven("train", recipe, "--run", run, "--set", "data.tokens=8000", "--json")
    assert code == 0
    assert json.loads(said)["loss"] < 5.5  # log 320 = 5.8


def test_json_has_every_step_with_its_sources(leaven: Verb, tmp_path: Path) -> None:
    path = tmp_path / "wheat.toml"
    code, said, _ = leaven("new", path, "--params", "125M", "--tokens", "2.5B", "--json")
    told = json.loads(said)
    assert code == 0
    keys = ["path", "proxy_path", "params", "tokens", "steps", "proxy", "tuning", "compared", "next", "schema"]
    assert list(told) == keys
    assert [step["step"] for step in told["steps"]] == list(range(1, 14))
    lr = next(step for step in told["steps"] if "hyperparameters.lr" in step["values"])
    assert lr["values"]["hyperparameters.lr"] == read_recipe(path).hyperparameters.lr
    assert any(source.startswith("Step Law 2025: arXiv") for source in lr["sources"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to start from; type --params COUNT --tokens COUNT, or --from-weights DIR"),
        (("--params", "1B"), "--tokens is missing; 20 a parameter would be --tokens 20000000000"),
        (("--params", "1B", "--from-weights", "x"), "--params asks for a new one; type one or the other"),
        (("--params", "0", "--tokens", "1B"), "--params 0: give 100 k to 10 T"),
        (("--params", "1B", "--tokens", "20B", "--gpus", "8xZ9"), "no accelerator 'Z9' in the table"),
        (("--params", "1B", "--tokens", "20B", "--from", "olmo2"), "no published run 'olmo2'; did you mean"),
        (("--params", "70B", "--tokens", "20B", "--gpus", "1xL40S"), "nothing fits"),
        (("--params", "1B", "--tokens", "20B", "--source", "no.txt"), "data.source 'no.txt' is no file"),
        (("--params", "1B", "--tokens", "20B", "--proxy", "2B"), "--proxy 2 B: no shape of this family"),
        (("--from", "olmo2-7b", "--proxy", "50M"), "--proxy with --from olmo2-7b"),
    ],
)
def test_bad_input_writes_nothing(leaven: Verb, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    path = tmp_path / "out.toml"
    code, said, err = leaven("new", path, *options)
    assert (code, said) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not path.exists()


def test_what_is_there_stays(leaven: Verb, tmp_path: Path) -> None:
    path = tmp_path / "out.toml"
    path.write_text("mine")
    code, _, err = leaven("new", path, "--params", "1B", "--tokens", "20B")
    assert code == 2
    assert "the file exists; give another name" in err
    assert path.read_text() == "mine"


def test_a_run_alone_is_its_own_size_and_length(leaven: Verb, tmp_path: Path) -> None:
    path = tmp_path / "olmo.toml"
    assert leaven("new", path, "--from", "olmo2-7b")[0] == 0
    recipe, run = read_recipe(path), find_run("olmo2-7b")
    assert recipe.model.params == pytest.approx(run.params_total, rel=0.03)
    assert recipe.data.tokens == run.tokens


def test_a_folder_that_is_not_there(leaven: Verb, tmp_path: Path) -> None:
    code, said, err = leaven("new", tmp_path / "none" / "out.toml", "--params", "1B", "--tokens", "20B")
    assert (code, said) == (2, "")
    assert "none; make it first, or give another name" in err


def test_the_docs_quote_what_is_printed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("$ leaven new ") == 4
    assert renewed(page) == page, "type: make docs-starters"


def test_an_empty_text_and_the_names_of_what_comes_of_a_recipe_are_refused(leaven: Verb, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    size = ("--params", "125M", "--tokens", "2.5B")
    code, _, err = leaven("new", tmp_path / "a.toml", *size, "--source", tmp_path / "empty.txt")
    assert (code, "is empty; give a text" in err) == (2, True)
    for end in ("-proxy", "-tuned"):
        code, _, err = leaven("new", tmp_path / f"a{end}.toml", *size)
        assert (code, "give another" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
