"""leaven check from the command line: what it refuses, what it finds too little to judge, and what it writes."""

from pathlib import Path

import pytest
from tests.cli.conftest import Verb
from tests.verification.families import known_losses
from tests.verification.test_sweeps import losses

from leaven.documents.checks import VerdictRow
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.tested_ranges import warnings
from leaven.scaling.transfer import transfer as transferred
from leaven.verification import recipe_family
from leaven.verification import sweep as sweeps
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.recipe_family import RecipeFamily
from leaven.verification.verdict import verdict


@pytest.mark.parametrize("check", ["coordinates", "duration", "decay", "init"])
def test_help_names_a_factory_where_the_check_accepts_one(check: str, leaven: Verb) -> None:
    code, out, _ = leaven("check", check, "--help")
    assert code == 0
    assert ("or module:factory for your own" in " ".join(out.split())) == (check in ("coordinates", "duration"))
    assert "\N{FACTORY}" not in out  # rich would replace a name between two colons by an emoji


def test_two_sizes_and_one_seed_are_inconclusive(tiny_file: Path, leaven: Verb) -> None:
    sizes = ("--widths", "16,32", "--depths", "2", "--seeds", "1", "--steps", "2")
    code, out, _ = leaven("check", "coordinates", tiny_file, *sizes, "--set", "scaling.rule=standard")
    assert code == 1
    assert "inconclusive: two sizes and one seed are too few to judge" in " ".join(out.split())
    assert out.splitlines()[-1].endswith("--seeds 3 --widths 16,32,64")


