"""A stack of trials has the losses of the engine, and a study with stacks has the trials of any study."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leaven.cli import app
from leaven.data.tokens import TokenSet, prepare
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.training import device, stack
from leaven.training.outcome import Outcome
from leaven.training.stack import MOST, TrialStack, most_trials, train_stack
from leaven.training.trial import train_trial
from leaven.tuning.service import recipe_study
from leaven.tuning.service.recipe_study import STACKED_FLOPS, Study, stack_size
from leaven.tuning.service.stores import StoreGone
from leaven.tuning.space import Space, space

HYPER = "hyperparameters."
LR = f"{HYPER}lr"


@pytest.fixture
def short(tiny: Recipe) -> Recipe:
    """Return a recipe with grouped heads whose tokens are not a whole number of batches."""
    return tiny.replace({"data.tokens": 4_000, "schedule.warmup_tokens": 512})


@pytest.fixture
def tokens(tiny: Recipe) -> TokenSet:
    return prepare(tiny.data, tiny.model.vocab_size)


def alike(stacked: Outcome, alone: Outcome) -> None:
    assert stacked.loss == pytest.approx(alone.loss, abs=5e-6)
    assert (stacked.tokens, stacked.flops) == (alone.tokens, alone.flops)
    assert [at for at, _ in stacked.curve] == [at for at, _ in alone.curve]
    assert [loss for _, loss in stacked.curve] == pytest.approx([loss for _, loss in alone.curve], rel=1e-5)


VARIANTS: dict[str, dict[str, object]] = {
    "grouped heads": {},
    "tied embeddings, as leaven new writes them": {"model.tied_embeddings": True, "schedule.decay": "linear"},
    "all heads, no QK-norm": {"model.n_kv_heads": 2, "model.qk_norm": False, f"{HYPER}grad_clip": 0.0},
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trials_of_a_stack_are_those_of_the_engine(short: Recipe, variant: str) -> None:
    start = short.replace({"data.tokens": 2_000, **VARIANTS[variant]})
    modules = {"attention.out": {"residual": 0.5, "lr": 2.0}, "mlp.in": {"lr": 0.5}}
    recipes = [
        start,
        start.replace({LR: 0.02, "data.seed": 3, "schedule.warmup_tokens": 1_024, "schedule.decay": "wsd"}),
        start.replace({f"{HYPER}modules": modules, f"{HYPER}depth": {"lr": [0.5, 2.0]}, f"{HYPER}eps": 1e-5}),
    ]
    wide = [transfer(recipe, width=32, depth=3) for recipe in recipes[:2]]
    for some in (recipes, wide):
        found = train_stack(some, 4)  # one place more than recipes
        assert len(found) == len(some)
        for stacked, recipe in zip(found, some, strict=True):
            alike(stacked, train_trial(recipe))


def test_trials_that_diverge_leave_the_others_alone(short: Recipe) -> None:
    unclipped = {f"{HYPER}grad_clip": 0.0, f"{HYPER}weight_decay": 0.0}
    recipes = [short.replace(each) for each in ({}, {LR: 3.0}, {LR: 1e38, **unclipped}, {LR: 0.02})]
    found, alone = train_stack(recipes, 4), [train_trial(recipe) for recipe in recipes]
    assert [outcome.diverged for outcome in found] == [outcome.diverged for outcome in alone]
    assert [outcome.diverged for outcome in found] == [False, True, True, False]
    for k in (0, 3):
        alike(found[k], alone[k])
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in alone]
    assert [outcome.flops for outcome in found] == [outcome.flops for outcome in alone]
    assert found[2].tokens < short.data.tokens


@pytest.mark.long
def test_a_stack_trains_again_from_the_start(short: Recipe, tokens: TokenSet) -> None:
    stacked = TrialStack(short, 2, tokens, "cpu")
    others = [short.replace({LR: lr}) for lr in (0.001, 0.02)]
    first = stacked.train([short])
    assert first not in stacked.train(others)
    longer = [recipe.replace({"data.tokens": 6_000}) for recipe in others]
    assert stacked.train(longer) == pytest.approx([train_trial(recipe).loss for recipe in longer], abs=5e-6)
    assert stacked.train([short]) == pytest.approx(first)
    for other, size in ((short, 1), (short.replace({"model.d_ff": 48}), 2)):
        with pytest.raises(ValueError, match="of other recipes"):
            stacked.restore(TrialStack(other, size, tokens, "cpu").checkpoint())


def test_a_killed_stack_resumes_from_its_checkpoint(
    short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, steps = [short.replace({LR: lr}) for lr in (0.003, 0.01, 3.0)], list[int]()
    whole = train_stack(recipes, 3)
    advance = TrialStack.advance

    def counted(self: TrialStack, count: int) -> None:
        if len(steps) == 9:
            raise KeyboardInterrupt
        advance(self, count)
        steps.append(self.progress.step)

    monkeypatch.setattr(TrialStack, "advance", counted)
    with pytest.raises(KeyboardInterrupt):
        train_stack(recipes, 3, checkpoint=tmp_path, checkpoint_seconds=0)
    stack._kept.clear()  # as in another process
    steps.clear()
    for found, expected in zip(
        train_stack(recipes, 3, checkpoint=tmp_path, checkpoint_seconds=0), whole, strict=True
    ):
        assert (found.loss, found.tokens, found.curve) == (expected.loss, expected.tokens, expected.curve)
    assert steps[0] == 10
    steps.clear()
    monkeypatch.setattr(TrialStack, "advance", advance)
    others = [recipes[1], recipes[0], recipes[2]]
    assert [found.loss for found in train_stack(others, 3, checkpoint=tmp_path)] == [
        whole[1].loss,
        whole[0].loss,
        whole[2].loss,
    ]


def test_a_checkpoint_is_resumed_by_a_stack_of_its_size_only(
    short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: TrialStack, count: int) -> None:
        if self.progress.step:
            raise KeyboardInterrupt
        advance(self, count)

    advance = TrialStack.advance
    with monkeypatch.context() as patch:
        patch.setattr(TrialStack, "advance", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_stack([short], 2, checkpoint=tmp_path, checkpoint_seconds=-1)
    assert list(tmp_path.rglob("*.safetensors")) or list(tmp_path.rglob("*.json"))
    alike(train_stack([short], 3, checkpoint=tmp_path)[0], train_trial(short, checkpoint=tmp_path))


@pytest.mark.long
def test_a_process_trains_stacks_that_differ_in_more_than_their_shape(short: Recipe, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("\n\n".join(f"line {i} of another text" for i in range(2_000)))
    names = (short.data.source, str(tmp_path / "other.txt"))
    scaled = {"scaling.rule": "mup", "scaling.base": {"width": 8, "depth": 2, "d_head": 4}}
    scaled["scaling.base"] |= {"batch_tokens": 256, "tokens": 4_000}  # type: ignore[operator]
    for weights in ((3.0, 1.0), (1.0, 3.0)):
        sources = [{"source": name, "weight": weight} for name, weight in zip(names, weights, strict=True)]
        mixed = short.replace({"data.source": sources})
        for recipe in (mixed, mixed.replace(scaled)):
            alike(train_stack([recipe], 2)[0], train_trial(recipe))


def test_a_capture_that_fails_leaves_no_graph(
    short: Recipe, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError

    stacked = TrialStack(short, 1, tokens, "cpu")
    stacked.begin([short])
    fakes = {"Stream": MagicMock, "current_stream": MagicMock, "stream": nullcontext, "CUDAGraph": MagicMock}
    for name, fake in {**fakes, "graph": full}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(torch.OutOfMemoryError):
        stacked._capture()
    assert stacked.graph is None


def test_ids_of_a_large_vocabulary(short: Recipe) -> None:
    class Tokens:
        def stream(self, seq_len: int, seed: int) -> "Tokens":
            self.seq_len = seq_len
            return self

        def batch(self, start: int, count: int) -> np.ndarray:
            return np.full((count, self.seq_len + 1), 2**15 + 7)

    large = short.replace({"model.vocab_size": 2**15 + 10})
    stacked = TrialStack(large, 1, Tokens(), "cpu")  # type: ignore[arg-type]
    stacked.begin([large])
    assert set(stacked.windows.unique().tolist()) == {2**15 + 7}


def test_how_many_trials_a_gpu_trains_at_once(tiny: Recipe) -> None:
    searched, room = space(tiny, LR), lambda: 8e10
    assert stack_size(searched, (), 96, 1, room) == (8, "a stack with 1/12 of all trials")
    assert stack_size(searched, (), 96, 4, room) == (2, "a stack with 1/48 of all trials")
    assert stack_size(searched, (), 1_000, 1, room) == (MOST, "the largest stack that was measured")
    few = lambda: 3e7  # noqa: E731
    fitting = most_trials(tiny, few())
    assert 1 < fitting < 100
    assert most_trials(tiny.replace({"layout.recompute": "full"}), few()) == fitting
    assert stack_size(searched, (), 1_000, 1, few) == (
        fitting,
        "the largest stack that fits into half of the free memory",
    )
    assert stack_size(searched, (), 23, 1, room) == (1, "23 trials are too few to train several at once")
    assert stack_size(searched, (), 48, 1, lambda: 1e6) == (1, "two trials do not fit into half of the free memory")
    assert "unknown" in stack_size(searched, (), None, 1, room)[1]
    assert "one duration" in stack_size(searched, (2_560, 5_120), 48, 1, room)[1]
    assert "the search varies batch.tokens" in stack_size(space(tiny, "global"), (), 48, 1, room)[1]
    assert "gelu" in stack_size(space(tiny.replace({"model.activation": "gelu"}), LR), (), 48, 1, room)[1]
    wide = transfer(tiny, width=1_024, depth=8)
    assert stack_size(space(wide, LR), (), 480, 1, room) == (
        1,
        f"several trials at once are known to be faster only up to {STACKED_FLOPS:.2g} FLOPs a step",
    )


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> list[int]:
    """Return a list to which each stack of a study adds its number of trials."""
    sizes = list[int]()

    def counted(recipes: list[Recipe], size: int, **given: Any) -> list[Outcome]:
        sizes.append(len(recipes))
        return train_stack(recipes, size, **given)

    monkeypatch.setattr(recipe_study, "train_stack", counted)
    return sizes


def of_stacks(recipe: Recipe, tokens: TokenSet, folder: Path, **more: Any) -> Study:
    return Study(folder, recipe, space(recipe, LR), "trust-region", tokens, stack=4, **more)


@pytest.mark.long
def test_a_study_trains_stacks(short: Recipe, tokens: TokenSet, tmp_path: Path, stacks: list[int]) -> None:
    with of_stacks(short, tokens, tmp_path / "study") as opened:
        state = opened.run(15, 1, stop_at_noise=False)
    assert sum(stacks) == len(state.trials) == 15
    assert stacks[:3] == [4, 4, 4]
    assert [trial.seed for trial in state.trials if trial.purpose == "noise"] == [1]
    assert len({trial.number for trial in state.trials}) == 15
    for trial in state.trials[:3]:
        recipe = short.replace({LR: trial.values[LR], "data.seed": short.data.seed + trial.seed})
        assert trial.loss == pytest.approx(train_trial(recipe).loss, abs=5e-5)


def test_trials_of_a_stack_whose_process_dies_are_one_stack_again(
    short: Recipe, tokens: TokenSet, tmp_path: Path, stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, given = recipe_study.WorkerPool, list[tuple[list[Recipe], list[str]]]()

    class Pool(pool):  # type: ignore[misc, valid-type]
        def submit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> "Future[Any]":
            kept = named["checkpoint"]
            kept.mkdir(parents=True, exist_ok=True)
            given.append((arguments[0], [file.name for file in kept.iterdir()]))
            if len(given) > 1:
                return super().submit(function, *arguments, **named)  # type: ignore[no-any-return]
            (kept / "stack-1").mkdir()
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(recipe_study, "WorkerPool", Pool)
    with of_stacks(short, tokens, tmp_path / "study") as opened:
        state = opened.run(4, 1)
    assert stacks == [4]
    assert given[0][0] == given[1][0]
    assert [kept for _, kept in given] == [[], ["stack-1"]]
    assert [trial.number for trial in state.trials] == [4, 5, 6, 7]
    assert [path.name for path in (tmp_path / "study" / "checkpoints").iterdir()] == [".run"]


def test_a_stopped_stack_returns_its_trials(
    short: Recipe, tokens: TokenSet, tmp_path: Path, stacks: list[int]
) -> None:
    stop = iter([False] * 3)
    with of_stacks(short, tokens, tmp_path / "study") as opened:
        state = opened.run(8, 1, stop=lambda: next(stop, True))
    assert {trial.state for trial in state.trials} <= {"waiting", "complete"}
    with of_stacks(short, tokens, tmp_path / "study") as opened:
        assert {trial.state for trial in opened.run(8, 1).trials} == {"complete"}
    assert max(stacks) <= 4


def test_a_point_that_is_no_recipe_is_left_out_of_its_stack(
    short: Recipe, tokens: TokenSet, tmp_path: Path, stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_at = Space.recipe_at

    def only_some(around: Space, point: Any, seed: int | None = None) -> Recipe:
        if getattr(point, "number", None) == 1:  # only a proposal has a number
            raise ValueError
        return recipe_at(around, point, seed)

    monkeypatch.setattr(Space, "recipe_at", only_some)
    with of_stacks(short, tokens, tmp_path / "study") as opened:
        state = opened.run(4, 1)
    assert [trial.state for trial in state.trials] == ["complete", "diverged", "complete", "complete"]
    assert stacks == [3]


def test_a_stack_that_does_not_fit_into_the_memory(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool(recipe_study.WorkerPool):
        def submit(self, *_: Any, **__: Any) -> "Future[Any]":  # type: ignore[override]
            future: Future[Any] = Future()
            future.set_exception(torch.OutOfMemoryError("CUDA out of memory"))
            return future

    monkeypatch.setattr(recipe_study, "WorkerPool", Pool)
    verb = ["tune", str(tiny_file), "--study", str(tmp_path / "study"), "--trials", "6", "--space", LR]
    done = CliRunner().invoke(app, [*verb, "--workers", "1", "--stack", "99"])  # reduced to the number of trials
    assert "6 trials at once need more memory than is free; give a --stack below 6" in str(done.exception)


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
def test_what_leaven_tune_says_of_stacks(
    tiny_file: Path, tmp_path: Path, stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb = ["tune", str(tiny_file), "--trials", "6", "--workers", "1"]
    short = ["--set", "data.tokens=1024", "--set", "schedule.warmup_tokens=256"]
    study = ["--study", str(tmp_path / "study")]
    done = CliRunner().invoke(app, [*verb, *study, *short, "--stack", "3", "--space", f"{LR},batch.tokens"])
    assert done.exit_code == 0, done.output
    assert "not searched: batch.tokens: stacked trials must have the same batch size" in done.stderr
    assert stacks == [3, 3]
    gelu, study = ["--set", 'model.activation="gelu"'], ["--study", str(tmp_path / "gelu")]
    done = CliRunner().invoke(app, [*verb, *study, *short, *gelu, "--stack", "3", "--space", LR])
    text = re.sub(r"\s+", " ", done.stderr)
    assert "each worker trains one trial at a time: a stack cannot train model.activation = gelu" in text
    assert stacks == [3, 3]
    both = ["--space", f"{LR},batch.tokens", "--study", str(tmp_path / "both")]
    done = CliRunner().invoke(app, [*verb, *short, *gelu, "--stack", "3", *both])
    assert done.exit_code == 0, done.output
    assert "not searched" not in done.stderr  # because the trials are not stacked


def test_what_workers_auto_says(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()

    def run(self: Study, *_: object, **__: object) -> None:
        given.append(self.stack)
        raise StoreGone("gone")

    monkeypatch.setattr(Study, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(device, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(device, "free_memory", lambda _: 8e10)
    verb = ["tune", str(tiny_file), "--study", str(tmp_path / "study"), "--space", LR, "--trials", "96"]
    said = CliRunner().invoke(app, [*verb, "--workers", "auto"]).stderr
    assert "each GPU trains 4 trials at once: a stack with 1/24 of all trials" in said
    said = CliRunner().invoke(app, [*verb[:-1], "8", "--workers", "auto"]).stderr
    assert "each GPU trains one trial at a time: 8 trials are too few to train several at once" in said
    for own in (["--workers", "2"], ["--workers", "auto", "--stack", "1"], ["--workers", "auto", "--stack", "5"]):
        assert "each GPU" not in CliRunner().invoke(app, [*verb, *own]).stderr
    assert given == [4, 1, 1, 1, 5]
