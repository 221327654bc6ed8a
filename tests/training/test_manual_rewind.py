import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.planted import STEP, in_order, recipe, text

from leaven.documents import sealed
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.scaling.transfer import transfer
from leaven.training import checkpoint, run_folder
from leaven.training.rewind import ManualRewind, text_left_out
from leaven.training.run_folder import IDENTITY, RunFolder, checkpoints, read_state, tokens_of
from leaven.training.trainer import check, train
from leaven.views.folders import read_run

KEPT = {"stability__keep_every_tokens": 16 * STEP, "data__tokens": 64 * STEP}
RUN = recipe(**KEPT)
LOWER = recipe(**KEPT, hyperparameters__lr=0.002, schedule__decay="linear")


@pytest.fixture(autouse=True)
def stream_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch)


pytestmark = pytest.mark.xdist_group("by hand")  # one finished run for all


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        in_order(patch)
        torch.set_num_threads(1)
        train(RUN, text(), folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(finished, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def lines(run: RunFolder, key: str) -> list[float]:
    return [line[key] for line in run.metrics()]


@pytest.mark.long
def test_a_rewind_skips_data_and_changes_the_lr(run: RunFolder) -> None:
    before = RunFolder(run.path).metrics()
    rewind = ManualRewind(rewind_to=40 * STEP, skip_tokens=3 * STEP - 5)
    summary = train(LOWER, text(), run.path, rewind=rewind)
    assert summary.finished
    assert summary.rollbacks == 0  # no automatic rewind
    after = run.metrics()
    assert [line["step"] for line in after] == list(range(1, 65))
    # Checkpoints are due every 6.4 steps. The first at or after steps 16, 32 and 48 are kept: steps 20, 32 and 52.
    at = 32
    assert [line["loss"] for line in after[:at]] == [line["loss"] for line in before[:at]]
    assert after[at]["loss"] != before[at]["loss"]
    warmed_up = (at + 1 - 16) / (64 - 16)
    assert after[at]["lr"] == pytest.approx(0.002 * (1 - 0.9 * warmed_up))
    event = next(event for event in run.events() if event["event"] == "rewind")
    assert (event["to_tokens"], event["skip_from"]) == (at * STEP, at * STEP)
    assert event["skip_to"] == (at + 3) * STEP  # whole sequences
    assert {change["path"]: change["before"] for change in event["changes"]} == {
        "hyperparameters.lr": 0.01,
        "schedule.decay": "cosine",
    }
    written = read_recipe(run.recipe_file)
    assert written.hyperparameters.lr == 0.002
    assert written.why["hyperparameters.lr"] == f"since {at * STEP:,} tokens, by --rewind-to; before: 0.01"


def test_the_same_rewind_command_resumes_the_run(run: RunFolder) -> None:
    rewind = ManualRewind(rewind_to=40 * STEP)
    stopped = train(LOWER, text(), run.path, rewind=rewind, stop=lambda: len(run.metrics()) >= 45)
    assert not stopped.finished
    went_on = train(LOWER, text(), run.path, rewind=rewind)
    assert went_on.finished
    assert [event["event"] for event in run.events()].count("rewind") == 1
    assert train(LOWER, text(), run.path, rewind=rewind) == went_on
    assert train(LOWER, text(), run.path) == went_on
    with pytest.raises(InputError, match=r"hyperparameters.lr was 0.002, is now 0.01; .*--rewind-to"):
        train(RUN, text(), run.path)


def test_a_rewind_is_done_only_with_the_same_arguments_and_recipe(run: RunFolder) -> None:
    rewind = ManualRewind(rewind_to=40 * STEP)
    assert not rewind.done(run, LOWER)
    rewind.go(run, LOWER)
    assert rewind.done(run, LOWER)
    assert not rewind.done(run, RUN)
    assert not ManualRewind(rewind_to=40 * STEP, skip_tokens=STEP).done(run, LOWER)


def test_a_rewind_survives_a_kill_before_the_recipe_is_written(
    run: RunFolder, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_recipe", kill)
        with pytest.raises(Killed):
            train(LOWER, text(), run.path, rewind=ManualRewind(40 * STEP))
    assert read_recipe(run.recipe_file).hyperparameters.lr == 0.01
    assert run.recipe().hyperparameters.lr == 0.002
    assert train(LOWER, text(), run.path, rewind=ManualRewind(40 * STEP)).finished
    assert lines(run, "lr")[32] < lines(run, "lr")[31] / 4
    assert read_recipe(run.recipe_file).hyperparameters.lr == 0.002


def test_a_checkpoint_that_a_rewind_has_undone_is_not_said_to_be_the_newest(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped before it could remove or replace the later checkpoints."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove", lambda path: None)
        stopped = train(RUN, text(), run.path, rewind=ManualRewind(32 * STEP), stop=lambda: True)
    assert max(map(tokens_of, checkpoints(run.checkpoints))) == 64 * STEP
    assert (stopped.finished, stopped.saved_tokens) == (False, 32 * STEP)


def test_seconds_count_the_steps_that_rewinds_have_undone(run: RunFolder) -> None:
    finish = run.finish()
    assert finish is not None
    for target in (40, 20):  # stopped before a new checkpoint
        stopped = train(RUN, text(), run.path, rewind=ManualRewind(target * STEP), stop=lambda: True)
        assert not stopped.finished
        assert stopped.seconds == pytest.approx(finish["seconds"])
        shown = read_run(run.path).seconds
        assert shown is not None
        assert shown == pytest.approx(finish["seconds"])
    assert train(RUN, text(), run.path, rewind=ManualRewind(20 * STEP)).seconds > finish["seconds"]


@pytest.mark.parametrize("first", [20, 40])
def test_reasons_say_what_the_weights_were_trained_with_after_several_rewinds(run: RunFolder, first: int) -> None:
    """Also if the command's recipe has its own reason, and if the second rewind goes before the first."""
    lr, decay = "hyperparameters.lr", "hyperparameters.weight_decay"
    ManualRewind(first * STEP).go(run, LOWER)
    decayed = LOWER.replace({decay: 0.3, "why": {lr: "as Ada said"}})
    ManualRewind(20 * STEP).go(run, decayed)
    why = read_recipe(run.recipe_file).why
    assert why[lr] == f"since {20 * STEP:,} tokens, by --rewind-to; before: 0.01"
    assert why[decay].startswith(f"since {20 * STEP:,} tokens, by --rewind-to; before: ")
    assert run.recipe().why == why
    ManualRewind(20 * STEP).go(run, RUN)  # the lr of the whole run is again the first
    assert not [path for path, reason in read_recipe(run.recipe_file).why.items() if "--rewind-to" in reason]
    new = transfer(decayed.replace({"why": why}), width=2 * decayed.model.d_model)
    assert not [path for path, reason in new.why.items() if "--rewind-to" in reason]


def test_a_rewind_without_changes_moves_the_reasons_of_those_before(run: RunFolder) -> None:
    ManualRewind(rewind_to=40 * STEP).go(run, LOWER)
    lr = "hyperparameters.lr"
    assert read_recipe(run.recipe_file).why[lr].startswith(f"since {32 * STEP:,} tokens, by --rewind-to")
    ManualRewind(rewind_to=20 * STEP).go(run, LOWER)
    assert read_recipe(run.recipe_file).why[lr] == f"since {20 * STEP:,} tokens, by --rewind-to; before: 0.01"
    assert run.recipe().why[lr] == read_recipe(run.recipe_file).why[lr]


def test_a_rewind_names_the_values_that_it_changes(run: RunFolder) -> None:
    """Also those that an earlier rewind changed, and that are back as the recipe of the command has them."""
    for target, back in ((LOWER, False), (RUN, True)):
        with pytest.warns(UserWarning, match="the rewind changes values of the recipe") as seen:
            train(
                target, text(), run.path, rewind=ManualRewind(20 * STEP, skip_tokens=STEP * back), stop=lambda: True
            )
        told = "hyperparameters.lr was 0.002, is now 0.01" if back else "hyperparameters.lr was 0.01, is now 0.002"
        assert any(told in str(each.message) for each in seen)
        skips = f"the rewind skips {STEP:,} tokens of the text (whole sequences)"
        assert any(skips in str(each.message) for each in seen) == back


def test_a_rewind_takes_back_what_later_rewinds_skipped(run: RunFolder) -> None:
    losses = lines(run, "loss")
    train(RUN, text(), run.path, rewind=ManualRewind(32 * STEP, skip_tokens=STEP))
    assert lines(run, "loss") != losses
    assert text_left_out(run) == "256 tokens of its text after 8.19 k tokens"
    train(RUN, text(), run.path, rewind=ManualRewind(32 * STEP, skip_tokens=2 * STEP))  # two steps, not three
    other = lines(run, "loss")
    assert [event["skip_to"] - event["skip_from"] for event in run.events() if event["event"] == "rewind"] == [
        STEP,
        2 * STEP,
    ]
    train(RUN, text(), run.path, rewind=ManualRewind(52 * STEP, skip_tokens=STEP))  # the earlier one stays
    assert lines(run, "loss")[:52] == other[:52]
    assert text_left_out(run) == "768 tokens of its text after 8.19 k tokens"
    assert train(RUN, text(), run.path, rewind=ManualRewind(32 * STEP)).finished
    assert (lines(run, "loss"), text_left_out(run)) == (losses, None)


@pytest.mark.long
def test_data_skipped_by_a_rollback_stay_skipped(tmp_path: Path) -> None:
    longer, garbage = recipe(data__tokens=90 * STEP, stability__keep_every_tokens=9 * STEP), text(74, 3)
    first = train(longer, garbage, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    losses = lines(run, "loss")
    assert first.rollbacks == 1
    again = train(longer, garbage, run.path, rewind=ManualRewind(40 * STEP))
    assert (again.rollbacks, again.loss) == (0, first.loss)  # no automatic rewind since the manual one
    assert lines(run, "loss") == losses


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"model__dropout": 0.1},
            r"model.dropout was 0.0, is now 0.1; a rewind can change only the sections \[schedule\]",
        ),
        ({"hyperparameters__init_std": 0.2}, r"hyperparameters.init_std was 0.1, is now 0.2"),
    ],
)
def test_a_rewind_refuses_changes_that_a_run_cannot_make(
    finished: Path, change: dict[str, object], says: str
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=says):
        check(recipe(**KEPT | change), finished, ManualRewind(40 * STEP))
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("harm", ["a link", "a checkpoint of another run"])
def test_a_rewind_that_cannot_be_trained_writes_nothing(run: RunFolder, harm: str) -> None:
    newest = checkpoints(run.checkpoints)[-1]
    if harm == "a link":
        run.metrics_file.rename(run.path / "moved")
        run.metrics_file.symlink_to("moved")
    else:
        state = read_state(newest)
        state["state"][IDENTITY] = "another"
        (newest / "state.json").write_text(json.dumps(sealed(state)))
    before = run.events_file.read_bytes(), run.recipe_file.read_bytes()
    with pytest.raises(InputError, match="this is a link|different runs"):
        train(LOWER, text(), run.path, rewind=ManualRewind(40 * STEP))
    assert (run.events_file.read_bytes(), run.recipe_file.read_bytes()) == before


