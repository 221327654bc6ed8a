import errno
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.training.conftest import KEPT_STATE

from leaven.data.tokens import prepare
from leaven.documents import sealed
from leaven.errors import InputError
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import Recipe
from leaven.training.early_stopping import expected
from leaven.training.engine import Training
from leaven.training.metrics import Step
from leaven.training.outcome import Baseline, Outcome
from leaven.training.run_folder import checkpoints
from leaven.training.trial import TRIAL, WorkerPool, cooldown_start, train_trial

STEP = 256  # tokens
STATEFUL: dict[str, Any] = KEPT_STATE | {
    "batch.ramp": {"start_tokens": 128, "increment_tokens": 64, "over_tokens": 4 * STEP},
    "stability.noise_scale_every_tokens": 4 * STEP,
}


class Killed(Exception):
    pass


@contextmanager
def steps_counted(monkeypatch: pytest.MonkeyPatch, die_at: int | None = None) -> Iterator[list[int]]:
    """Yield a list of the steps that are taken in the block. The trial is killed after ``die_at`` steps."""
    done: list[int] = []
    issue = Training.issue

    def counted(training: Training) -> Any:
        if die_at is not None and len(done) == die_at:
            raise Killed
        done.append(training.progress.step + 1)
        return issue(training)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "issue", counted)
        yield done


