"""`leaven` itself: version and completion."""

import os
import subprocess
import sys

import leaven


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return done.stdout


def test_the_version_is_printed() -> None:
    assert run("-m", "leaven", "--version") == f"leaven {leaven.__version__}\n"


def test_shells_complete_the_options_of_a_verb() -> None:
    script = "import sys; sys.argv = ['leaven']; from leaven.cli import main; main()"
    words = {"COMP_WORDS": "leaven train --rew", "COMP_CWORD": "2"}
    assert run("-c", script, _LEAVEN_COMPLETE="complete_bash", **words).split() == ["--rewind-to"]
