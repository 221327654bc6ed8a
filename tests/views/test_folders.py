import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refused
from written import demo, write_demo, write_losses_check

from leaven.documents import sealed
from leaven.documents.checks import CheckDocument
from leaven.recipe.files import write_recipe
from leaven.storage import digest
from leaven.views.folders import read_folder, read_run, read_study
from leaven.views.page import folder_page
from leaven.views.run_charts import run_charts

EMPTY_STUDY = json.dumps(sealed({"name": "x", "method": "tpe", "space": [], "trials": []}))


def edit(name: str, *keys: Any) -> None:
    """Change a JSON file and its digest. ``keys``: the path of a value, the new value or None, and the folder."""
    *outer, last, value, folder = keys
    document = json.loads((folder / name).read_text())
    inside = document
    for key in outer:
        inside = inside[key]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    (folder / name).write_text(json.dumps(sealed(document)))


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    """A copy of the folders and a check and a demo, which a test may change."""
    copied = Path(shutil.copytree(folders, tmp_path / "folders"))
    write_losses_check(copied / "check")
    write_demo(copied / "demo", demo())
    return copied


def test_broken_lines_are_ignored_and_steps_done_again_count_once(folder):
    run = folder / "runs/moved"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    torn = ["hello", "{}", *lines[:200], '{"step": 200, "tok', "\x00\x00", *lines[150:], '{"step": 99, "tok']
    (run / "metrics.jsonl").write_text("\n".join(torn))
    assert [step["step"] for step in read_run(run).steps] == [*range(1, len(lines) + 1)]


def test_the_time_of_an_unfinished_run_is_that_of_its_steps(folder):
    """The clock was set back during the run."""
    run = folder / "runs/moved"
    events = [("start", 0), ("validation", 60), ("resume", 5_000), ("validation", -900)]
    lines = [
        {"event": name, "step": 1, "tokens": 1 + i, "time": 1e9 + time, "loss": 3.0}
        for i, (name, time) in enumerate(events)
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    read = read_run(run)
    assert read.seconds == pytest.approx(sum(step["batch_tokens"] / step["tokens_per_second"] for step in steps))
    assert not read.finished


def test_a_rollback_undoes_later_validations_and_is_on_the_page(folder):
    run = folder / "runs/moved"
    back = {"to_tokens": 30_000, "skip_from": 30_000, "skip_to": 34_000, "tokens": 50_000, "step": 9, "time": 1e9}
    lines = [
        {"event": "validation", "tokens": 20_000, "loss": 3.5},
        {"event": "validation", "tokens": 40_000, "loss": 7.0},
        {"event": "rollback", "why": "loss 9.1 standard deviations above its median", **back},
        {"event": "validation", "tokens": 60_000, "loss": 3.2},
        {"event": "rewind", **back | {"to_tokens": 10_000}},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    assert read_run(run).validation == [(20_000, 3.5), (60_000, 3.2)]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(run).validation == []
    page = folder_page(run)
    assert "loss 9.1 standard deviations above its median: rolled back to 30 k tokens, skipping 4 k tokens" in page
    assert "1 times by itself and 1 times by --rewind-to" in page


def test_the_loss_of_averaged_weights_is_on_the_page(folder):
    run = folder / "runs/moved"
    assert "averaged weights" not in folder_page(run)
    with (run / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "validation", "tokens": 4_000_000, "loss": 2.9, "averaged_loss": 2.75}) + "\n"
        )
    assert read_run(run).averaged == [(4_000_000, 2.75)]
    assert [dots["y"] for dots in run_charts(read_run(run))["loss"]["data"][-1:]] == [[2.75]]
    assert "and 2.7500 with the averaged weights." in folder_page(run)


@pytest.mark.parametrize("event", ["validation", "rollback", "rewind"])
def test_an_event_without_its_keys_is_ignored(folder, event):
    run = folder / "runs/moved"
    read = read_run(run)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "loss": 9.0}) + "\n")
        file.write(json.dumps({"event": event, "loss": 9.0, "tokens": None, "to_tokens": None}) + "\n")
    assert read_run(run).validation == read.validation
    assert "Rollbacks and rewinds" not in folder_page(run)


def test_an_interrupted_run_has_no_final_loss(folder):
    run = folder / "runs/copied"
    lines = [line for line in (run / "events.jsonl").read_text().splitlines() if '"finish"' not in line]
    stop = {"event": "stop", "step": 300, "tokens": 9, "time": 1.76e9, "why": "the loss is nan"}
    (run / "events.jsonl").write_text("\n".join([*lines, json.dumps(stop)]) + "\n")
    assert read_run(run).loss == read_run(run).validation[-1][1]
    assert read_run(run).stopped == "the loss is nan"
    assert not read_run(run).finished


