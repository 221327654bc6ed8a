"""`leaven recipes check` and `leaven report --catalogue` as a person calls them."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

Verb = Callable[..., tuple[int, str, str]]
EXAMPLE = Path(__file__).parents[2] / "examples/350m.toml"


def test_a_recipe_within_the_published_range_passes(leaven: Verb) -> None:
    code, out, err = leaven("recipes", "check", EXAMPLE)
    assert (code, err) == (0, "")
    assert out.partition("\nnext ")[0].endswith("5 notes")
    assert "passed: 32 checks, none outside" in out


def test_one_outside_fails_names_the_runs_and_what_it_says_to_type_mends_it(leaven: Verb) -> None:
    fault = ("--set", "hyperparameters.lr=0.02", "--set", "schedule.warmup_tokens=0")
    code, out, err = leaven("recipes", "check", EXAMPLE, *fault)
    assert (code, err) == (1, "")
    assert "FAR OUTSIDE  lr: peak lr 0.02" in out
    assert "says: gpt2-350m-llmc" in out
    assert re.search(r"FAILED: \d+ of 32 checks outside, \d notes", out)
    assert all(len(line) <= 120 for line in out.splitlines())
    lines = out.replace(" \\\n", " ").splitlines()  # as a shell joins them
    mends = [shlex.split(line.split("->")[1]) for line in lines if line.strip().startswith("->")]
    code, out, err = leaven("recipes", "check", EXAMPLE, *fault, *(word for mend in mends for word in mend))
    assert err == ""
    assert "FAR OUTSIDE" not in out


def test_as_json(leaven: Verb) -> None:
    code, out, _ = leaven("recipes", "check", EXAMPLE, "--set", "hyperparameters.grad_clip=0", "--json")
    document = json.loads(out)
    assert code == 1
    assert document["passed"] is False
    assert len(document["checks"]) == 32
    (clip,) = [one for one in document["findings"] if one["check"] == "clip"]
    assert clip["severity"] == "far outside"
    assert (clip["value"], clip["factor"]) == (None, None)  # no number can say how far off is
    assert clip["mends"] == [{"hyperparameters.grad_clip": 1.0}]
    assert len(clip["runs"]) == 5


def test_report_of_the_catalogue(leaven: Verb, tmp_path: Path) -> None:
    out = tmp_path / "catalogue.html"
    code, printed, _ = leaven("report", "--catalogue", "-o", out, "--json")
    assert (code, json.loads(printed)["path"]) == (0, str(out))
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_epochs_of_files_that_are_here_are_estimated(leaven: Verb, tmp_path: Path) -> None:
    text, recipe = tmp_path / "text.txt", tmp_path / "wheat.toml"
    text.write_text("a small text " * 10_000)
    code, said, _ = leaven("new", recipe, "--params", "125M", "--tokens", "2.5B", "--source", text)
    assert code == 0
    assert "epochs of" in said
    code, said, _ = leaven("recipes", "check", recipe)
    assert code == 1
    assert "epochs of the text" in said
    text.unlink()
    code, _, err = leaven("recipes", "check", recipe)
    assert code == 0
    assert "epochs are not checked" in err
