"""Test comparisons of runs: losses, tokens for the same loss, values that differ, and warnings."""

import json
import math
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import document

from leaven.errors import InputError
from leaven.recipe.files import read_recipe, write_recipe
from leaven.views.comparison import comparison_page, speedup
from leaven.views.page import folder_page


def power_law(offset: float, tokens: list[int]) -> list[tuple[int, float]]:
    return [(at, 2 + offset - math.log(at)) for at in tokens]


def test_the_speedup_of_a_line_over_log_tokens_is_exact():
    # loss = c - ln(tokens): a loss that is lower by ln 2 everywhere needs half of the tokens.
    first, better = power_law(0, [100, 300, 1000, 4000]), power_law(-math.log(2), [150, 700, 4000])
    assert speedup(better, first) == pytest.approx(2)
    assert speedup(first, better) == pytest.approx(1 / 2)
    assert speedup(first, first) == pytest.approx(1)


def test_the_speedup_counts_from_where_a_loss_was_first_reached():
    assert speedup([(10, 3.0), (20, 1.0), (40, 2.0)], [(10, 4.0), (80, 2.0)]) == pytest.approx(80 / (10 * 2**0.5))
    first = power_law(0, [100, 1000])
    assert speedup(power_law(-10, [100, 1000]), first) is None  # before its first validation
    assert speedup([(1000, 1.0)], first) is None


@pytest.fixture
def runs(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders / "proxy", tmp_path / "proxy")
    return Path(shutil.copytree(folders / "runs", tmp_path / "runs"))


def test_report_of_two_runs_compares_them(runs, leaven):
    compared = document(leaven("report", "runs/copied", "runs/moved", "--json"))
    copied, moved = compared["runs"]
    assert (copied["difference"], copied["speedup"]) == (None, None)
    assert moved["difference"] == pytest.approx(moved["loss"] - copied["loss"])
    assert moved["speedup"] > 1
    different = {row["path"]: row["values"] for row in compared["different"]}
    assert different["hyperparameters.lr"] == [0.004, pytest.approx(0.0012131, rel=1e-4)]
    assert compared["warnings"] == []
    assert "runs/moved has the lowest validation loss" in Path("report.html").read_text(encoding="utf-8")
    _, out, _ = leaven("report", "runs/copied", "runs/moved")
    assert "−0.1400" in out
    assert "hyperparameters.lr" in out


def test_a_report_counts_the_damaged_lines_that_it_skips(runs, leaven):
    metrics = runs / "moved/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(['{"step": 0, "tok\n', *lines[1:50], "\0\0\n", "\n", *lines[51:]]))
    compared = document(leaven("report", "runs/copied", "runs/moved", "--json"))
    skipped = "2 damaged lines of metrics.jsonl, from line 1 to 51, were skipped"
    assert compared["warnings"] == [f"runs/moved: {skipped}"]
    assert f"Attention: runs/moved: {skipped}" in Path("report.html").read_text(encoding="utf-8")
    assert skipped in folder_page(runs / "moved")
    metrics.write_text("".join(["oops\n", *lines[1:]]))
    assert "Line 1 of metrics.jsonl is damaged and was skipped" in folder_page(runs / "moved")
    assert "skipped" not in folder_page(runs / "copied")  # its last line was cut short, which a resume repairs


def test_runs_of_other_texts_or_unfinished_ones_get_a_warning(runs):
    recipe = read_recipe(runs / "moved/recipe.toml")
    write_recipe(recipe.replace({"data.source": "other.txt", "data.seed": 5}), runs / "moved/recipe.toml")
    events = runs / "moved/events.jsonl"
    kept = [line for line in events.read_text().splitlines() if json.loads(line)["event"] != "finish"]
    events.write_text("\n".join(kept) + "\n")
    _, compared = comparison_page([runs / "copied", runs / "moved"], Path("out.html"))
    unfinished, texts, seeds = compared.warnings
    assert "moved is not finished" in unfinished
    assert "the training texts differ" in texts
    assert "the seeds differ" in seeds


def test_runs_with_other_ends_of_documents_get_a_warning(runs):
    recipe = read_recipe(runs / "moved/recipe.toml")
    write_recipe(recipe.replace({"data.documents": "isolated"}), runs / "moved/recipe.toml")
    _, compared = comparison_page([runs / "copied", runs / "moved"], Path("out.html"))
    (warning,) = compared.warnings
    assert warning == "the ends of documents differ, so the losses cannot be compared"
    assert "data.documents" in {row.path for row in compared.different}


def test_a_value_that_a_rewind_changed_within_a_run_is_named(runs):
    change = {"path": "hyperparameters.lr", "before": 0.014, "after": 0.0035}
    rewind = {"event": "rewind", "tokens": 50_000, "to_tokens": 40_000, "changes": [change]}
    events = runs / "moved/events.jsonl"
    events.write_text(json.dumps(rewind) + "\n" + events.read_text())
    _, compared = comparison_page([runs / "copied", runs / "moved"], Path("out.html"))
    (warning,) = compared.warnings
    assert warning.endswith(
        "moved was trained with hyperparameters.lr 0.014 up to 40 k tokens and then 0.0035, because --rewind-to "
        "changed its recipe"
    )


def test_text_that_a_rewind_left_out_is_named(runs):
    rewind = {
        "event": "rewind",
        "tokens": 50_000,
        "to_tokens": 40_000,
        "skip_from": 40_000,
        "skip_to": 41_024,
        "lr": 1.0,
    }
    rewind |= {"lr_tokens": 0, "attempt": 0, "found_step": 0, "asked": {"skip_tokens": 1_024}, "earlier_rewinds": []}
    events = runs / "moved/events.jsonl"
    events.write_text(json.dumps(rewind) + "\n" + events.read_text())
    _, compared = comparison_page([runs / "copied", runs / "moved"], Path("out.html"))
    (warning,) = compared.warnings
    assert warning.endswith("of its text after 40 k tokens, because of --skip-tokens")


def test_another_text_under_the_same_path_gets_a_warning(runs):
    for name in ("copied", "moved"):
        events = runs / name / "events.jsonl"
        events.write_text(json.dumps({"event": "start", "text": name}) + "\n" + events.read_text())
    _, compared = comparison_page([runs / "copied", runs / "moved"], Path("out.html"))
    assert any("texts differ, although their paths are equal" in warning for warning in compared.warnings)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["runs/copied", "runs/../runs/copied"], "is given twice"),
        (["runs/copied", "runs"], "contains no run"),
        (["runs/copied", "absent"], "no such folder"),
        (["runs/copied", "proxy"], "only runs can be compared"),
        ([f"runs/{n}" for n in range(10)], "give at most 9"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs, paths, says):
    with pytest.raises(InputError, match=says):
        comparison_page([Path(path) for path in paths], Path("out.html"))
