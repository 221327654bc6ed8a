"""Planted faults (garbage data, jumps of the lr, nan weights) are detected, rolled back and skipped, also after kill
-9."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import small_disk
from tests.training.planted import STEP, in_order, recipe, text

from leaven.data.tokens import TokenSet
from leaven.documents.runs import TrainDocument
from leaven.errors import InputError
from leaven.recipe.files import write_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.loop import Diverged
from leaven.training.metrics import Step
from leaven.training.run_folder import RunFolder, checkpoints, tokens_of
from leaven.training.trainer import train

NOISE = 0.01  # nats
SHARD, SCRAP = text(130, 12), text(130, 3)  # garbage for twelve steps, and for three


@pytest.fixture(autouse=True)
def stream_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(monkeypatch)


Result = tuple[float, RunFolder]


pytestmark = pytest.mark.xdist_group("recovery")  # many of these tests compare with the same few runs


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TokenSet, int], Result]:
    """Return a function from text and seed to the loss and folder of a run with all defaults. It trains each run
    once."""
    known: dict[tuple[str, int], Result] = {}

    def result(tokens: TokenSet, seed: int = 0) -> Result:
        key = (tokens.fingerprint, seed)
        if key not in known:
            known[key] = ended(recipe(data__seed=seed), tokens, tmp_path_factory.mktemp("run") / "run")[1:]
        return known[key]

    return result


@pytest.fixture
def calm(run_once: Callable[..., Result]) -> float:
    loss, run = run_once(text())
    assert not events(run, "rollback")
    return loss


@pytest.mark.slow
def test_the_loss_varies_by_less_than_the_noise_between_seeds(run_once: Callable[..., Result]) -> None:
    losses = [run_once(text(), seed)[0] for seed in range(3)]
    assert max(losses) - min(losses) < NOISE


def ended(recipe: Recipe, tokens: TokenSet, folder: Path, **options: Any) -> tuple[TrainDocument, float, RunFolder]:
    summary = train(recipe, tokens, folder, **options)
    assert summary.loss is not None
    run = RunFolder(folder)
    assert [line["step"] for line in run.metrics()] == list(range(1, 161))  # each step once, also after rollbacks
    return summary, summary.loss, run


def events(run: RunFolder, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == name]


def rollbacks(run: RunFolder) -> list[dict[str, Any]]:
    """Return the rollbacks without their times, which differ between two runs."""
    times = {"time", "seconds"}
    return [{key: value for key, value in event.items() if key not in times} for event in events(run, "rollback")]


@pytest.mark.long
def test_a_rollback_skips_a_shard_of_garbage(calm: float, run_once: Callable[..., Result]) -> None:
    loss, run = run_once(SHARD)
    assert abs(loss - calm) < NOISE
    first, second = rollbacks(run)
    assert (first["onset"], first["step"], first["attempt"]) == (131, 133, 1)
    assert first["to_tokens"] == first["skip_from"] == 130 * STEP
    assert first["numbers"]["loss"]["value"] > first["numbers"]["loss"]["median"] + 3
    assert second["attempt"] == 2
    # Skipped: the garbage, and what the attempts added before and after it.
    assert second["skip_from"] < 130 * STEP < 142 * STEP < second["skip_to"]
    assert max(line["loss"] for line in run.metrics()[100:]) < 2


@pytest.mark.slow
def test_without_the_guard_garbage_costs_more_than_noise(tmp_path: Path, calm: float) -> None:
    summary, loss, _ = ended(recipe(stability__on_spike="off"), SHARD, tmp_path / "run")
    assert summary.rollbacks == 0
    assert loss > calm + 3 * NOISE


@pytest.mark.long
def test_rollbacks_do_not_depend_on_stops_or_damaged_checkpoints(
    tmp_path: Path, run_once: Callable[..., Result]
) -> None:
    loss, whole = run_once(SHARD)
    run = RunFolder(tmp_path / "run")
    train(recipe(), SHARD, run.path, stop=lambda: len(run.metrics()) >= 129)
    newest = checkpoints(run.checkpoints)[-1]
    (newest / "model.safetensors").write_bytes(b"")
    assert ended(recipe(), SHARD, run.path)[1] == loss
    assert events(run, "resume")[0]["damaged_checkpoints"] == [newest.name]
    assert rollbacks(run) == rollbacks(whole)
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in whole.metrics()]


@pytest.mark.long
def test_a_stop_during_an_anomaly_does_not_change_the_rollback(tmp_path: Path) -> None:
    """A checkpoint is due every four steps, and one is kept. The checkpoint of the stop lies between the last one
    that was due and the start of the anomaly."""
    few = recipe(stability__checkpoint_every_tokens=4 * STEP, stability__keep=1, data__tokens=140 * STEP)
    whole, run = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    train(few, SHARD, whole.path)
    train(few, SHARD, run.path, stop=lambda: len(run.metrics()) >= 130)
    train(few, SHARD, run.path)
    assert rollbacks(whole)
    assert rollbacks(run) == rollbacks(whole)


def with_lr(monkeypatch: pytest.MonkeyPatch, factor: Callable[[Training], float]) -> None:
    """Multiply the lr of each step by a factor that is not part of the schedule."""
    issue = Training.issue

    def jumping(self: Training) -> Callable[[], Step]:
        by, step = factor(self), self.optimizer.step
        monkeypatch.setattr(
            self.optimizer, "step", lambda multiplier, *rest, **more: step(multiplier * by, *rest, **more)
        )
        try:
            return issue(self)
        finally:
            monkeypatch.setattr(self.optimizer, "step", step)

    monkeypatch.setattr(Training, "issue", jumping)


def once(first: int, steps: int, factor: float) -> Callable[[Training], float]:
    """Return a function that gives ``factor`` for some steps, but not again after a rollback."""
    last, over = 0, False

    def by(training: Training) -> float:
        nonlocal last, over
        step = training.progress.step + 1
        over, last = over or step <= last, step
        return factor if first <= step < first + steps and not over else 1.0

    return by


@pytest.mark.long
def test_a_rollback_undoes_a_jump_of_the_lr(tmp_path: Path, calm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with_lr(monkeypatch, once(120, 20, 30.0))
    summary, loss, run = ended(recipe(), text(), tmp_path / "run")
    assert abs(loss - calm) < NOISE
    assert summary.rollbacks == 1
    assert rollbacks(run)[0]["onset"] == 120
    assert "update norm" in rollbacks(run)[0]["why"]


def test_a_lr_that_stays_too_high_stops_the_run_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lr(monkeypatch, lambda training: 30.0 if training.progress.step >= 100 else 1.0)
    with pytest.raises(Diverged, match="2 rollbacks did not help"):
        train(recipe(stability__max_rollbacks=2), text(), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert [event["attempt"] for event in rollbacks(run)] == [1, 2]
    assert run.events()[-1]["event"] == "stop"
    # The last good checkpoint is there, and the same command has the same result.
    assert tokens_of(checkpoints(run.checkpoints)[0]) <= 100 * STEP
    with pytest.raises(Diverged, match="2 rollbacks did not help"):
        train(recipe(stability__max_rollbacks=2), text(), tmp_path / "run")


@pytest.mark.slow  # tests/distributed/test_faults.py does the same with two processes
def test_a_rollback_undoes_a_nan_weight(tmp_path: Path, calm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight becomes nan, as after a memory fault. The loss is nan from this step on, and no step is applied."""
    broken = once(101, 1, 2.0)
    issue = Training.issue

    def breaking(self: Training) -> Callable[[], Step]:
        if broken(self) > 1:
            with torch.no_grad():
                next(iter(self.model.parameters()))[0] = torch.nan
        return issue(self)

    monkeypatch.setattr(Training, "issue", breaking)
    _, loss, run = ended(recipe(), text(), tmp_path / "run")
    assert [(event["onset"], event["step"]) for event in rollbacks(run)] == [(101, 101)]
    assert "loss nan" in rollbacks(run)[0]["why"]
    assert abs(loss - calm) < NOISE


