"""Run a command line as a user does."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from leaven.cli import main

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def leaven(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """A function that runs a command line and returns its exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leaven", *map(str, arguments)])
        with patch.dict(os.environ), pytest.raises(SystemExit) as stopped:  # --device sets a variable
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def document(result: tuple[int, str, str]) -> Any:
    """Return the JSON document that a command printed. Fails if it printed anything else."""
    code, out, _ = result
    assert code == 0
    return json.loads(out)
