"""Ramps that scale lr, betas, eps and decay with the batch: equal to AdamW in float64, also after an abandoned step;
and fixed ramps."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from leaven.data.tokens import TokenSet
from leaven.recipe.recipe import BATCH_RULES, Recipe
from leaven.scaling.rules import RULES
from leaven.scaling.table import optimizer_groups, parameter_table, ramp_factors
from leaven.training.device import DTYPES
from leaven.training.engine import StopRequested, Training
from leaven.training.optimizer import Optimizer

RAMP = {"start_tokens": 32, "increment_tokens": 32, "over_tokens": 1_000}
STEPS = 16  # 32 .. 256 tokens: the full batch is reached at step 10
RUNNING = {"mode": "running", "limit": 0.9}


def ramped(tiny: Recipe, rule: str, **changes: object) -> Recipe:
    base = {"width": 8, "depth": 1, "batch_tokens": 128, "tokens": 5_120, "d_head": 4}
    return tiny.replace({"batch.ramp": RAMP | {"rule": rule}, "scaling.base": base, **changes})


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(DTYPES, "fp32", torch.float64)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


Gradients = list[dict[str, Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """Return the gradients that the optimizer gets: a dictionary for each step."""
    gradients: Gradients = []
    plain: Callable[..., None] = Optimizer.step

    def watched(optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
        named = optimizer._named()
        gradients.append({name: leaf.grad.clone() for name, leaf in named if leaf.grad is not None})
        plain(optimizer, *arguments, **options)

    monkeypatch.setattr(Optimizer, "step", watched)
    return gradients


def at_its_batch(recipe: Recipe, batch_tokens: int) -> Recipe:
    """Return the recipe with the batch of a step as its full batch. The table of this recipe has the values that the
    rule gives the step."""
    return recipe.replace({"batch.ramp": None, "batch.tokens": batch_tokens})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_a_scaled_ramp_is_adamw_with_the_values_of_each_step(
    tiny: Recipe, tokens: TokenSet, seen: Gradients, kind: str
) -> None:
    """The bias correction is 1 - prod(beta_i). The tolerance is that of torch's step count, a float32."""
    recipe = ramped(tiny, "scaled", **{"hyperparameters.optimizer": kind, "hyperparameters.eps": 1e-3})
    training = Training(recipe, tokens, "cpu")
    weights = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    first, second = ({name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(2))
    left1, left2 = dict.fromkeys(weights, 1.0), dict.fromkeys(weights, 1.0)
    batches = set()
    for step in range(STEPS):
        batch = recipe.batches.batch_at(training.progress.tokens)
        batches.add(batch)
        result, table = training.step(), parameter_table(at_its_batch(recipe, batch))
        multiplier = recipe.schedule.multiplier(training.progress.tokens, recipe.data.tokens)
        assert result.lr == pytest.approx(table["layers.0.mlp.out.weight"].lr * multiplier, rel=1e-12)
        for name, taken in seen[step].items():
            row, w, gradient = table[name], weights[name], taken
            lr = row.lr * multiplier
            if kind == "adamw":
                w = w * (1 - lr * row.weight_decay)
            else:
                gradient = gradient + row.weight_decay * w
            left1[name], left2[name] = left1[name] * row.beta1, left2[name] * row.beta2
            first[name] = row.beta1 * first[name] + (1 - row.beta1) * gradient
            second[name] = row.beta2 * second[name] + (1 - row.beta2) * gradient**2
            mean, square = first[name] / (1 - left1[name]), second[name] / (1 - left2[name])
            weights[name] = w - lr * mean / (square.sqrt() + row.eps)
    assert batches == set(range(32, 257, 32))
    for name, parameter in training.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-6, atol=1e-8)


