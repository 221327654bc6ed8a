"""Stacked trials against the same trials by themselves."""

import math
from collections.abc import Iterator

import pytest
import torch

from leaven.data.tokens import TokenSet, prepare
from leaven.recipe.recipe import Recipe
from leaven.training import stacked
from leaven.training.course import Course
from leaven.training.engine import Diverged, Interrupted, Training
from leaven.training.outcome import Rival
from leaven.training.precision import DTYPES
from leaven.training.rival import expected
from leaven.training.stacked import TrialStack, stack_key, stackable, train_stack

GPT = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.bias": True,
    "model.qk_norm": False,
    "model.tied_embeddings": True,
    "scaling.rule": "mup",  # which multiplies the logits
    "hyperparameters.optimizer": "adam",
    "hyperparameters.decay_norm_and_bias": True,
    "hyperparameters.weight_decay": 0.01,
}
STEPS = 6
OTHERS: list[dict[str, object]] = [
    {},
    {
        "data.seed": 1,
        "hyperparameters.lr": 0.003,
        "hyperparameters.beta1": 0.8,
        "hyperparameters.beta2": 0.99,
        "hyperparameters.eps": 1e-4,
        "hyperparameters.residual": 0.5,
        "hyperparameters.grad_clip": {"mode": "per-module", "limit": 0.3},
        "schedule.warmup_tokens": 2_048,
        "hyperparameters.depth": {"lr": [1.0, 0.5], "residual": [0.7, 1.4]},
    },
    {
        "data.seed": 1,
        "hyperparameters.init_std": 0.2,
        "hyperparameters.weight_decay": 0.3,
        "hyperparameters.grad_clip": {"mode": "running", "limit": 0.9},
        "schedule.decay": "linear",
        "hyperparameters.modules": {
            "attention.query": {"lr": 2.0, "init_std": 0.5},
            "mlp.out": {"residual": 1.5, "beta1": 0.5, "eps": 4.0},
            "embedding": {"lr": 3.0, "weight_decay": 0.0, "beta2": 2.0},
        },
    },
]