@pytest.mark.long
def test_a_lower_lr_after_a_rollback_rises_back(tmp_path: Path, run_once: Callable[..., Result]) -> None:
    lower = recipe(stability__rollback_lr=0.25, stability__rollback_lr_tokens=10 * STEP)
    _, _, run = ended(lower, SCRAP, tmp_path / "run")
    usual = run_once(SCRAP)[1]
    factors = [a["lr"] / b["lr"] for a, b in zip(run.metrics(), usual.metrics(), strict=True)]
    assert factors[:130] == [1.0] * 130
    assert factors[130:140] == pytest.approx([0.25 + 0.075 * n for n in range(1, 11)])
    assert factors[140:] == [1.0] * 20


@pytest.mark.long
def test_skip_leaves_the_garbage_out_step_by_step(tmp_path: Path, calm: float) -> None:
    summary, loss, run = ended(recipe(stability__on_spike="skip"), SHARD, tmp_path / "run")
    assert summary.rollbacks == 0
    left_out = [event["step"] for event in events(run, "skip")]
    assert set(range(131, 143)) <= set(left_out)
    assert len(left_out) < 20
    assert [line["step"] for line in run.metrics() if line["skipped"]] == left_out
    assert all(run.metrics()[step - 1]["update_norm"] == 0 for step in left_out)
    assert abs(loss - calm) < NOISE


@pytest.mark.long
def test_on_spike_stop_ends_the_run_with_a_report(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"loss .* standard deviations above its median, loss 1.* within 3 steps"):
        train(recipe(stability__on_spike="stop"), SHARD, tmp_path / "run")
    assert RunFolder(tmp_path / "run").events()[-1]["numbers"]["loss"]["sum"] >= 24


@pytest.mark.long
def test_a_rollback_without_a_whole_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")

    def on_step(step: Step) -> None:
        if step.step == 133:  # the anomaly is detected here
            while [tokens_of(path) for path in checkpoints(run.checkpoints)] != [112 * STEP, 128 * STEP]:
                time.sleep(0.01)  # the last one is being written
            for path in checkpoints(run.checkpoints):
                (path / "model.safetensors").write_bytes(b"")

    with pytest.raises(InputError, match=r"no checkpoint can be used \(damaged: tokens-"):
        train(recipe(), SHARD, run.path, on_step=on_step)
    assert not events(run, "rollback")
    assert len(run.metrics()) == 133
    assert [tokens_of(path) for path in checkpoints(run.checkpoints)] == [112 * STEP, 128 * STEP]


