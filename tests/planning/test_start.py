"""`leaven new` derives a target and its proxy from one base."""

import re

import pytest

from leaven.catalogue.findings import findings
from leaven.catalogue.starter.base import tuned_bases
from leaven.catalogue.starter.draft import StarterRequest
from leaven.catalogue.starter.proxy import SHARE, SMALLEST, WORTH, trials_worth
from leaven.errors import InputError
from leaven.planning.hardware import parse_cluster
from leaven.planning.plan import cluster_for, plan_recipe
from leaven.planning.start import StarterRecipes, start
from leaven.recipe.shape import Role
from leaven.recipe.units import parse_quantity
from leaven.scaling.table import parameter_table
from leaven.scaling.tested_ranges import warnings
from leaven.scaling.transfer import transfer_like

SIZES = [("125M", "2.5B"), ("350M", "7B"), ("1B", "20B"), ("8B", "15T"), ("405B", "15T")]


def new(params: str, tokens: str, proxy: int | None = None) -> StarterRecipes:
    return start(StarterRequest("wheat", parse_quantity(params), parse_quantity(tokens), proxy=proxy))


pytestmark = pytest.mark.xdist_group("start")  # one worker plans what the tests share


@pytest.fixture(scope="module")
def starts() -> dict[tuple[str, str], StarterRecipes]:
    forced = {"125M": 12_000_000, "350M": 20_000_000}  # for these leaven advises against a proxy
    return {(params, tokens): new(params, tokens, forced.get(params)) for params, tokens in SIZES}


def test_a_value_is_not_called_outside_by_a_factor_of_1(starts: dict[tuple[str, str], StarterRecipes]) -> None:
    lines = [line for started in starts.values() for step in started.steps for line in step.lines]
    assert any("beta1" in line and "published" in line for line in lines)
    assert not [line for line in lines if line.partition(": outside by a factor of ")[2] == "1"]


def test_only_models_too_large_for_a_processor_get_bf16(starts: dict[tuple[str, str], StarterRecipes]) -> None:
    """Most processors emulate bf16 at half the speed of fp32."""
    assert new("1M", "20M").target.precision.compute == "fp32"
    assert {started.target.precision.compute for started in starts.values()} == {"bf16"}


@pytest.mark.long
@pytest.mark.parametrize("experts", [None, (64, 8)])
@pytest.mark.parametrize("gpus", [8, 64, 512])
def test_the_hours_of_the_search_are_those_of_the_plan_of_its_trials(
    gpus: int, experts: tuple[int, int] | None
) -> None:
    """With an assumed MFU of 40% they were a third of the planned hours for experts."""
    request = StarterRequest("wheat", 7_000_000_000, 140_000_000_000, experts=experts, gpus=gpus)
    cluster = parse_cluster(f"{gpus}xH100")
    started = start(request, cluster)
    assert started.proxy
    assert started.tuning.proxy
    planned = plan_recipe(started.proxy, cluster_for(started.proxy, cluster.accelerator)).document()
    gpu_hours = planned.gpu_hours * started.tuning.proxy.trials
    lines = next(step.lines for step in started.steps if step.title == "proxy")
    for text in (started.tuning.reason, lines[-1]):
        said = re.search(r"about ([\d,.]+) GPU-hours on 1xH100", text)
        assert said
        assert float(said[1].replace(",", "")) == pytest.approx(gpu_hours, rel=0.05)


@pytest.mark.parametrize("size", SIZES, ids="-".join)
def test_what_new_proposes_passes_its_own_checks_at_proxy_and_target(
    starts: dict[tuple[str, str], StarterRecipes], size: tuple[str, str]
) -> None:
    started = starts[size]
    assert started.proxy
    ratios = parameter_table(started.target).ratios
    assert (ratios.width <= 16, ratios.depth <= 32, ratios.tokens <= 100) == (True, True, True)
    assert min(ratios.width, ratios.depth, ratios.tokens) >= 1
    for recipe in (started.proxy, started.target):
        assert 19 <= recipe.model.d_model / recipe.model.n_layers <= 205  # the range of all published runs
        found = findings(recipe, lambda one: parameter_table(one).rows)
        assert [one.check for one in found if one.severity != "note"] == []
        assert "z-loss" not in {one.check for one in found}
        assert warnings(recipe) == []


