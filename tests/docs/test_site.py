"""The commands of the tutorial work, quoted output is up to date, and generated pages are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.quoted import PAGES, renewed
from benchmarks.site_pages import commands_page, on_page_markdown, recipe_page
from safetensors.torch import load_file

from leaven.cli import VERBS
from leaven.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial" / "first-model.md"


LARGE = "## The same with 50 million"


def commands(text: str) -> list[str]:
    """Return the leaven commands in the code blocks of a text."""
    return [line for block in re.findall(r"```\n(leaven .*?)```", text, re.DOTALL) for line in block.splitlines()]


def run_all(lines: list[str], folder: Path) -> list[str]:
    """Run commands in a folder, each of which has to succeed, and return their verbs."""
    for line in lines:
        subprocess.run(
            line.replace("leaven", f"{sys.executable} -m leaven", 1),
            shell=True,
            check=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "LEAVEN_CACHE": str(folder / "cache")},
        )
    return [line.split()[1] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_of_the_tutorial_work(tmp_path: Path) -> None:
    verbs = run_all(commands(TUTORIAL.read_text(encoding="utf-8").partition(LARGE)[0]), tmp_path)
    assert verbs == ["new", "recipes", "check", "tune", "transfer", "train", "report", "sample", "export"]
    assert (tmp_path / "crumb-hf" / "model.safetensors").exists()
    assert (tmp_path / "crumb.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_of_the_tutorial_work_with_50_million_parameters(tmp_path: Path) -> None:
    rehearsal = TUTORIAL.read_text(encoding="utf-8").partition("### A rehearsal")[2]
    assert run_all(commands(rehearsal), tmp_path) == ["new", "tune", "transfer", "train", "sample", "export"]
    weights = load_file(tmp_path / "slice-hf" / "model.safetensors")
    assert 45e6 < sum(tensor.numel() for tensor in weights.values()) < 55e6
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_quote_what_commands_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("$ leaven new ") + text.count("$ leaven plan ") == (4 if page.name == "starters.md" else 1)
    assert renewed(text) == text, "type: make docs-quoted"


def test_every_verb_is_in_the_page_of_commands() -> None:
    page = commands_page()
    for verb in VERBS:
        assert f"## leaven {verb}\n" in page
    assert "### leaven export weights\n" in page
    assert "| `--trials` | `<int range>` | 32 | Total number of trials" in page
    assert "| `--seeds` | `<int range>` | `3` |" in page
    assert "bound method" not in page


def test_code_in_a_table_shows_no_backslash() -> None:
    page = "| `a\\|b` | c \\| d |\n\n`e\\|f`"
    assert on_page_markdown(page, None, None, None) == "| `a|b` | c \\| d |\n\n`e\\|f`"


def test_every_key_is_in_the_page_of_recipes_with_its_default_and_description() -> None:
    page = recipe_page()
    for part in Recipe.model_fields:
        assert f"## {part}\n" in page or f"`{part}`" in page
    assert "| `batch.ramp.over_tokens` | integer, above 0, at most 1,000,0" in page
    assert "| required | length of the whole ramp" in page
    assert "| `stability.max_rollbacks` | integer, above 0 | `3` | rollbacks" in page


def test_the_tests_that_the_page_of_promises_names_exist() -> None:
    """Each row has a number, under which the last section lists its tests."""
    page = (ROOT / "docs/concepts/promises.md").read_text(encoding="utf-8")
    promises, _, tests = page.partition("\n## Tests\n")
    rows = re.findall(r"^\| (\S+) \| [^|]+ \| [^|]+ \|$", promises, re.MULTILINE)
    named = re.findall(r"^- (\w+): (.+)$", tests, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 50
    assert promises.count("\n| ") == len(rows) + promises.count("\n| | if | then |\n")
    assert [row for row, _ in named] == rows
    missing = []
    for each in "; ".join(tests_of_row for _, tests_of_row in named).split("; "):
        found = re.fullmatch(r"`(tests/[\w/]+\.py)`: ((?:, )?`test_\w+`)+", each)
        assert found is not None, each
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        missing += [name for name in re.findall(r"`(test_\w+)`", each) if f"\ndef {name}(" not in text]
    assert missing == []


def test_the_pages_that_files_name_exist() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = {
        (name, page)
        for name in tracked
        # These files name pages of other projects.
        if "catalogue/runs/" not in name
        and not name.endswith("published_times.toml")
        and name.endswith((".py", ".md", ".toml", ".sh"))
        and (ROOT / name).exists()
        for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg|png)", (ROOT / name).read_text(encoding="utf-8"))
    }
    assert len(named) > 40
    assert not sorted((name, page) for name, page in named if not (ROOT / page).exists())