def test_a_loss_that_is_not_finite_is_a_gap(folder):
    run = folder / "runs/moved"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"loss": float("nan"), "grad_norm": float("inf")}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]))
    assert read_run(run).steps[-1]["loss"] is None


# A folder, what breaks it, and a part of the message. A tuple is a file with its new text, or with keys and a value.
BROKEN: list[tuple[str, Any, str]] = [
    (".", shutil.rmtree, "no such folder"),
    (".", lambda folder: (shutil.rmtree(folder), folder.write_text("")), "a file; give the folder"),
    (".", lambda folder: None, "no run (metrics.jsonl), study (study.json), check (check"),
    (".", ("check.json", '{"name": "x"}'), "check.json: passed: field required; to write the file again, run"),
    (".", ("runs.jsonl", ""), "has not finished; run the same leaven check command"),
    (".", ("demo.json", "{"), "demo.json: invalid JSON"),
    (".", ("demo.json", '{"schema": "leaven.demo/1"}'), "expected leaven.demo/2"),
    ("proxy", ("study.json", EMPTY_STUDY), "study.json: no trial has ended yet"),
    ("proxy", lambda folder: (folder / "centre.toml").unlink(), "centre.toml: no such file"),
    (
        "proxy",
        ("study.json", "dimensions", 0, "centre", 0.5),
        "in centre.toml, but the study began at 0.5; remove",
    ),
    ("runs/copied", ("metrics.jsonl", '{"step": 0}'), "no steps yet"),
    ("proxy", ("study.json", "radius", 1e200), "radius: 1e+200 is too large or too close to 0"),
]


@pytest.mark.parametrize(("part", "breaking", "message"), BROKEN)
def test_an_unreadable_folder_is_a_one_line_error(folder, part, breaking, message):
    if callable(breaking):
        breaking(folder / part)
    elif len(breaking) == 2:
        (folder / part / breaking[0]).write_text(breaking[1])
    else:
        edit(*breaking, folder / part)
    with refused(message):
        read_folder(folder / part)


@pytest.mark.parametrize(("part", "file"), [("check", "check.json"), ("proxy", "study.json"), ("demo", "demo.json")])
def test_a_changed_result_is_not_believed(folder: Path, part: str, file: str) -> None:
    path = folder / part / file
    document = sealed(json.loads(path.read_text()))
    changed = json.dumps(document).replace("4.", "3.", 1)
    path.write_text(changed)
    with refused(f"{file}: its content was changed after it was written; "):
        read_folder(folder / part)
    del document["blake2b"]
    path.write_text(json.dumps(document))
    with refused(f"{file}: its digest (blake2b) is missing; "):
        read_folder(folder / part)


def test_an_edited_best_toml_is_named_and_not_shown(folder):
    study = folder / "proxy"
    assert "best.toml is not shown" not in folder_page(study)
    best, path = read_study(study).best_recipe, "hyperparameters.lr"
    edit("study.json", "written", {"best.toml": digest((study / "best.toml").read_bytes())}, study)
    assert read_study(study).best_recipe == best
    write_recipe(best.replace({path: best.hyperparameters.lr / 2}), study / "best.toml")
    assert read_study(study).best_recipe is None
    assert "best.toml is not shown, because it was edited" in folder_page(study)


def test_damaged_events_and_links_to_a_missing_disk_are_named(folder: Path) -> None:
    run, study = folder / "runs/moved", folder / "proxy"
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] != "finish"]
    events.write_text("".join(kept))
    assert read_run(run).gaps == ""
    events.write_text("".join([kept[0], "\0" * 50 + "\n", *kept[2:]]))
    assert "line 2 of events.jsonl is damaged and was skipped" in read_run(run).gaps
    for file in (events, run / "metrics.jsonl"):
        content = file.read_bytes()
        file.unlink()
        file.symlink_to("away")
        with refused(f"{file.name} is a link to away, which is missing"):
            read_folder(run)
        (run / "away").write_bytes(content)
        read_folder(run)  # a link to a file is read
        (run / "away").unlink()
        file.unlink()
        file.write_bytes(content)
    (study / "best.toml").unlink()
    assert read_study(study).gap == ""
    (study / "best.toml").symlink_to("away")
    assert "best.toml is a link to away, which is missing" in folder_page(study)


def test_a_bug_in_a_page_is_not_blamed_on_the_files(folder, monkeypatch):
    def bug(check: CheckDocument) -> str:
        raise KeyError("a bug")

    monkeypatch.setattr("leaven.views.page.check_page", bug)
    with pytest.raises(KeyError):
        folder_page(folder / "check")