@pytest.mark.parametrize("size", SIZES, ids="-".join)
def test_proxy_and_target_are_one_recipe_at_two_scales(
    starts: dict[tuple[str, str], StarterRecipes], size: tuple[str, str]
) -> None:
    started = starts[size]
    proxy, target = started.proxy, started.target
    assert proxy
    assert proxy.hyperparameters == target.hyperparameters
    assert proxy.base_shape == target.base_shape == proxy.model
    assert (proxy.base.batch_tokens, proxy.base.tokens) == (proxy.batch.tokens, proxy.data.tokens)
    each = [recipe.data.tokens / recipe.model.params for recipe in (proxy, target)]
    assert each[0] == pytest.approx(each[1], rel=1e-3)
    steps = proxy.data.tokens / proxy.batch.tokens, target.data.tokens / target.batch.tokens
    assert steps[0] == pytest.approx(steps[1], rel=0.05)
    assert proxy.model.n_heads / proxy.model.n_kv_heads == target.model.n_heads / target.model.n_kv_heads
    assert proxy.schedule.warmup_tokens / proxy.data.tokens == pytest.approx(
        target.schedule.warmup_tokens / target.data.tokens, rel=1e-3
    )
    # A proxy is its own base, so its values, such as published betas, are used unchanged.
    row = next(row for row in parameter_table(proxy).rows if row.role is Role.HIDDEN_WEIGHT)
    assert (row.lr, row.beta1, row.beta2) == (target.hyperparameters.lr, 0.9, 0.95)
    moved = next(row for row in parameter_table(target).rows if row.role is Role.HIDDEN_WEIGHT)
    assert moved.beta1 == pytest.approx(0.9, abs=0.02)
    if size in SIZES[:2]:  # a forced proxy costs more than leaven advises
        return
    proposed = started.tuning.proxy
    assert proposed
    assert proposed.shape.params >= SMALLEST
    flops = proposed.trials * proposed.shape.params * proposed.tokens
    run_flops = target.model.params * target.data.tokens
    assert flops <= SHARE * run_flops * 1.001
    assert proposed.cost == pytest.approx(flops / run_flops)


@pytest.mark.parametrize(("params", "tokens"), SIZES[:2])
def test_where_tuning_costs_more_than_it_gains_the_published_values_are_used(params: str, tokens: str) -> None:
    started = new(params, tokens)
    assert started.proxy is None
    found = findings(started.target, lambda one: parameter_table(one).rows)
    assert [one.check for one in found if one.severity != "note"] == []
    assert warnings(started.target) == []
    assert "tuning was found to gain at most 24%" in started.tuning.reason
    target = started.target
    assert (target.base.width, target.base.tokens) == (target.model.d_model, target.data.tokens)
    assert all(row.lr == target.hyperparameters.lr for row in parameter_table(target).rows)


def test_an_expensive_search_gets_fewer_trials() -> None:
    tuning = new("1B", "20B").tuning
    assert tuning.proxy
    assert tuning.proxy.trials == 32
    assert tuning.proxy.cost <= SHARE < WORTH
    assert "64 trials would cost 16%, more than the 10%" in tuning.reason
    costs = [0.0005 * 1.1**n for n in range(60)]
    trials = [trials_worth(cost) for cost in costs]
    assert trials == sorted(trials, reverse=True)  # a more expensive trial never increases their number


def test_the_target_is_compared_with_published_runs_of_its_size() -> None:
    compared = {one.what: one for one in new("8B", "15T").compared}
    lr = compared["lr of hidden matrices"]
    assert not lr.outside
    assert (lr.low, lr.high) == (1.2e-4, 2e-3)  # gpt3-table's bloom-7b1, dclm-7b-2x
    assert compared["beta1"].value == pytest.approx(0.9, abs=0.01)
    small = new("1M", "20M")
    assert "nothing to compare with" in " ".join(small.steps[-1].lines)


def test_a_proxy_of_a_given_size() -> None:
    started = new("1B", "20B", proxy=100_000_000)
    assert started.proxy
    assert started.proxy.model.params == pytest.approx(1e8, rel=0.2)
    assert new("1B", "20B", proxy=0).proxy is None
    with pytest.raises(InputError, match=r"--proxy 900 M: no proxy .* has that size; the nearest possible: 498 M"):
        new("1B", "20B", proxy=900_000_000)


def test_where_nothing_is_published_leavens_own_tuned_base_is_the_start() -> None:
    base = tuned_bases()[0]
    started = new("300k", "6M")
    target = started.target
    assert (target.base.width, target.base.depth, target.base.batch_tokens, target.base.tokens) == (
        *(base.model.d_model, base.model.n_layers),
        *(base.batch.tokens, base.data.tokens),
    )
    assert target.hyperparameters == base.hyperparameters
    assert base.name in target.why["hyperparameters.lr"]
    assert warnings(target) == []
    # Published runs decide above 32 times its size and wherever there are some.
    assert base.name not in new("30M", "600M").target.why["hyperparameters.lr"]
    assert base.name not in new("125M", "2.5B").target.why["hyperparameters.lr"]


def test_a_searched_batch_comes_back_as_a_multiple_of_the_proxys_own() -> None:
    """Also if the scale of the proxy is not the base, as with a tuned base."""
    for started in (new("300k", "6M", proxy=43_300), new("1B", "20B")):
        proxy, target = started.proxy, started.target
        assert proxy
        found = proxy.replace({"why": proxy.why | {"batch.tokens": "study wheat, trial 0; as at the start"}})
        assert transfer_like(found, target).batch.tokens == target.batch.tokens
        why = f"study wheat, trial 3; the start's {proxy.batch.tokens:,} changes the loss by +0.01"
        doubled = proxy.replace({"batch.tokens": 2 * proxy.batch.tokens, "why": {"batch.tokens": why}})
        assert transfer_like(doubled, target).batch.tokens == 2 * target.batch.tokens
