"""Run the commands that a page prints. They find that everything is done, and succeed."""

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


def leaven(*words: str) -> None:
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, (shlex.join(words), ran.output, ran.exception)


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
def test_printed_commands_find_everything_done(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_file.parent
    monkeypatch.chdir(folder)
    text = tiny_file.read_text().replace("10_240", "2_560").replace("warmup_tokens = 1_024", "warmup_tokens = 256")
    tiny_file.write_text(text)
    searched = "hyperparameters.lr,hyperparameters.init_std"
    leaven("tune", "tiny.toml", "--study", "study", "--trials", "3", "--workers", "1", "--space", searched)
    leaven("train", "tiny.toml", "--run", "run")
    study, events = read_study(folder / "study"), RunFolder(folder / "run").events()
    for part, verb in (("study", "tune"), ("run", "train")):
        lines = printed(folder_page(folder / part))
        assert [line[:2] for line in lines] == [["leaven", verb], ["leaven", "report"]]
        monkeypatch.chdir(folder / part)
        for line in lines:
            leaven(*line[1:])
    # Nothing was run again.
    assert read_study(folder / "study") == study
    assert RunFolder(folder / "run").events() == events
