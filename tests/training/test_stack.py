"""The stack of trials in benchmarks/tuning gives the losses of leaven's engine."""

import pytest
from benchmarks.tuning.proof import GROUPS, SEEDS, Run, runs_of, speed_up, table

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.training.stack import Stack
from leaven.training.trial import train_trial


def proxy() -> Recipe:
    from benchmarks.tuning.__main__ import PROXY

    from leaven.recipe.files import read_recipe

    small = {"data.tokens": 4_096, "schedule.warmup_tokens": 1_024, "evaluation.tokens": 2_048}
    return read_recipe(PROXY).replace(small | {"model.n_layers": 2, "precision.compute": "fp32"})


def test_the_losses_of_a_stack_are_those_of_the_engine() -> None:
    start, hyper = proxy(), "hyperparameters."
    modules = {"attention.out": {"residual": 0.5, "lr": 2.0}, "unembedding": {"lr": 0.5}}
    recipes = [
        start,
        start.replace({f"{hyper}lr": 0.02, "data.seed": 3, "schedule.warmup_tokens": 512}),
        start.replace({f"{hyper}modules": modules, f"{hyper}depth": {"lr": [0.5, 2.0]}, f"{hyper}eps": 1e-5}),
    ]
    wide = [transfer(recipe, width=128, depth=4) for recipe in recipes[:2]]
    tokens = prepare(start.data, start.model.vocab_size)
    for some in (recipes, wide):
        stacked = Stack(some[0], 4, tokens, "cpu").train(some)  # one more than there are
        assert stacked == pytest.approx([train_trial(recipe).loss for recipe in some], abs=5e-6)


def test_a_stack_trains_again_from_the_start() -> None:
    start = proxy().replace({"data.tokens": 2_560, "schedule.warmup_tokens": 512})
    stack = Stack(start, 2, prepare(start.data, start.model.vocab_size), "cpu")
    others = [start.replace({"hyperparameters.lr": lr}) for lr in (0.001, 0.1)]
    first = stack.train([start])
    assert first not in stack.train(others)
    assert stack.train([start]) == pytest.approx(first)


def test_the_table_of_the_proof() -> None:
    losses = {
        run: 3.0 - 0.1 * (run.arm == "per-module") - 0.3 * (run.longer - 1) + 0.05 * (run.times_lr != 1)
        for part in ("proxy", "target", "alone")
        for run in runs_of(part, range(3))
    }
    lines = table(losses, range(3))
    by_module = next(line for line in lines if line.startswith("| target | per-module"))
    assert "2.9000 ± 0.0000 | -0.1000 ± 0.0000" in by_module
    assert "1.32, 1.32, 1.32" in by_module  # 0.1 of the 0.123 nats to 1.41 times the tokens, in log2
    group = next(iter(GROUPS))
    assert f"| {group} | +0.1000 ± 0.0000 (+0.100, +0.100, +0.100) | +0.1000" in "\n".join(lines)
    assert Run("target", "global", 0, SEEDS[0], 2.0, 2**0.5) in losses
    assert speed_up([(1.0, 3.0), (2.0, 2.8)], 2.7) == "> 2"