@pytest.fixture
def tokens(tiny: Recipe) -> TokenSet:
    torch.set_num_threads(1)
    return prepare(tiny.data, tiny.model.vocab_size)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything in it, weights and products."""
    monkeypatch.setitem(DTYPES, "fp32", torch.float64)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def varied(recipe: Recipe, **changes: object) -> list[Recipe]:
    """Three trials in all that a stack can have apart, at twice the width and depth of their base."""
    base = {"width": 8, "depth": 1, "batch_tokens": 128, "tokens": 5_120, "d_head": 4}
    recipe = recipe.replace({"scaling.base": base, **changes})
    return [recipe.replace(other) for other in OTHERS]


def alone(recipe: Recipe, tokens: TokenSet, steps: int) -> tuple[list[float], Training]:
    training = Training(recipe, tokens, "cpu")
    return [training.step().loss for _ in range(steps)], training


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "family",
    [
        {},
        GPT,
        {"model.qk_norm_per_head": True, "model.norm": "layernorm", "model.embedding_norm": True, "model.bias": True},
        {"data.documents": "isolated", "model.positions": "alibi", "model.n_kv_heads": 2},
        {
            "scaling.rule": "mup",
            "batch.micro_batch": 1,
            "batch.stages": [{"from_tokens": 0, "tokens": 96}, {"from_tokens": 500, "tokens": 256}],
        },
        {"batch.ramp": {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 500, "rule": "scaled"}},
    ],
    ids=["llama", "gpt", "norms", "isolated", "accumulated", "ramp"],
)
def test_a_stack_is_its_trials_in_float64(tiny: Recipe, tokens: TokenSet, family: dict[str, object]) -> None:
    recipes = varied(tiny, **family)
    stack = TrialStack(recipes, tokens, "cpu")
    losses = torch.stack([stack.step() for _ in range(STEPS)])
    validation = stack.evaluate()
    for trial, recipe in enumerate(recipes):
        by_itself, training = alone(recipe, tokens, STEPS)
        torch.testing.assert_close(losses[:, trial], torch.tensor(by_itself), rtol=1e-9, atol=0)
        assert validation[trial] == pytest.approx(training.evaluate(), rel=1e-9)
        parameters = dict(stack.model.named_parameters())
        for name, parameter in training.model.named_parameters():
            if name.endswith("key.bias") and not recipe.model.qk_norm:
                continue  # adds the same to all scores of a query: its gradient is rounding, which Adam makes large
            torch.testing.assert_close(parameters[name][trial], parameter, rtol=1e-6, atol=1e-9)


def test_what_diverges_is_frozen_and_touches_no_other(tiny: Recipe, tokens: TokenSet) -> None:
    first, *_, last = varied(tiny)
    wild = first.replace({"hyperparameters.lr": 1e30, "hyperparameters.weight_decay": 0.0})
    with_it, without = TrialStack([first, wild, last], tokens, "cpu"), TrialStack([first, last], tokens, "cpu")
    losses = torch.stack([with_it.step() for _ in range(STEPS)])
    assert losses[-1, 1].isnan()
    others = torch.stack([without.step() for _ in range(STEPS)])
    torch.testing.assert_close(losses[:, ::2], others, rtol=1e-5, atol=0)
    without_it = dict(without.model.named_parameters())
    for name, parameter in with_it.model.named_parameters():
        assert parameter.isfinite().all()  # the wild one is as it was before its loss was no number
        torch.testing.assert_close(parameter[::2], without_it[name], rtol=1e-4, atol=1e-5)


def test_trials_that_are_left_alone_go_on_as_before(tiny: Recipe, tokens: TokenSet) -> None:
    recipes = varied(tiny)
    whole, narrowed = TrialStack(recipes, tokens, "cpu"), TrialStack(recipes, tokens, "cpu")
    before = [(whole.step(), narrowed.step()) for _ in range(4)]
    assert all(torch.equal(*pair) for pair in before)
    narrowed.keep([2, 1])
    for _ in range(8):
        torch.testing.assert_close(narrowed.step(), whole.step()[[2, 1]], rtol=1e-5, atol=0)
    assert narrowed.evaluate() == pytest.approx([whole.evaluate()[trial] for trial in (2, 1)], rel=1e-5)


def test_outcomes_are_those_of_the_trials_by_themselves(tiny: Recipe, tokens: TokenSet) -> None:
    recipes = varied(tiny, **{"data.tokens": 5_120})
    recipes.insert(1, recipes[0].replace({"hyperparameters.lr": 1e30, "hyperparameters.weight_decay": 0.0}))
    rival = Rival(tuple((done, 0.1) for done in range(256, 5_121, 256)), 0.1, 0.01)
    other_run = Rival(((100, 0.1), (200, 0.1)), 0.1, 0.01)  # of another duration: no rival
    outcomes = train_stack([*recipes, recipes[0]], tokens, "cpu", [None, None, other_run, None, rival])
    for recipe, outcome in zip(recipes, outcomes, strict=False):
        training, course = Training(recipe, tokens, "cpu"), Course(recipe.model.vocab_size, recipe.data.tokens)
        try:
            while not training.finished:
                step = training.step()
                course.lost(step.loss, step.batch_tokens)
            loss = training.evaluate()
        except Diverged:
            loss = math.inf
        assert outcome.loss == pytest.approx(loss, rel=1e-4)
        assert outcome.tokens == training.progress.tokens
        assert [loss for _, loss in outcome.curve] == pytest.approx([loss for _, loss in course.curve], rel=1e-4)
    assert [outcome.diverged for outcome in outcomes] == [False, True, False, False, False]
    assert [outcome.stopped for outcome in outcomes] == [False, False, False, False, True]
    hopeless = outcomes[-1]
    assert hopeless.tokens == hopeless.curve[-1][0] < 5_120
    for (_, here), (_, there) in zip(hopeless.curve, outcomes[0].curve, strict=False):
        assert here == pytest.approx(there, rel=1e-5)
    assert hopeless.loss == expected(hopeless.curve, rival)


def test_when_all_are_over_nothing_is_trained(tiny: Recipe, tokens: TokenSet) -> None:
    rival = Rival(((256, 0.1), (10_240, 0.1)), 0.1, 0.01)
    outcomes = train_stack(varied(tiny), tokens, "cpu", [rival] * 3)
    assert all(outcome.stopped and outcome.tokens < 5_120 for outcome in outcomes)


def test_bf16_is_that_of_a_trial_by_itself_but_for_rounding(tiny: Recipe, tokens: TokenSet) -> None:
    recipes = varied(tiny, **{"precision.compute": "bf16"})
    stack = TrialStack(recipes, tokens, "cpu")
    losses = torch.stack([stack.step() for _ in range(STEPS)])
    for trial, recipe in enumerate(recipes):
        assert losses[:, trial].tolist() == pytest.approx(alone(recipe, tokens, STEPS)[0], rel=5e-3)


def test_less_memory_means_smaller_micro_batches(
    tiny: Recipe, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = varied(tiny)
    stack, full = TrialStack(recipes, tokens, "cpu"), TrialStack(recipes, tokens, "cpu")
    losses, sizes = stack.model.losses, list[int]()

    def cramped(inputs: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.append(len(inputs))
        if len(inputs) > 2 * len(recipes):
            raise torch.OutOfMemoryError
        return losses(inputs, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(stack.model, "losses", cramped)
    torch.testing.assert_close(stack.step(), full.step(), rtol=1e-5, atol=0)
    torch.testing.assert_close(stack.step(), full.step(), rtol=1e-5, atol=0)
    assert sizes == [24, 12, *[6] * 8]


def test_no_memory_for_a_stack_means_two(tiny: Recipe, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, sizes = varied(tiny, **{"data.tokens": 2_560}), list[int]()

    def cramped(recipes: list[Recipe], *others: object) -> TrialStack:
        sizes.append(len(recipes))
        if len(recipes) > 2:
            raise torch.OutOfMemoryError
        return TrialStack(recipes, *others)  # type: ignore[arg-type]

    whole = train_stack(recipes, tokens, "cpu", [None] * 3)
    monkeypatch.setattr(stacked, "TrialStack", cramped)
    outcomes = train_stack(recipes, tokens, "cpu", [None] * 3)
    assert sizes == [3, 2, 1]
    assert [outcome.loss for outcome in outcomes] == pytest.approx([outcome.loss for outcome in whole], rel=1e-4)


def test_a_stack_stops_when_it_is_asked_to(tiny: Recipe, tokens: TokenSet) -> None:
    with pytest.raises(Interrupted):
        train_stack(varied(tiny), tokens, "cpu", [None] * 3, stop=lambda: True)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"hyperparameters.lr": 0.1, "data.seed": 3, "schedule.decay": "wsd", "name": "other"}, True),
        ({"batch.tokens": 512}, False),
        ({"data.tokens": 20_480}, False),
        ({"model.d_ff": 64}, False),
        ({"hyperparameters.optimizer": "adam"}, False),
        ({"precision.compute": "bf16"}, False),
        ({"scaling.base": {"width": 8, "depth": 1, "batch_tokens": 256, "tokens": 10_240, "d_head": 4}}, False),
    ],
)
def test_only_what_is_a_number_may_differ(tiny: Recipe, change: dict[str, object], same: bool) -> None:
    assert stackable(tiny, tiny)
    assert stackable(tiny, tiny.replace(change)) is same


@pytest.mark.parametrize("change", [{"precision.compute": "fp16"}, {"model.dropout": 0.1}, {"layout.dp": 2}])
def test_what_cannot_be_in_a_stack(tiny: Recipe, change: dict[str, object]) -> None:
    recipe = tiny.replace(change)
    assert stack_key(recipe) is None
    assert not stackable(recipe, recipe)