def test_a_fixed_ramp_is_torchs_adamw_to_the_last_bit(tiny: Recipe, tokens: TokenSet, seen: Gradients) -> None:
    recipe = ramped(tiny, "fixed")
    training = Training(recipe, tokens, "cpu")
    weights = {name: p.detach().clone().requires_grad_() for name, p in training.model.named_parameters()}
    adam = torch.optim.AdamW(optimizer_groups(parameter_table(recipe).rows, weights), fused=True)
    for step in range(STEPS):
        training.step()
        for name, gradient in seen[step].items():
            weights[name].grad = gradient
        multiplier = recipe.schedule.multiplier(training.progress.tokens, recipe.data.tokens)
        for group in adam.param_groups:
            group["lr"] = group["peak_lr"] * multiplier
        adam.step()
    for name, parameter in training.model.named_parameters():
        assert torch.equal(parameter, weights[name])
    assert recipe == ramped(tiny, "fixed", **{"batch.ramp": RAMP})  # the default rule


def test_the_factors_are_those_of_complete_d_p(tiny: Recipe) -> None:
    recipe = ramped(tiny, "scaled")
    first, longer = ramp_factors(recipe, 0)
    assert (first.lr, first.eps, first.weight_decay, first.half_life) == pytest.approx((8**-0.5, 8**0.5, 8**-0.5, 8))
    assert longer == 1
    second = next(step for step in range(STEPS) if recipe.batches.tokens_at_step(step + 1) - 32 * (step + 1) > 0)
    assert ramp_factors(recipe, second)[1] == pytest.approx(1 / 2)
    full, longer = ramp_factors(recipe, STEPS)
    assert set(vars(full).values()) == {1.0}
    assert longer == 1
    stages = [{"from_tokens": 0, "tokens": 32}, {"from_tokens": 320, "tokens": 256}]
    staged = recipe.replace({"batch.ramp": None, "batch.stages": stages, "batch.stages_rule": "scaled"})
    assert ramp_factors(staged, 9) == (first, 1)
    assert ramp_factors(staged, 10) == (full, 1 / 8)


def test_an_abandoned_step_leaves_no_trace_where_the_batch_grows(tiny: Recipe, tokens: TokenSet) -> None:
    recipe = ramped(tiny, "scaled", **{"hyperparameters.grad_clip": RUNNING})
    whole, broken = (Training(recipe, tokens, "cpu") for _ in range(2))
    for step in range(STEPS):
        if ramp_factors(recipe, step)[1] != 1:
            broken.stop = lambda: True
            with pytest.raises(StopRequested):
                broken.step()
            broken.abandon_step()
            broken.stop = lambda: False
        assert broken.step().update_norm == whole.step().update_norm


def test_the_running_norm_forgets_by_tokens(tiny: Recipe, tokens: TokenSet) -> None:
    """The mean square is the weighted mean of all squared norms so far. The weights follow from the beta of each
    step."""
    recipe = ramped(tiny, "scaled", **{"hyperparameters.grad_clip": {"mode": "running", "limit": 1e6}})
    training, beta = Training(recipe, tokens, "cpu"), parameter_table(recipe).beta2
    mean = weight = 0.0
    for step in range(STEPS):
        now = ramp_factors(recipe, step)[0].beta(beta)
        norm = training.step().grad_norm
        mean, weight = now * mean + (1 - now) * norm**2, now * weight + (1 - now)
    assert float(training.clipper.running_norm()) == pytest.approx(math.sqrt(mean / weight), rel=1e-6)


def test_scaled_ramps_need_a_rule_with_the_batch(tiny: Recipe) -> None:
    moves = [name for name, rule in RULES.items() if "B" in rule.half_life.text]
    assert moves == list(BATCH_RULES)
    for rule in RULES.values():  # B is only in the columns that all roles share
        assert not any("B" in cell.text for cells in rule.cells.values() for cell in cells.values())
        assert ("B^1/2" in rule.columns["lr"].text) if rule.columns else rule.name not in moves
    for name in RULES.keys() - BATCH_RULES:
        ramped(tiny, "fixed", **{"scaling.rule": name})
        with pytest.raises(ValidationError, match=r'ramp.rule = "scaled": scaling rule .* does not scale anything'):
            ramped(tiny, "scaled", **{"scaling.rule": name})
