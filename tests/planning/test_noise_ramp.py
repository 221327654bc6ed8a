"""Batch ramps from noise scales that follow known curves."""

import math
import random

import pytest

from leaven.errors import InputError
from leaven.planning.ramp import FEWEST, SETTLING, NoiseFit, fit_noise, noise_ramp
from leaven.recipe.files import parse_recipe, render
from leaven.recipe.recipe import Recipe

EVERY = 100


def curve(exponent: float, last: float, points: int = 80, noise: float = 0.0) -> list[tuple[int, float]]:
    draw = random.Random(0)
    tokens = [EVERY * (n + 1) for n in range(points)]
    return [(t, last * (t / tokens[-1]) ** exponent * math.exp(draw.gauss(0, noise))) for t in tokens]


def noise(last: float, exponent: float = 0.5) -> NoiseFit:
    return NoiseFit(points=70, from_tokens=100, to_tokens=10_240, last=last, exponent=exponent, scatter=1.1)


def test_the_fit_finds_the_power() -> None:
    fit = fit_noise(curve(0.5, 400))
    assert (fit.exponent, fit.last, fit.scatter) == pytest.approx((0.5, 400, 1))
    assert (fit.from_tokens, fit.to_tokens, fit.points) == (EVERY * (SETTLING + 1), EVERY * 80, 70)
    assert fit.at(2_000) == pytest.approx(200)
    assert fit.at(0) == fit.at(100) == fit.at(fit.from_tokens)
    assert fit.reaches(200) == pytest.approx(2_000)
    assert fit.reaches(fit.at(0)) == 0
    noisy = fit_noise(curve(0.5, 400, noise=0.2))
    assert noisy.exponent == pytest.approx(0.5, abs=0.1)
    assert noisy.scatter == pytest.approx(1.2, abs=0.06)


def test_a_noise_scale_that_falls_is_taken_as_constant() -> None:
    fit = fit_noise(curve(-0.5, 400))
    assert fit.exponent == 0
    assert fit.reaches(1.01 * fit.last) == math.inf


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(InputError, match="smaller stability.noise_scale_every_tokens"):
        fit_noise(curve(0.5, 400, points=SETTLING + FEWEST - 1))


def test_every_batch_is_within_the_multiple_of_the_noise_scale(tiny: Recipe) -> None:
    """256 tokens in 8 sequences; the noise scale is 512 x sqrt(tokens / 10,240)."""
    fit = noise(512)
    for multiple in (0.75, 1.0):
        found = noise_ramp(tiny, fit, multiple)
        assert [stage["tokens"] for stage in found.stages] == [32, 64, 128, 256]  # 3/4 of the first noise scale: 38
        at_limit = [stage["from_tokens"] for stage in found.stages[1:]]
        assert at_limit == [math.ceil(10_240 * (size / (multiple * 512)) ** 2) for size in (64, 128, 256)]
        (setting,) = found.set
        recipe = parse_recipe(render(tiny), "tiny", [setting])
        assert [stage.model_dump() for stage in recipe.batch.stages] == found.stages
        assert recipe.steps == found.steps > found.full_steps == 40
        for step in range(recipe.steps):
            tokens = recipe.batches.tokens_at_step(step)
            assert recipe.batches.batch_at(tokens) <= max(multiple * fit.at(tokens) * (1 + 1e-9), 32)


def test_a_proposed_ramp_replaces_the_recipes_ramp_and_keeps_its_rule(tiny: Recipe) -> None:
    ramp = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 1_000, "rule": "scaled"}
    found = noise_ramp(tiny.replace({"batch.ramp": ramp}), noise(512), 1.0)
    recipe = parse_recipe(render(tiny.replace({"batch.ramp": ramp})), "tiny", found.set)
    assert (recipe.batch.ramp, recipe.batch.rule) == (None, "scaled")


def test_no_ramp_where_there_is_nothing_to_gain_or_the_batch_is_too_large(tiny: Recipe) -> None:
    early = noise_ramp(tiny, noise(4_096), 1.0)
    assert (early.set, len(early.stages)) == ([], 1)
    assert early.why == (
        "none: the full batch of 256 tokens is at most 1 x the measured noise scale from the start (the first "
        "measurement used is at 100 tokens)"
    )
    one = noise_ramp(tiny.replace({"batch.tokens": tiny.model.seq_len}), noise(3), 1.0)
    assert one.why == "none: the full batch is one sequence, and no batch is smaller"
    large = noise_ramp(tiny, noise(200), 1.0)
    assert large.set == []
    assert "--batch-tokens 192" in large.why  # whole sequences of 32
    assert noise_ramp(tiny, noise(10, 0.0), 1.0).why.endswith("use leaven transfer --batch-tokens 32")


def test_a_recipe_that_ends_before_the_first_fitted_measurement_is_refused(tiny: Recipe) -> None:
    fit = fit_noise([(256 * n, 600.0) for n in range(1, 80)])
    assert fit.from_tokens == 2_816
    assert noise_ramp(tiny.replace({"data.tokens": 2_816}), fit, 1.0).why.startswith("none: the full batch of 256")
    why = r"ends at 2.56 k tokens, but the noise scale is known only from 2.82 k tokens on \(the first 10 meas"
    for multiple in (0.1, 1.0):
        with pytest.raises(InputError, match=why):
            noise_ramp(tiny.replace({"data.tokens": 2_560}), fit, multiple)
