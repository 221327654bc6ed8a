"""The commands that a page prints, run: they find everything done, and end well."""

import html
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leaven.cli import app
from leaven.training.run_folder import RunFolder
from leaven.views.folders import read_study
from leaven.views.page import folder_page


def printed(page: str) -> list[list[str]]:
    code = re.search(r"<code>(.*?)</code>", page, re.DOTALL)
    assert code
    return [shlex.split(line) for line in html.unescape(code[1]).splitlines() if line]


@pytest.fixture
def folder(tiny_file: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished study and a finished run."""
    monkeypatch.chdir(tiny_file.parent)
    searched = "hyperparameters.lr,hyperparameters.init_std"
    leaven("tune", "tiny.toml", "--study", "study", "--trials", "3", "--workers", "1", "--space", searched)
    leaven("train", "tiny.toml", "--run", "run")
    return tiny_file.parent


def leaven(*words: str) -> None:
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, (shlex.join(words), ran.output, ran.exception)


@pytest.mark.parametrize(("part", "verbs"), [("study", ["tune", "report"]), ("run", ["train", "report"])])
def test_printed_commands_find_everything_done(
    folder: Path, part: str, verbs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(folder_page(folder / part))
    assert [line[:2] for line in lines] == [["leaven", verb] for verb in verbs]
    study, events = read_study(folder / "study"), RunFolder(folder / "run").events()
    monkeypatch.chdir(folder / part)
    for line in lines:
        leaven(*line[1:])
    # Nothing was run again.
    assert read_study(folder / "study") == study
    assert RunFolder(folder / "run").events() == events
