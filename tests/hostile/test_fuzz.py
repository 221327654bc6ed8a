"""Damaged recipes, `--set`, run folders, study folders and models: a result or one line, no bug, and nothing lost
without a word.

`FUZZ_EXAMPLES=4000 pytest tests/hostile/test_fuzz.py` tries 4,000 of each. docs/log.md has the last numbers.
"""

import json
import os
import re
import shutil
import sys
import tomllib
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomlkit
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from tests.conftest import TINY, train_in_this_process
from tests.hostile.test_hostile import bounded, contents

from leaven.cli import INTERRUPTED, main
from leaven.data.tokens import prepare
from leaven.recipe.files import parse_recipe, write_recipe
from leaven.training.metrics import Step
from leaven.training.trainer import train

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "9"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
fewer = settings(fuzz, max_examples=-(-EXAMPLES // 3))  # of commands that train

NESTED: Any = []
for _ in range(40):
    NESTED = [NESTED]
NUMBERS: list[float] = [0, 1, -1, 2, 3, 7, 10**9, 10**12, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30]
NUMBERS += [0.0, -0.0, 0.5, 1e-320, 1e-30, 1e30, 1e308, -1e308]
TEXTS = ["", " ", "\x1b[31m", "\x00", "../../../etc/passwd", "/dev/zero", "a" * 3000, "\u202e", "hf://x", "*"]
TEXTS += ["nan", "=", ".", "true", "é\n"]
values = st.one_of(
    st.sampled_from([None, True, False, float("nan"), float("inf"), [], {}, [[]], {"a": 1}, NESTED, [0] * 3000]),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
).map(deepcopy)  # because damage changes them


def paths(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in nested tables and lists. Of a list, only the first and last items count."""
    found = [at] if at else []
    if isinstance(document, dict):
        return found + [path for key in document for path in paths(document[key], (*at, key))]
    if isinstance(document, list) and document:
        return found + [path for index in {0, len(document) - 1} for path in paths(document[index], (*at, index))]
    return found


def damage(document: Any, data: st.DataObject, keys: tuple[str, ...] = ()) -> Any:
    """Return a document with one to three values replaced, removed or added, also under one of ``keys``."""
    for _ in range(data.draw(st.integers(1, 3))):
        places = paths(document)
        if not places:
            return data.draw(values)
        *outer, last = data.draw(st.sampled_from(places))
        inside = document
        for key in outer:
            inside = inside[key]
        match data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
            case "replace":
                inside[last] = data.draw(values)
            case "remove":
                del inside[last]
            case "add" if isinstance(inside, dict):
                inside[data.draw(st.one_of(st.sampled_from([*keys, *TEXTS]), st.text(max_size=9)))] = data.draw(
                    values
                )
            case _:
                inside[last] = [inside[last]] * 2
    return document


def damaged_bytes(raw: bytes, data: st.DataObject) -> bytes:
    """Return bytes that are cut, have other bytes at one place, or are doubled."""
    at = data.draw(st.integers(0, len(raw)))
    other = data.draw(
        st.one_of(st.binary(max_size=8), st.sampled_from([b"[" * 5000, b"\0" * 64, b"\xff" * 8, b"\n"]))
    )
    return data.draw(
        st.sampled_from([raw[:at], raw[:at] + other + raw[at + len(other) :], raw[:at] + other + raw[at:], raw * 2])
    )


def tell(text: str) -> None:
    if currently_in_test_context():
        note(text)


def attempt(folder: Path, command: str, *more: str) -> tuple[int, str]:
    """Run a command in a folder. Return its exit code and its output. The code is 0, 1 for a failed check,
    `INTERRUPTED`, or 2 with one printable line."""

    def raise_(error: Exception) -> str:
        raise AssertionError(f"a bug: {words}") from error

    words = [*command.split(), *more]
    tell(f"leaven {words}")
    before = contents(folder)
    out, err = StringIO(), StringIO()
    with (
        patch.object(sys, "argv", ["leaven", *words]),
        patch("leaven.cli.bug_message", raise_),
        redirect_stdout(out),
        redirect_stderr(err),
        bounded(),
        pytest.raises(SystemExit) as stopped,
    ):
        main()
    code, shown = int(stopped.value.code or 0), err.getvalue()
    tell(shown[-500:])
    assert code in {0, 1, 2, INTERRUPTED}
    for text in (out.getvalue(), shown):
        controls = {each for each in text if unicodedata.category(each) in {"Cc", "Cs", "Zl", "Zp"}}
        assert controls <= {"\n", "\t"}
    if code == 2:
        assert contents(folder) == before
        assert shown.count("\nerror: ") + shown.startswith("error: ") == 1
        assert shown.endswith("\n")
        assert shown.rpartition("error: ")[2].count("\n") == 1
    return code, out.getvalue() + shown


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECIPE_VERBS = [
    "show R",
    "plan R --gpus 8xH100-80GB",
    "transfer R --width 32 --depth 4 -o out.toml --force",
    "recipes check R",
    "export config R --to litgpt --lossy -o out",
    "export config R --to megatron --lossy -o out",
    "recipes nearest --like R",
    "show R --json",
]
KEYS = (
    *("d_attention", "window", "global_every", "experts", "ramp", "stages", "depth", "modules", "muon", "optimizer"),
    *("base", "scaling", "start", "layout", "average", "tuning", "stability", "precision", "norm_placement"),
    "rotary_fraction",
)


@fuzz
@given(data=st.data())
def test_damaged_recipes(data: st.DataObject, place: Path, tiny_text: str) -> None:
    path = place / "R"
    if data.draw(st.booleans()):
        try:
            text = tomlkit.dumps(damage(tomllib.loads(tiny_text), data, KEYS))
        except (ValueError, TypeError):  # not TOML
            return
        path.write_text(text, encoding="utf-8", errors="replace")
    else:
        path.write_bytes(damaged_bytes(tiny_text.encode(), data))
    shutil.rmtree(place / "out", ignore_errors=True)
    attempt(place, data.draw(st.sampled_from(RECIPE_VERBS)))


@fuzz
@given(data=st.data())
def test_set(data: st.DataObject, place: Path, tiny_text: str) -> None:
    (place / "R").write_text(tiny_text)
    document = tomllib.loads(tiny_text)
    known = [".".join(map(str, path)) for path in paths(document)]
    known += ["hyperparameters.modules.mlp.out.lr", "layout.dp", "batch.ramp", "scaling.rule"]
    text = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=20)
    changes = []
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.one_of(st.sampled_from(known), text, st.sampled_from(TEXTS)))
        value = data.draw(st.one_of(text, values.map(json.dumps), values.map(str)))
        changes += ["--set", f"{key}={value}".replace("\0", "")]
    attempt(place, data.draw(st.sampled_from(["show R", "plan R --gpus 8xH100-80GB"])), *changes)


def copied(origin: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(origin, target)


def damage_file(path: Path, data: st.DataObject) -> None:
    """Damage a file: the values in JSON, or JSON lines, or else bytes."""
    raw = path.read_bytes()
    lines = raw.splitlines() if path.suffix == ".jsonl" else [raw]
    at = data.draw(st.integers(0, len(lines) - 1))
    try:
        document = json.loads(lines[at])
    except ValueError:
        document = None
    if document is not None and data.draw(st.integers(0, 3)):
        lines[at] = json.dumps(damage(document, data)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_bytes(damaged_bytes(raw, data))


def damage_folder(folder: Path, data: st.DataObject) -> None:
    """Damage one or two files of a folder: their content, or what they are."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if "tensorboard" not in path.parts]
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=2, unique=True)):
        harm = data.draw(st.sampled_from(["content"] * 4 + ["remove", "swap", "folder", "pipe", "link", "no folder"]))
        note(f"{harm} {path.name}")
        other = data.draw(st.sampled_from(files))
        if not (path.is_file() and other.is_file()):
            continue
        if harm == "content":
            damage_file(path, data)
        elif harm == "swap":
            mine, its = path.read_bytes(), other.read_bytes()
            path.write_bytes(its)
            other.write_bytes(mine)
        elif harm == "no folder" and path.parent != folder:
            shutil.rmtree(path.parent)
        else:
            path.unlink()
            if harm == "folder":
                path.mkdir()
            elif harm == "pipe":
                os.mkfifo(path)
            elif harm == "link":
                path.symlink_to(data.draw(st.sampled_from(["/dev/zero", "nothing", ".", other])))


@pytest.mark.long
@fuzz
@given(data=st.data())
def test_damaged_run_folders(data: st.DataObject, place: Path, scaled_run: Path) -> None:
    copied(scaled_run, place / "RUN")
    shutil.rmtree(place / "out", ignore_errors=True)
    damage_folder(place / "RUN", data)
    verbs = ["report RUN -o page.html"] * 2 + ["sample RUN Once --max-tokens 2", "export weights RUN out"]
    verbs += ["train RUN/recipe.toml --run RUN"]
    attempt(place, data.draw(st.sampled_from(verbs)))


@fuzz
@given(data=st.data())
def test_damaged_study_folders(data: st.DataObject, place: Path, finished_study: Path) -> None:
    copied(finished_study, place / "STUDY")
    damage_folder(place / "STUDY", data)
    attempt(place, "report STUDY -o page.html")


# A run of ten steps.
SMALL = {"data.tokens": 2_560, "schedule.warmup_tokens": 512, "evaluation.tokens": 256}
SMALL |= {"stability.checkpoint_every_tokens": 1_024}
SAYS = re.compile("damage|missing|chang|lost|gone|remov|not whole|not as the run wrote it")


@pytest.fixture(scope="module")
def stopped_run(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after its sixth step, with its recipe beside it. Do not change it."""
    recipe = parse_recipe(TINY.replace("SOURCE", f"{corpus}/*.txt"), "tiny.toml").replace(SMALL)
    folder = tmp_path_factory.mktemp("stopped")
    write_recipe(recipe, folder / "R")
    seen: list[Step] = []
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    train(recipe, tokens, folder / "RUN", on_step=seen.append, stop=lambda: len(seen) >= 6, history=False)
    return folder


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step of a run, by its number of tokens."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["tokens"]: line["loss"] for line in lines}


@pytest.mark.long
@fewer
@given(data=st.data())
def test_damaged_runs_are_resumed(data: st.DataObject, place: Path, stopped_run: Path) -> None:
    if not (place / "WHOLE").exists():
        copied(stopped_run / "RUN", place / "WHOLE")
        shutil.copy(stopped_run / "R", place / "R")
        attempt(place, "train R --log-to none --run WHOLE")
    copied(stopped_run / "RUN", place / "RUN")
    damage_folder(place / "RUN", data)
    code, shown = attempt(place, "train R --log-to none --run RUN")
    assert code in {0, 2}
    if code == 0 and not SAYS.search(shown):
        assert losses(place / "RUN") == losses(place / "WHOLE")


@pytest.fixture(scope="module")
def stopped_study(stopped_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of three trials over the recipe of :func:`stopped_run`. Do not change it."""
    folder = tmp_path_factory.mktemp("studied")
    with pytest.MonkeyPatch.context() as patched:
        train_in_this_process(patched)
        patched.chdir(folder)
        shutil.copy(stopped_run / "R", "R")
        attempt(folder, "tune R --study STUDY --trials 3 --workers 1")
    return folder


def trials(study: Path) -> dict[int, float]:
    """Return the loss of each trial of a study."""
    return {trial["number"]: trial["loss"] for trial in json.loads((study / "study.json").read_text())["trials"]}


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
@fewer
@given(data=st.data())
def test_damaged_studies_are_continued(data: st.DataObject, place: Path, stopped_study: Path) -> None:
    copied(stopped_study / "STUDY", place / "STUDY")
    shutil.copy(stopped_study / "R", place / "R")
    damage_folder(place / "STUDY", data)
    code, shown = attempt(place, "tune R --study STUDY --trials 4 --workers 1")
    # The results cannot be written if a folder has the name of one of their files.
    assert code in {0, 2} or "the trials are in the store" in shown
    if code == 0 and not SAYS.search(shown):
        known = trials(stopped_study / "STUDY")
        assert known.items() <= trials(place / "STUDY").items()


@fuzz
@given(data=st.data())
def test_damaged_models(data: st.DataObject, place: Path, exported: Path) -> None:
    copied(exported, place / "MODEL")
    for name in ("out.toml", "out-proxy.toml"):
        (place / name).unlink(missing_ok=True)
    files = [path for path in sorted((place / "MODEL").iterdir()) if path.suffix in {".json", ".safetensors"}]
    damage_file(data.draw(st.sampled_from([*files, *[place / "MODEL/config.json"] * len(files)])), data)
    commands = ["new out.toml --from-weights MODEL", "import config MODEL/config.json --from transformers"]
    attempt(place, data.draw(st.sampled_from(commands)))