def test_a_coordinate_check_that_passed_prints_the_next_command(
    tiny_file: Path, leaven: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = VerdictRow(module="embedding", axis="width", slope=0.0, limit=0.1, passed=True)
    passed = verdict("coordinates", "tiny", "size", [row], curves=[], settings={"seeds": 3})
    monkeypatch.setattr(CoordinateCheck, "run", lambda check, progress: passed)
    code, out, err = leaven("check", "coordinates", tiny_file, "--set", "data.seed=1")
    assert code == 0, err
    assert out.splitlines()[-1] == f"next       leaven train {tiny_file} --run runs/tiny --set data.seed=1"


@pytest.mark.parametrize(
    ("rule", "undecided", "options", "command"),
    [
        ("standard", True, (), "leaven check coordinates RECIPE --seeds 3"),
        ("standard", False, (), "leaven check coordinates RECIPE --set scaling.rule=complete-d-p"),
        ("complete-d-p", False, (), "leaven check coordinates RECIPE -o check.html"),
        ("complete-d-p", False, ("-o", "page.html"), None),
    ],
)
def test_a_failed_coordinate_check_prints_what_repairs_or_shows_the_fault(
    rule: str,
    undecided: bool,
    options: tuple[str, ...],
    command: str | None,
    tiny_file: Path,
    tmp_path: Path,
    leaven: Verb,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    row = VerdictRow(module="mlp", axis="width", slope=1.0, limit=0.1, passed=False, undecided=undecided, beyond=0.9)
    settings = {"seeds": 1, "rule": rule}
    failed = verdict("coordinates", "tiny", "size", [row], curves=[], settings=settings, options=["--seeds 3"])
    monkeypatch.setattr(CoordinateCheck, "run", lambda check, progress: failed)
    code, out, _ = leaven("check", "coordinates", tiny_file, *options)
    printed = [line.removeprefix("next").strip() for line in out.splitlines() if line.startswith("next")]
    assert (code, printed) == (1, [command.replace("RECIPE", str(tiny_file))] if command else [])


def test_a_measured_exponent_is_written(
    tiny: Recipe, tiny_file: Path, tmp_path: Path, leaven: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaven.verification.runs.RunStore", known_losses(losses(tiny, -0.2, 0.01)))
    (tmp_path / "runs").mkdir()
    command = ("check", "duration", tiny_file, "--run", tmp_path / "runs", "--durations", "1,2", "--write")
    code, out, err = leaven(*command, tmp_path / "out.toml")
    assert code in {0, 1}, err
    assert out.splitlines()[-1].endswith(f"next: leaven transfer {tmp_path / 'out.toml'} --tokens TOKENS -o big.toml")
    code, _, err = leaven(*command, tmp_path / "out.toml")
    assert (code, "out.toml exists; give another name" in err) == (2, True)
    recipe = read_recipe(tmp_path / "out.toml")
    low, high = recipe.scaling.token_exponent_interval or (0, 0)
    assert low < recipe.scaling.token_exponent < high < 0.5
    assert "leaven check duration" in recipe.why["scaling.token_exponent"]

    def cautions(exponent: float, tokens: int) -> list[str]:
        moved = transferred(recipe.replace({"scaling.token_exponent": exponent}), tokens=tokens)
        return [caution.message for caution in warnings(moved) if caution.about == "token exponent"]

    longer = 2 * recipe.data.tokens
    (message,) = cautions(0.5, longer)
    assert f"--set scaling.token_exponent={high:.3g}" in message
    assert not cautions(recipe.scaling.token_exponent, longer)
    assert not cautions(0.5, recipe.data.tokens)


def test_logged_runs_give_a_verdict_and_a_page(tmp_path: Path, leaven: Verb) -> None:
    lines = ["width,batch_size,lr,loss"]
    for width in (64, 128):
        for octave in range(-3, 3):
            for seed in (0, 1):
                loss = "nan" if octave == 2 else 3 + 0.1 * (octave + 0.2) ** 2 + 0.001 * seed
                lines.append(f"{width},32,{2.0**octave},{loss}")
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    page = tmp_path / "runs.html"
    code, out, err = leaven("check", "transfer", tmp_path / "runs.csv", "-o", page)
    assert code == 0, err
    assert "left out, because a run diverged: width 64, lr 4; width 128, lr 4" in " ".join(out.split())
    assert "columns not used: batch_size" in out
    assert "passed: 1 of 1 rows" in out
    assert "exponent of the best lr over width" in page.read_text()


def test_logged_curves_give_a_verdict_and_a_page(tmp_path: Path, leaven: Verb) -> None:
    for name, end, power in (("20m", 1.5, 0.4), ("50m", 1.0, 0.4), ("fault/100m", 0.8, 0.9)):
        file = tmp_path / f"{name}.csv"
        file.parent.mkdir(exist_ok=True)
        points = [f"{step},{1.7 + end * (step / 200) ** -power + 0.001 * (-1) ** step}" for step in range(1, 201)]
        file.write_text("\n".join(["step,loss", *points]))
    (tmp_path / "all").mkdir()
    for name in ("20m", "50m"):
        (tmp_path / f"{name}.csv").rename(tmp_path / "all" / f"{name}.csv")
    (tmp_path / "all" / "1b.csv.gz").touch()
    page = tmp_path / "curves.html"
    code, out, err = leaven("check", "collapse", tmp_path / "all", "-o", page)
    assert code == 0, err
    assert "20m -> 50m" in out
    assert "files not read: 1b.csv.gz" in out
    assert "passed: 1 of 1 rows" in out
    assert "Normalised loss curves" in page.read_text()
    (tmp_path / "fault" / "100m.csv").rename(tmp_path / "all" / "100m.csv")
    code, out, err = leaven("check", "collapse", tmp_path / "all")
    assert code == 1, err
    assert "worst: 20m -> 100m" in out


def test_start_weights_are_named_as_unused(tiny_file: Path, monkeypatch: pytest.MonkeyPatch, leaven: Verb) -> None:
    monkeypatch.setattr(recipe_family, "recipe_models", lambda recipe, prepare: RecipeFamily(recipe))
    monkeypatch.setattr(sweeps, "sweep", lambda *given, **more: (_ for _ in ()).throw(InputError("trained")))
    code, _, err = leaven(
        "check", "decay", tiny_file, "--run", "run", "--durations", "1,2", "--set", "start.weights=wheat"
    )
    assert (code, "the models of this check start from random weights" in " ".join(err.split())) == (2, True), err
