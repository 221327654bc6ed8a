"""`leaven` itself: first steps, version, help, completion."""

import os
import subprocess
import sys

import pytest

import leaven


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "leaven", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return done.stdout


def test_without_arguments_it_says_how_to_begin() -> None:
    text = run()
    commands = [line.split("   ")[0].strip() for line in text.splitlines() if line.startswith("  leaven ")]
    assert [command.split()[1] for command in commands] == ["demo", "plan", "new"]
    assert len(text.splitlines()) <= 10


def test_version_and_short_help() -> None:
    assert run("--version") == f"leaven {leaven.__version__}\n"
    assert run("-h") == run("--help")
    assert "--run" in run("train", "-h")


@pytest.mark.parametrize(
    ("typed", "expected"), [("leaven tr", {"train", "transfer"}), ("leaven train --rew", {"--rewind-to"})]
)
def test_shells_complete_verbs_and_their_options(typed: str, expected: set[str]) -> None:
    script = "import sys; sys.argv = ['leaven']; from leaven.cli import main; main()"
    environment = {"_LEAVEN_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert set(done.stdout.split()) == expected
