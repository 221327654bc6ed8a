"""Curves: TensorBoard files are read with its own reader, and trackers are modules that record the calls."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.training.conftest import losses, scalars

from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.metrics import Tracker, writers
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train

TRACKER = """
import json
from pathlib import Path

def _say(*call):
    with Path({path!r}).open("a") as file:
        file.write(json.dumps(call) + "\\n")

def init(**known):
    print("* project initialized")
    _say("init", known)
def define_metric(name, step_metric): _say("define", name, step_metric)
def log(values, step):
    {log}
    _say("log", step, values)
def finish(): _say("finish")
"""


def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, log: str = "") -> Path:
    """Make a module with the interface of W&B and trackio. Return the file to which it writes the calls that it
    gets."""
    calls = tmp_path / f"{name}.jsonl"
    (tmp_path / f"{name}.py").write_text(TRACKER.format(path=str(calls), log=log))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return calls


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_step_also_after_a_stop(
    tiny: Recipe,
    tokens: TokenSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    calls = tracker(tmp_path, monkeypatch, name)
    folder = tmp_path / "run"
    tiny = tiny.replace({"data.tokens": 2_560})
    train(tiny, tokens, folder, log_to=[name], stop=lambda: len(RunFolder(folder).metrics()) >= 4)
    train(tiny, tokens, folder, log_to=[name])
    monkeypatch.delitem(sys.modules, name)
    said = [json.loads(line) for line in calls.read_text().splitlines()]
    first, second = (call[1] for call in said if call[0] == "init")
    assert first == second
    assert (first["project"], first["resume"]) == ("tiny", "allow")
    assert name == "wandb" or capsys.readouterr().out == ""  # may be a JSON document
    assert first["config"]["hyperparameters"]["lr"] == 0.01
    # W&B continues the run of this id, trackio that of this name.
    assert len({first["id"] if name == "wandb" else first["name"], "run"}) == 2
    assert name == "trackio" or first["name"] == "run"
    assert [call[0] for call in said].count("finish") == 2
    logged = [(call[1], call[2]) for call in said if call[0] == "log"]
    lines = RunFolder(folder).metrics()
    steps = [(step, values) for step, values in logged if "train/loss" in values]
    assert [step for step, _ in steps] == [line["step"] for line in lines] == list(range(1, 11))
    for (_, values), line in zip(steps, lines, strict=True):
        assert values["tokens"] == line["tokens"]
        for key in ("loss", "lr", "grad_norm", "tflops", "mfu", "memory_gib"):
            assert values[f"train/{key}"] == line[key]
        assert values["update_norm/mlp.out"] == line["modules"]["mlp.out"][0]
    validations = [event for event in RunFolder(folder).events() if event["event"] == "validation"]
    assert [(step, values["validation/bits_per_byte"]) for step, values in logged if "validation/loss" in values] == [
        (event["step"], event["bits_per_byte"]) for event in validations
    ]


class Wandb(ModuleType):
    """Ignores steps before the last one, as W&B does."""

    def __init__(self, step: int) -> None:
        super().__init__("wandb")
        self.run, self.points, self.axes = SimpleNamespace(step=step), dict[int, dict[str, float]](), list[str]()

    def init(self, **known: Any) -> None:
        pass

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes += [name, step_metric]

    def log(self, values: dict[str, float], step: int) -> None:
        if step >= self.run.step:
            self.run.step = step
            self.points.setdefault(step, {}).update(values)


def test_wandb_keeps_steps_that_are_trained_again(tiny: Recipe, tmp_path: Path) -> None:
    """After four steps a rollback goes back to the second one, and after a kill the fourth is repeated again."""
    module, run = Wandb(0), RunFolder(tmp_path / "run")
    run.path.mkdir()
    tracker = Tracker(module, run, tiny)
    for step in (1, 2, 3, 4, 3, 4):
        tracker.write(step, 256 * step, {"train/loss": step})
    tracker.write(4, 1_024, {"validation/loss": 4})
    assert module.axes == ["*", "tokens"]
    assert [point["tokens"] for point in module.points.values()] == [256, 512, 768, 1_024, 768, 1_024]
    assert module.points[6] == {"tokens": 1_024, "step": 4, "train/loss": 4, "validation/loss": 4}
    tracker = Tracker(module, run, tiny)
    for step in (4, 5):
        tracker.write(step, 256 * step, {"train/loss": step})
    assert [point["tokens"] for point in module.points.values()][-2:] == [1_024, 1_280]


@pytest.mark.parametrize(("name", "key", "begin"), [("wandb", "id", "tiny-seed0-"), ("trackio", "name", "seed0-")])
def test_runs_in_folders_of_one_name_are_runs_of_their_own(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str, begin: str
) -> None:
    calls = tracker(tmp_path, monkeypatch, name)
    short = tiny.replace({"data.tokens": 512, "schedule.warmup_tokens": 128})
    for folder in ("a/seed0", "b/seed0"):
        (tmp_path / folder).parent.mkdir()
        train(short, tokens, tmp_path / folder, log_to=[name])
    monkeypatch.delitem(sys.modules, name)
    first, second = (call[1][key] for call in map(json.loads, calls.read_text().splitlines()) if call[0] == "init")
    assert first != second
    assert first.startswith(begin)


def test_a_failing_tracker_does_not_stop_the_run(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tracker(tmp_path, monkeypatch, "trackio", log="if step == 3: raise ConnectionError('no network')")
    summary = train(tiny, tokens, tmp_path / "run", log_to=["trackio", "tensorboard"])
    monkeypatch.delitem(sys.modules, "trackio")
    assert summary.finished
    (lost,) = [event for event in RunFolder(tmp_path / "run").events() if event["event"] == "curves_lost"]
    # The third step is read when the fourth has been issued.
    assert (lost["writer"], lost["why"], lost["step"]) == ("trackio", "ConnectionError: no network", 4)
    assert len(calls.read_text().splitlines()) == 3  # init and two steps
    written = scalars(tmp_path / "run")
    assert len(written["train/loss"]) == 40
    assert written["validation/loss"][-1] == (10_240, pytest.approx(summary.loss))


def test_writers_have_names_that_are_known(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--log-to tensorbord: give none, or some of tensorboard, wandb, trackio"):
        train(tiny, tokens, tmp_path / "run", log_to="tensorboard,tensorbord")
    assert not (tmp_path / "run").exists()
    assert writers("tensorboard") == writers(["tensorboard"]) == ("tensorboard",)
    assert writers("none") == writers(()) == ()


def test_curves_of_a_resumed_run_have_each_step_once(tiny: Recipe, tokens: TokenSet, tmp_path: Path) -> None:
    recipe = tiny.replace({"data.tokens": 5_120, "stability.checkpoint_every_tokens": 1_280})
    train(recipe, tokens, tmp_path / "run", log_to=["tensorboard"], stop=lambda: len(losses(tmp_path / "run")) >= 8)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    shutil.rmtree(newest)  # as after a crash: three steps are repeated
    train(recipe, tokens, tmp_path / "run", log_to=["tensorboard"])
    assert [step for step, _ in scalars(tmp_path / "run")["train/loss"]] == [256 * n for n in range(1, 21)]


def test_writers_by_name() -> None:
    assert writers(None) == ("tensorboard",)
    assert writers("none") == ()
    assert writers("tensorboard,tensorboard") == ("tensorboard",)
