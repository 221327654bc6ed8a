"""`leaven new --from ID`: the values of one published run, taken together."""

import tomllib
from dataclasses import replace

import pytest

from leaven.catalogue.derivation import Derivation
from leaven.catalogue.runs import find_run
from leaven.catalogue.starter.asked import Asked
from leaven.catalogue.starter.starter import starter
from leaven.recipe.batch import Ramp
from leaven.recipe.errors import InputError
from leaven.recipe.files import parse_recipe, render
from leaven.recipe.recipe import Recipe, flatten
from leaven.scaling.table import resolve

B, T = 10**9, 10**12


def new(params: float, tokens: float, lead: str, **asked: object) -> Derivation:
    return starter(replace(Asked("wheat", int(params), int(tokens), lead=lead), **asked))  # type: ignore[arg-type]


def own(id: str) -> Derivation:
    """At the run's own size and length."""
    run = find_run(id)
    return new(run.params_total, run.tokens or 0, id)


def _written(recipe: Recipe) -> dict[str, object]:
    """Every value of the file, by its path."""
    document = tomllib.loads(render(recipe))
    del document["why"]
    return flatten(document)


@pytest.mark.parametrize("id", ["olmo2-7b", "gpt3-13b", "smollm2-135m", "openelm-3b", "llama2-70b", "bloom-7b1"])
def test_from_a_run_its_values_stay_together(id: str) -> None:
    run = find_run(id)
    assert run.batch_tokens
    assert run.optim
    recipe = new(run.params_total / 2, 300 * B, lead=id).recipe
    assert recipe.hyperparameters.lr == run.peak_lr
    assert recipe.batch.tokens == pytest.approx(run.batch_tokens, rel=1e-3)
    assert recipe.hyperparameters.weight_decay == run.optim.weight_decay
    assert recipe.schedule.decay == run.decay
    assert recipe.model.params == pytest.approx(run.params_total / 2, rel=0.03)
    assert recipe.base.depth == run.arch.n_layers
    assert recipe.base.width == pytest.approx(run.arch.d_model, rel=0.01)
    assert set(_written(recipe)) <= set(recipe.why)


def test_from_a_run_at_its_own_size_the_rule_does_nothing() -> None:
    run = find_run("cerebras-gpt-1.3b")
    recipe = new(run.params_total, run.tokens or 0, lead=run.id).recipe
    ratios = resolve(recipe).ratios
    assert (ratios.width, ratios.depth, ratios.batch, ratios.tokens) == (1, 1, 1, 1)


def test_what_cannot_be_carried_over_is_listed() -> None:
    said = " ".join(new(7 * B, 2 * T, lead="olmo2-7b").steps[1].said)
    assert "not carried over: norms at the output of a branch" in said
    assert "z_loss" in said


@pytest.mark.parametrize(
    ("id", "sizes"),
    [
        # As published (arXiv 2407.21783: 4M, 8M after 252M tokens, 16M after 2.87T), in whole sequences of 8,192.
        ("llama3-405b", ((0, 488 * 8192), (252_000_000, 977 * 8192), (2_870_000_000_000, 1953 * 8192))),
        ("chinchilla-70b", ((0, 732 * 2048), (700_000_000_000, 1465 * 2048))),
        ("cerebras-gpt-13b", ((0, 720 * 2048), (84_049_920_000, 1080 * 2048))),
    ],
)
def test_a_batch_that_grew_in_stages_grows_so_again(id: str, sizes: tuple[tuple[int, int], ...]) -> None:
    recipe = own(id).recipe
    assert recipe.batch.sizes == sizes
    assert parse_recipe(render(recipe), "it") == recipe
    assert set(_written(recipe)) <= set(recipe.why)


def test_a_batch_that_grew_in_increments_grows_so_again() -> None:
    bloom = own("bloom-176b").recipe
    assert bloom.batch.ramp == Ramp(start_tokens=192 * 2048, increment_tokens=16 * 2048, over_tokens=20 * B)
    assert bloom.schedule.warmup_tokens == pytest.approx(375e6, rel=1e-3)
    shared = new(176 * B, 366 * B, "bloom-176b", gpus=64).recipe.batch
    assert all(size % (64 * 2048) == 0 for _, size in shared.sizes)


def test_growth_that_is_not_published_is_said_and_left_out() -> None:
    derived = own("gopher-280b")
    assert len(derived.recipe.batch.sizes) == 1
    assert "how its batch grew, of which too little is published" in " ".join(derived.steps[1].said)
    assert len(own("marin-32b").recipe.batch.sizes) == 1  # it dipped


def test_cool_down_and_warm_up_are_the_runs_own() -> None:
    marin = own("marin-32b").recipe.schedule
    assert (marin.decay, marin.decay_ratio) == ("wsd", 0.4)
    assert marin.warmup_tokens == pytest.approx(0.01 * 6.44 * T, rel=1e-3)
    assert own("smollm2-1.7b").recipe.schedule.decay_ratio == pytest.approx(0.1)
    # 8,000 steps: 63 of 4M until 252M tokens, the rest of 8M.
    llama = own("llama3-405b").recipe.schedule.warmup_tokens
    assert llama == pytest.approx(252e6 + (8_000 - 63) * 8e6, rel=1e-3)
    # None of the bounds that the warm-ups of neighbours have; longer than the run it is refused.
    assert new(B, 10 * B, "olmo2-7b").recipe.schedule.warmup_tokens == pytest.approx(8.39e9, rel=1e-3)
    with pytest.raises(InputError, match=r"the warm-up of --from olmo2-7b alone takes 8.39 B; give more"):
        new(B, 2 * B, "olmo2-7b")


@pytest.mark.parametrize("id", ["llama2-70b", "marin-32b", "olmo-1b", "gpt3-6.7b"])
def test_at_its_own_size_the_shape_is_the_runs(id: str) -> None:
    model, arch = own(id).recipe.model, find_run(id).arch
    assert (model.n_layers, model.d_model, model.d_ff) == (arch.n_layers, arch.d_model, arch.d_ff)