@pytest.mark.long
def test_suspicious_checkpoints_do_not_displace_the_last_good_one(
    tmp_path: Path, run_once: Callable[..., Result]
) -> None:
    """A checkpoint is due every step, and one is kept. Those of steps 131 and 132 are written before the anomaly is
    detected at 133."""
    each = recipe(stability__checkpoint_every_tokens=STEP, stability__keep=1)
    _, loss, run = ended(each, SCRAP, tmp_path / "run")
    kinds = {"checkpoint": "saved", "rollback": "back"}
    order = [(kinds[event["event"]], event["step"]) for event in run.events() if event["event"] in kinds]
    at = order.index(("back", 133))
    assert order[at - 2 : at + 2] == [("saved", 131), ("saved", 132), ("back", 133), ("saved", 131)]
    assert loss == run_once(SCRAP)[0]  # no matter from which checkpoint


@pytest.mark.kills
def test_a_run_killed_at_any_moment_has_the_same_bits(tmp_path: Path) -> None:
    """20 kills of a run with dropout, a ramp and a rollback; six more within the rollback."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.training.kills", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    document = json.loads(done.stdout)
    runs, counts = document["runs"], document["counts"]
    assert counts["kills"] == 20
    assert counts["saving"] >= 5
    # Two steps from checkpoint to checkpoint (four while the batch is small), and as many until one is written.
    assert counts["lost"] <= 8
    assert len(runs["whole"]["rollbacks"]) == 1
    for name, run in runs.items():
        assert run == runs["whole"], name


def fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1000)):
            pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("until", "elsewhere"), [(120, False), pytest.param(None, False, marks=pytest.mark.slow), (None, True)]
)
def test_a_full_disk_does_not_stop_a_run(
    tmp_path: Path, run_once: Callable[..., Result], until: int | None, elsewhere: bool
) -> None:
    """The file system is full from step 40 to step 120, or until the run waits at its end. Checkpoints may be on
    another disk."""
    with small_disk(tmp_path, "2m") as disk:
        ballast, reported = disk / "ballast", []
        if elsewhere:
            (tmp_path / "checkpoints").mkdir()
            (disk / "run").mkdir()
            write_recipe(recipe(), disk / "run" / "recipe.toml")
            (disk / "run" / "checkpoints").symlink_to(tmp_path / "checkpoints")

        def on_step(step: Step) -> None:
            if step.step == 40:
                fill(ballast)
            if step.step == until:
                ballast.unlink()

        def on_event(event: str, values: dict[str, Any]) -> None:
            reported.append((event, values["step"]))
            if event == "waits":
                ballast.unlink()

        _, loss, run = ended(recipe(), text(), disk / "run", on_step=on_step, on_event=on_event)
        assert loss == run_once(text())[0]
        failed = [step for event, step in reported if event == "checkpoint_failed"]
        assert failed[:1] == [48] * (not elsewhere)
        assert elsewhere or until is None or failed[-1] in (96, 112)
        assert [event["step"] for event in events(run, "checkpoint_failed")] == failed  # written when there was room
        of_disk = [event for event, _ in reported if event in {"unwritten", "waits"}]
        assert of_disk == ["unwritten"] + ["waits"] * (until is None)
        assert [event["event"] for event in run.events()] == [
            event for event, _ in reported if event not in {"unwritten", "waits"}
        ]
        assert len(run.metrics()) == run.metrics()[-1]["step"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["checkpoint", "lines"])
def test_a_run_that_waits_at_its_end_for_a_full_disk_can_be_stopped(
    tmp_path: Path, run_once: Callable[..., Result], elsewhere: bool
) -> None:
    """It can be resumed like any stopped run, also if its checkpoints are on another disk."""
    with small_disk(tmp_path, "2m") as disk:
        if elsewhere:
            (tmp_path / "checkpoints").mkdir()
            (disk / "run").mkdir()
            write_recipe(recipe(), disk / "run" / "recipe.toml")
            (disk / "run" / "checkpoints").symlink_to(tmp_path / "checkpoints")
        seen = list[str]()

        def on_step(step: Step) -> None:
            if step.step == 40:
                fill(disk / "ballast")

        stopped = train(
            recipe(),
            text(),
            disk / "run",
            on_step=on_step,
            on_event=lambda event, values: seen.append(event),
            stop=lambda: "waits" in seen,
        )
        assert not stopped.finished
        assert "lines_lost" in seen
        assert (stopped.unsaved is None) == elsewhere
        (disk / "ballast").unlink()
        lost = pytest.warns(UserWarning, match="metrics.jsonl is not as the run wrote it")
        with lost if elsewhere else nullcontext():  # else the steps are trained again
            assert train(recipe(), text(), disk / "run").loss == run_once(text())[0]
