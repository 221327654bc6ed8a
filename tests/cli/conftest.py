"""A verb as a user calls it."""

import sys
from collections.abc import Callable

import pytest

from leaven.cli import main

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def leaven(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Exit code, standard output and standard error of a command line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leaven", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run
