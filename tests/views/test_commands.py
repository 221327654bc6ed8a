"""The commands that a page prints, run: they find everything done, and end well."""

import html
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leaven.cli import app
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import differences
from leaven.training.run_folder import RunFolder
from leaven.views.folders import read_run, read_study
from leaven.views.page import folder_page

RUNS = ("transferred", "copied", "untuned")


def printed(page: str) -> list[list[str]]:
    code = re.search(r"<code>(.*?)</code>", page, re.DOTALL)
    assert code
    return [shlex.split(line) for line in html.unescape(code[1]).splitlines() if line]


@pytest.fixture
def folder(real_demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(real_demo, tmp_path / "demo"))


@pytest.mark.parametrize(
    ("part", "verbs"),
    [
        (".", ["demo", "tune", "transfer", "train", "train", "train", "report"]),
        ("study", ["tune", "report"]),
        ("runs/copied", ["train", "report"]),
    ],
)
def test_printed_commands_find_everything_done(
    folder: Path, part: str, verbs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(folder_page(folder / part))
    assert [line[:2] for line in lines] == [["leaven", verb] for verb in verbs]
    study, target = read_study(folder / "study"), read_recipe(folder / "target.toml")
    events = [RunFolder(folder / "runs" / run).events() for run in RUNS]
    monkeypatch.chdir(folder / part)
    for line in lines:
        ran = CliRunner().invoke(app, line[1:])
        assert ran.exit_code == 0, (shlex.join(line), ran.output, ran.exception)
    # Nothing was run again, and what was written again is the same.
    assert read_study(folder / "study") == study
    assert differences(read_recipe(folder / "target.toml"), target) == []
    assert [RunFolder(folder / "runs" / run).events() for run in RUNS] == events
    assert [read_run(folder / "runs" / run).finished for run in RUNS] == [True] * 3


def test_the_printed_command_counts_finished_trials(folder: Path) -> None:
    study = folder / "study" / "study.json"
    ended = read_study(study.parent).ended
    study.write_text(study.read_text().replace('"state": "complete"', '"state": "running"', 1))
    line = printed(folder_page(study.parent))[0]
    assert line[line.index("--trials") + 1] == str(ended - 1)
    assert line[line.index("--space") + 1].split(",") == list(read_study(study.parent).space)