def test_a_rewind_without_a_checkpoint_is_refused(finished: Path) -> None:
    there = [tokens_of(path) for path in checkpoints(finished / "checkpoints")]
    with pytest.raises(InputError, match=r"no undamaged checkpoint at or before .* tokens; there are checkpoints"):
        check(RUN, finished, ManualRewind(min(there) - 1))


@pytest.mark.parametrize("wrong", [(8192.5, 0), (8192, -128), ("8k", 0), (True, 0)])
def test_a_rewind_is_in_whole_tokens(wrong: Any) -> None:
    with pytest.raises(InputError, match="give whole numbers of tokens, not below 0"):
        ManualRewind(*wrong)


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_a_rewind_to_a_checkpoint_that_is_away_does_not_go_further_back(run: RunFolder, harm: str) -> None:
    before, asked, newest = checkpoints(run.checkpoints)[-3:]
    if harm == "damaged":
        (asked / "state.json").unlink()
    else:
        shutil.rmtree(asked)
    at = tokens_of(asked)
    with pytest.raises(
        InputError, match=rf"{asked.name} is damaged or gone; .* type --rewind-to {tokens_of(before)} "
    ):
        train(LOWER, text(), run.path, rewind=ManualRewind(at))
    assert newest.exists()
    assert "rewind" not in {event["event"] for event in run.events()}
    check(LOWER, run.path, ManualRewind(at + 1))  # the newest that there is before this count