def results(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.loss, outcome.tokens, outcome.flops, outcome.curve, outcome.stopped, outcome.branches


@pytest.mark.long
def test_the_outcome_of_a_trial(tiny: Recipe) -> None:
    recipe = tiny.replace({**STATEFUL, "data.tokens": 36 * STEP})
    training = Training(recipe, prepare(recipe.data, 320))
    steps = []
    while not training.finished:
        steps.append(training.step())
    outcome = train_trial(recipe)
    assert outcome.loss == training.evaluate()
    assert outcome.tokens == training.progress.tokens >= 36 * STEP
    assert outcome.flops == outcome.tokens * flops_per_token(recipe.model)
    assert outcome.worker.endswith(f":{os.getpid()}")
    assert outcome.seconds > 0
    assert not outcome.stopped
    assert len(outcome.curve) == 32
    before = 0
    for number, (tokens, loss) in enumerate(outcome.curve, 1):
        stretch = [step for step in steps if before < step.tokens <= tokens]
        mean = sum(step.loss * step.batch_tokens for step in stretch) / (tokens - before)
        assert loss == pytest.approx(mean, rel=1e-12)
        assert number / 32 * 36 * STEP <= tokens < number / 32 * 36 * STEP + STEP
        before = tokens


def test_a_trial_that_diverges_ends_there(tiny: Recipe) -> None:
    outcome = train_trial(tiny.replace({"hyperparameters.lr": 500.0, "hyperparameters.weight_decay": 0.0}))
    assert outcome.diverged
    assert 0 < outcome.tokens < tiny.data.tokens
    assert all(math.isfinite(loss) for _, loss in outcome.curve)


@pytest.mark.long
def test_a_trial_that_cannot_reach_the_baseline_is_pruned(tiny: Recipe) -> None:
    whole = train_trial(tiny)
    better = Baseline(tuple((tokens, loss - 2) for tokens, loss in whole.curve), whole.loss - 2, 0.01)
    outcome = train_trial(tiny, baseline=better)
    assert outcome.stopped
    assert outcome.tokens < tiny.data.tokens / 2
    assert outcome.curve == whole.curve[: len(outcome.curve)]
    assert outcome.loss == expected(outcome.curve, better) > better.loss
    assert outcome.flops == outcome.tokens * flops_per_token(tiny.model)
    # A trial that is as good as the baseline runs to its end, and so does one with a baseline of another duration.
    assert results(train_trial(tiny, baseline=Baseline(whole.curve, whole.loss, 0.01))) == results(whole)
    longer = Baseline(tuple((tokens * 2, loss) for tokens, loss in better.curve), better.loss, 0.01)
    assert results(train_trial(tiny, baseline=longer)) == results(whole)


def test_no_trial_is_pruned_during_warmup(tiny: Recipe) -> None:
    recipe = tiny.replace({"schedule.warmup_tokens": 20 * STEP})
    whole = train_trial(recipe)
    better = Baseline(tuple((t, loss - 2) for t, loss in whole.curve), whole.loss - 2, 0.01)
    outcome = train_trial(recipe, baseline=better)
    assert outcome.stopped
    assert outcome.tokens > 20 * STEP


@pytest.mark.long
def test_a_killed_trial_resumes_bit_for_bit(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = tiny.replace(STATEFUL | {"data.tokens": 20 * STEP}), tmp_path / "trial"
    with steps_counted(monkeypatch, die_at=13), pytest.raises(Killed):
        train_trial(recipe, checkpoint=folder, checkpoint_seconds=0)
    assert folder.exists()
    with steps_counted(monkeypatch) as done:
        retried = train_trial(recipe, checkpoint=folder)
    assert results(retried) == results(train_trial(recipe))
    assert done == list(range(14, recipe.steps + 1))


@pytest.fixture
def brief(tiny: Recipe) -> Recipe:
    return tiny.replace({"data.tokens": 8 * STEP})


def test_torn_checkpoints_and_those_of_other_trials_are_ignored(
    brief: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = train_trial(brief), tmp_path / "trial"
    for recipe in (brief.replace({"hyperparameters.lr": 0.02}), brief.replace({"data.seed": 1}), brief):
        others = set(folder.glob("*"))
        with steps_counted(monkeypatch, die_at=3) as done, pytest.raises(Killed):
            train_trial(recipe, checkpoint=folder, checkpoint_seconds=0)
        assert done[0] == 1
    (mine,) = set(folder.glob("*")) - others
    (kept,) = checkpoints(mine)  # only the newest is kept
    weights = kept / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with steps_counted(monkeypatch) as done, pytest.warns(UserWarning, match=f"{kept.name} is ignored: it is dam"):
        assert results(train_trial(brief, checkpoint=folder, checkpoint_seconds=0)) == results(whole)
    assert done[0] == 1


def test_a_checkpoint_copied_from_another_trial_is_ignored(
    brief: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = train_trial(brief), tmp_path / "trial"
    with steps_counted(monkeypatch, die_at=3), pytest.raises(Killed):
        train_trial(brief.replace({"hyperparameters.lr": 0.02}), checkpoint=folder, checkpoint_seconds=0)
    (other,) = folder.iterdir()
    with steps_counted(monkeypatch, die_at=3), pytest.raises(Killed):
        train_trial(brief, checkpoint=folder, checkpoint_seconds=0)
    (mine,) = set(folder.iterdir()) - {other}
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    with steps_counted(monkeypatch) as done, pytest.warns(UserWarning, match="it belongs to another trial"):
        assert results(train_trial(brief, checkpoint=folder)) == results(whole)
    assert done[0] == 1
    reseal(mine, lambda state: {TRIAL: mine.name})
    with pytest.raises(InputError, match="was not written by this trial; remove this folder"):
        train_trial(brief, checkpoint=folder)


def reseal(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the state of the callbacks in the only checkpoint in a folder, and its digest."""
    (checkpoint,) = checkpoints(folder)
    state = json.loads((checkpoint / "state.json").read_text())
    del state["blake2b"]
    state["state"] = change(state["state"])
    (checkpoint / "state.json").write_text(json.dumps(sealed(state)))


@pytest.mark.parametrize("d_ff", [48, 128])
def test_a_checkpoint_of_another_width_is_not_trained_on(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, d_ff: int
) -> None:
    assert tiny.model.d_ff != d_ff
    folder, others = tmp_path / "trial", tmp_path / "others"
    for recipe, where in ((tiny, folder), (tiny.replace({"model.d_ff": d_ff}), others)):
        with steps_counted(monkeypatch, die_at=3), pytest.raises(Killed):
            train_trial(recipe, checkpoint=where, checkpoint_seconds=0)
    (mine,), (other,) = folder.iterdir(), others.iterdir()
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    reseal(mine, lambda state: state | {TRIAL: mine.name})
    with steps_counted(monkeypatch, die_at=1) as done, pytest.raises(Killed), pytest.warns(match="other parameters"):
        train_trial(tiny, checkpoint=folder)
    assert done == [1]


def test_a_short_trial_writes_nothing_and_a_full_disk_does_not_stop_one(brief: Recipe, tmp_path: Path) -> None:
    away = tmp_path / "checkpoints"
    away.symlink_to(tmp_path / "unmounted" / "scratch")
    whole = train_trial(brief)
    with pytest.warns(
        UserWarning, match=f"^no checkpoint of a trial can be saved in {away} \\(File exists\\); aft"
    ) as told:
        assert results(train_trial(brief, checkpoint=away / "000000-000000", checkpoint_seconds=0)) == results(whole)
    assert len({str(each.message) for each in told}) == 1
    assert results(train_trial(brief, checkpoint=tmp_path / "none")) == results(whole)
    assert not (tmp_path / "none").exists()


DURATIONS = (12 * STEP, 16 * STEP, 24 * STEP)
WSD: dict[str, Any] = {"schedule.decay": "wsd", "schedule.min_lr_ratio": 0.03, "schedule.decay_ratio": 0.3}


@pytest.mark.long
@pytest.mark.parametrize("how", ["by its losses", "at its end"])
def test_a_branch_that_diverges_leaves_the_trunk_alone(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The first branch is shorter than a quarter of the trunk, and is judged by its own length."""
    recipe, durations = tiny.replace(WSD), (6 * STEP, 32 * STEP)
    whole = train_trial(recipe, durations=durations)
    issue, evaluate = Training.issue, Training.evaluate

    def lost(training: Training) -> Callable[[], Step]:
        read, hurt = issue(training), training.recipe.data.tokens == durations[0]
        return lambda: replace(read(), loss=1e3) if hurt else read()

    if how == "by its losses":
        monkeypatch.setattr(Training, "issue", lost)
    else:
        monkeypatch.setattr(
            Training, "evaluate", lambda self: math.nan if self.recipe.data.tokens == durations[0] else evaluate(self)
        )
    hurt = train_trial(recipe, durations=durations)
    assert [tokens for tokens, _ in whole.branches] == [*durations]
    assert hurt.branches == whole.branches[1:]
    assert (hurt.loss, hurt.curve) == (whole.loss, whole.curve)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [WSD | STATEFUL | {"batch.ramp": None}, WSD | {"schedule.decay_ratio": 1.0}], ids=["stateful", "all"]
)
def test_branches_are_the_runs_of_their_durations_bit_for_bit(tiny: Recipe, changes: dict[str, Any]) -> None:
    recipe = tiny.replace(changes)
    alone = [train_trial(recipe.replace({"data.tokens": duration})) for duration in DURATIONS]
    together = train_trial(recipe, durations=(DURATIONS[2], *DURATIONS[:2]))
    assert together.branches == tuple((each.tokens, each.loss) for each in alone)
    assert together.loss == alone[-1].loss
    assert together.curve == alone[-1].curve
    starts = [cooldown_start(recipe.schedule, duration) // STEP * STEP for duration in DURATIONS[:2]]
    cooled = sum(duration - start for duration, start in zip(DURATIONS, starts, strict=False))
    assert together.tokens == DURATIONS[2] + cooled < sum(DURATIONS)


@pytest.mark.kills
def test_branches_resume_after_kills(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = tiny.replace(WSD | STATEFUL | {"batch.ramp": None}), tmp_path / "trial"
    whole = train_trial(recipe, durations=DURATIONS)
    # 8 steps of trunk, 4 of cooldown, 3 of trunk, 5 of cooldown, 13 of trunk. The kills are in the first cooldown,
    # which starts again, in the trunk after it, and in the second cooldown.
    for at in (10, 6, 4):
        with steps_counted(monkeypatch, die_at=at), pytest.raises(Killed):
            train_trial(recipe, durations=DURATIONS, checkpoint=folder, checkpoint_seconds=0)
    with steps_counted(monkeypatch) as done:
        retried = train_trial(recipe, durations=DURATIONS, checkpoint=folder, checkpoint_seconds=0)
    assert results(retried) == results(whole)
    assert done == [*range(12, 17), *range(12, 25)]


BASE = {"width": 16, "depth": 2, "batch_tokens": 256, "tokens": 10_240}


@pytest.mark.parametrize(
    ("changes", "durations", "says"),
    [
        (
            {},
            DURATIONS,
            'durations: with decay = "cosine", several durations cannot share one run; set schedule.decay = "wsd"',
        ),
        (WSD, (3_000, 3_584), "3,000 tokens are not a whole number of batches; take 2,816 or 3,072"),
        (WSD, (1_024, 3_584), "1,024 tokens do not exceed the warm-up of 1,024"),
        (WSD, (3_584, 10_240_000), "10,240,000 tokens read .* times, which"),
        (WSD | {"scaling.base": BASE}, DURATIONS, "rule complete-d-p gives each duration other hyperparameters"),
    ],
)
def test_durations_without_a_common_trunk_are_refused(
    tiny: Recipe, changes: dict[str, Any], durations: tuple[int, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says) as error:
        train_trial(tiny.replace(changes), durations=durations)
    assert "\n" not in str(error.value)


def test_workers_that_cannot_share_memory_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("leaven.data.pool.ProcessPoolExecutor", read_only)
    with pytest.raises(InputError, match=r"because /dev/shm cannot be written \(Read-only file system\); make room"):
        WorkerPool(1)


def test_a_pool_that_was_left_has_no_thread_that_could_print_while_python_exits() -> None:
    before = set(threading.enumerate())
    with WorkerPool(1) as pool:
        waiting = pool.submit(time.sleep, 100)
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
    with pytest.raises(BrokenProcessPool):
        waiting.result()
    with pytest.raises((BrokenProcessPool, RuntimeError)):
        pool.submit(os.getpid)
    assert set(threading.enumerate()) == before


@pytest.mark.kills
def test_only_sigkill_ends_a_worker_and_the_others_of_a_broken_pool_end_as_well() -> None:
    with WorkerPool(2) as pool:
        assert pool.submit(os.getpid).result()
        lasting = [pool.submit(time.sleep, 100) for _ in range(2)]
        workers = [psutil.Process(number) for number in pool._executor._processes]
        for worker in workers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                worker.send_signal(number)
        assert not psutil.wait_procs(workers, timeout=0.3)[0]
        workers[0].kill()
        with pytest.raises(BrokenProcessPool):
            lasting[0].result()
        assert pool.submit(os.getpid).result() not in {worker.pid for worker in workers}
        assert not psutil.wait_procs(workers, timeout=10)[1]
