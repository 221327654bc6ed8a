import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from tests.cli.conftest import Verb

import leaven
from leaven.cli import EXTRAS, VERBS, command_of, usage_message


@pytest.fixture
def run_verb(request: pytest.FixtureRequest) -> Verb:
    """The fixture ``leaven``, whose name the package has here."""
    return request.getfixturevalue("leaven")


def test_the_version_is_printed() -> None:
    command = [sys.executable, "-m", "leaven", "--version"]
    assert subprocess.check_output(command, text=True) == f"leaven {leaven.__version__}\n"


@pytest.mark.long
@pytest.mark.parametrize(("best", "more", "code"), [(6, (), 0), (6, ("--json",), 0), (4, (), 1)])
def test_a_check_whose_output_is_not_read_has_its_usual_exit_code(
    tmp_path: Path, best: int, more: tuple[str, ...], code: int
) -> None:
    """As in ``leaven check ... | head``. The optimum of width 128 is at 2^-best, that of width 64 at 2^-6."""
    rows = [
        f"{width},{2.0**x},{seed},{3 + 0.05 * (x + middle) ** 2 + 1e-5 * seed * (x % 3)}\n"
        for width, middle in ((64, 6), (128, best))
        for x in range(-9, -1)
        for seed in range(3)
    ]
    (tmp_path / "rows.csv").write_text("".join(["width,lr,seed,loss\n", *rows]))
    command = [sys.executable, "-m", "leaven", "check", "transfer", "rows.csv", "-o", "page.html", *more]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1] == b""
    assert process.returncode == code
    assert (tmp_path / "page.html").exists()


def test_shells_complete_the_options_of_a_verb(run_verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"_LEAVEN_COMPLETE": "complete_bash", "COMP_WORDS": "leaven train --rew", "COMP_CWORD": "2"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert run_verb()[1].split() == ["--rewind-to"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("torch", "pip install 'leaven[train]'"),
        ("uvicorn", "pip install 'leaven[serve]'"),
        ("flash_attn", "pip install flash_attn"),  # imported by the user's own model
    ],
)
def test_a_missing_package_gives_one_line_with_what_to_type(
    run_verb: Verb, monkeypatch: pytest.MonkeyPatch, module: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("leaven.cli.app", lambda **_: import_module(module))
    code, _, err = run_verb()
    message = f"error: this command needs the package {module}, which is not installed; run: {line}"
    assert (code, " ".join(err.split())) == (2, message)


def test_the_extras_named_by_messages_are_those_of_the_package() -> None:
    with Path(__file__).parents[2].joinpath("pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["optional-dependencies"]
    assert {
        extra: " ".join(re.split(r"[\[<>=]", requirement)[0] for requirement in declared[extra]) for extra in EXTRAS
    } == EXTRAS
    assert set(declared) - {"dev", "docs"} <= set(EXTRAS)


def test_an_old_python_gives_one_line() -> None:
    code = "import sys; sys.version_info = (3, 10, 4, 'final', 0); import leaven"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: leaven needs Python 3.11 or newer; this is 3.10\n"


def test_a_suggestion_is_printed_once_if_typer_and_click_both_make_it() -> None:
    class UsageError(Exception):
        message = "No such command 'shwo'. Did you mean 'show'?"

        def format_message(self) -> str:
            return f"{self.message} Did you mean 'show'?"

    assert usage_message(UsageError()) == "no such command 'shwo'. Did you mean 'show'?"


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_all_words_in_brackets(verb: str, run_verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    """typer reads help as markup, where ``[data]`` is a style."""
    monkeypatch.setenv("COLUMNS", "10000")
    command = command_of(verb)
    for name, each in {"": command, **getattr(command, "commands", {})}.items():
        texts = [each.help or "", *(getattr(param, "help", None) or "" for param in each.params)]
        words = {word for text in texts for word in re.findall(r"\[[a-z]+\]", text)}
        if words:
            shown = run_verb(verb, *[name] * bool(name), "--help")[1]
            assert {word for word in words if word not in shown} == set()
