"""`leaven new`: recipes derived from published runs and laws, over all sizes and durations."""

import math
import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.road import untuned
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import refused

from leaven.catalogue.findings import findings
from leaven.catalogue.laws import find_law
from leaven.catalogue.neighbours import middle, neighbours, size_ratio
from leaven.catalogue.runs import PublishedRun, find_run, load_runs
from leaven.catalogue.starter.batch import BATCH_TOKENS_EXPONENT, LEAST_STEPS, batch_ramps
from leaven.catalogue.starter.draft import StarterRecipes, StarterRequest, used_params
from leaven.catalogue.starter.optimizer import LR_SIZE_EXPONENT
from leaven.catalogue.starter.shape import TIED_SHARE
from leaven.catalogue.starter.starter import starter
from leaven.catalogue.terms import diff_in_terms, read
from leaven.errors import InputError
from leaven.interop.architectures import ARCHITECTURES
from leaven.planning.hardware import parse_cluster
from leaven.planning.start import laid_out
from leaven.planning.trainable import require_trainable
from leaven.recipe.batch import Ramp
from leaven.recipe.files import parse_recipe, render
from leaven.recipe.recipe import Recipe, flatten
from leaven.recipe.units import parse_quantity
from leaven.scaling.table import adamw_rows

B, T = 10**9, 10**12


def new(params: float, tokens: float, **request: object) -> StarterRecipes:
    """Return a starter without a proxy, so that every value is chosen at this size."""
    return starter(replace(StarterRequest("wheat", int(params), int(tokens), proxy=0), **request))  # type: ignore[arg-type]


def comparable(params: float) -> list[PublishedRun]:
    """Return the dense runs within a factor of 4 with an lr of Adam(W)."""
    return [
        run for run in load_runs() if run.kind == "dense" and run.lr_comparable and size_ratio(run, int(params)) <= 4
    ]


@pytest.mark.long
@settings(max_examples=8)
@given(
    params=st.floats(math.log(90e6), math.log(200e9)).map(math.exp),
    tokens_per_param=st.floats(0, math.log(300)).map(math.exp),
)
def test_every_size_and_length_gets_a_sensible_recipe(params: float, tokens_per_param: float) -> None:
    tokens = params * tokens_per_param
    derived = new(params, tokens)
    recipe = derived.target
    model, batch = recipe.model, recipe.batch.tokens
    assert model.params == pytest.approx(params, rel=0.03)
    assert (model.d_model % model.n_heads, model.n_heads % model.n_kv_heads, model.d_ff % 64) == (0, 0, 0)
    assert model.vocab_size % 128 == 0
    assert batch % model.seq_len == 0
    assert batch <= tokens / LEAST_STEPS
    assert recipe.schedule.warmup_tokens <= 0.05 * tokens + 1
    moved = [
        run.peak_lr
        * (run.params_total / model.params) ** (1 / 3)
        * min(max(math.sqrt(batch / (run.batch_tokens or batch)), 0.5), 2)
        for run in comparable(params)
        if run.peak_lr
    ]
    # Two significant digits are up to 5% off.
    assert min(moved) / 2.12 <= recipe.hyperparameters.lr <= max(moved) * 2.12
    assert parse_recipe(render(recipe), "it") == recipe
    assert every_value_has_a_reason(recipe)


def every_value_has_a_reason(recipe: Recipe) -> bool:
    document = tomllib.loads(render(recipe))
    why = document.pop("why")
    return flatten(document).keys() <= why.keys()


@pytest.mark.parametrize(
    ("params", "tokens", "like", "lr", "batch"),
    [
        (125e6, 2.5e9, "cerebras-gpt-111m", (6e-4, 3e-3), (0.2e6, 0.6e6)),
        (1e9, 20e9, "olmo-1b", (2e-4, 3e-3), (0.25e6, 1.1e6)),
        (7e9, 2e12, "llama2-7b", (3e-4, 6e-4), (4e6, 5e6)),
        (70e9, 1.4e12, "llama1-65b", (1e-4, 1.9e-4), (3e6, 8.4e6)),
    ],
)
def test_values_are_near_those_of_published_runs(
    params: float, tokens: float, like: str, lr: tuple[float, float], batch: tuple[float, float]
) -> None:
    """The bounds are those of published runs of this size and length. At 70B the upper one is LLaMA's lr of 1.5e-4,
    moved by the square root from its batch of 4M to the 6.3M here."""
    recipe, run = new(params, tokens).target, find_run(like)
    assert lr[0] <= recipe.hyperparameters.lr <= lr[1]
    assert batch[0] <= recipe.batch.tokens <= batch[1]
    assert run.arch.d_model / 1.5 <= recipe.model.d_model <= run.arch.d_model * 1.5
    assert recipe.hyperparameters.weight_decay == 0.1
    assert recipe.hyperparameters.beta2 == 0.95


def test_the_exponents_fit_published_lineages_and_laws() -> None:
    for lineage in ("gpt3-table", "llama"):
        pairs = [
            (math.log(run.params_total), math.log(run.peak_lr))
            for run in load_runs()
            if run.lineage.name == lineage and run.kind == "dense" and run.lr_comparable and run.peak_lr
        ]
        x, y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        slope = sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)
        assert slope == pytest.approx(LR_SIZE_EXPONENT, abs=0.02)
    names = ("Step Law 2025", "Zhang 2024 critical batch", "Power Lines 2025", "Power Lines 2025 critical batch")
    powers = [find_law(name).batch for name in (*names, "DeepSeek LLM 2024")]
    exponents = sorted(power.tokens or power.compute for power in powers if hasattr(power, "compute"))
    assert exponents[2] == pytest.approx(BATCH_TOKENS_EXPONENT, abs=0.005)


def test_weights_of_votes_fall_to_zero_at_the_edge() -> None:
    """A vote's weight is 0 at the factor of 4; equal weights give the ordinary median."""
    votes = {"a": 1.0, "b": 4.0, "c": 100.0}
    assert middle(votes, dict.fromkeys("abc", 0.3)).value == pytest.approx(4)
    assert middle({"a": 1.0, "b": 4.0}, dict.fromkeys("ab", 1.0)).value == pytest.approx(2)
    assert middle(votes, {"a": 1.0, "b": 0.5, "c": 1e-9}).value == pytest.approx(
        middle({"a": 1.0, "b": 4.0}, {"a": 1.0, "b": 0.5}).value
    )
    run = find_run("gpt2-1558m-llmc")
    edge = run.params_total / 4
    near = neighbours(int(edge * 1.0001), int(20 * edge))
    weights = near.weights([run.id for run in near.runs])
    assert min(weights.values()) < 0.001
    assert max(weights.values()) > 0.5


def test_a_ramp_of_published_proportions() -> None:
    recipe = new(70 * B, 1.4 * T).target
    ramp = recipe.batch.ramp
    assert recipe.batch.tokens % ramp.start_tokens == 0
    assert 0.025 < ramp.over_tokens / recipe.data.tokens < 0.055  # GLM-130B 2.5%, BLOOM-176B 5.5%
    assert new(B, 20 * B).target.batch.ramp is None
    starts, lengths = batch_ramps()
    assert starts["bloom-176b"] == pytest.approx(192 / 2048)
    assert lengths["glm-130b"] == 0.025


@pytest.mark.parametrize("asked", [{"vocab": 10**6}, {"reference": "llama2-70b"}])
def test_the_option_that_an_error_names_works(asked: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        new(20e6, 8.4 * B, **asked)
    named = re.findall(r"--(vocab|params) ([0-9.]+[MB]?)(?= or|$)", str(caught.value))
    assert "params" in dict(named)
    for option, value in named:
        size = parse_quantity(value)
        wanted = StarterRequest("wheat", 20_000_000, int(8.4 * B))
        model = starter(replace(wanted, **(asked | {option: size}))).target.model  # type: ignore[arg-type]
        assert model.params == pytest.approx(size if option == "params" else wanted.params, rel=0.05)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"params": 0}, "--params 0: give 100 k to 10 T"),
        ({"tokens": 1_000}, "fewer than 2,000 sequences of 128 tokens; give 256 k"),
        ({"vocab": 5}, "--vocab 5: give 257"),
        ({"params": 20 * 10**6, "tokens": B, "vocab": 10**6}, "has 192 M (+862%); give --vocab "),
        ({"reference": "glam-1.2t"}, "is for Adafactor relative lr and cannot be used with plain AdamW or Muon"),
        ({"reference": "nemotron-4-15b"}, "it publishes no learning rate; give a run of similar size: "),
        ({"reference": "cerebras-gpt-1.3b-mup"}, "is for muP"),
        ({"reference": "llama2-70b", "tokens": 10**8}, "of --from llama2-70b, 4.00 M tokens; give 800 M or more"),
    ],
)
def test_bad_input_is_one_line(asked: dict[str, object], message: str) -> None:
    with refused(message):
        starter(replace(StarterRequest("wheat", B, 20 * B), **asked))  # type: ignore[arg-type]


def test_a_starter_on_a_cluster_can_be_trained_from_its_first_batch() -> None:
    """A published batch of 16 M tokens is not a whole number of sequences, and a ramp starts small."""
    llama = StarterRequest("llama", 405 * B, 15_600 * B, reference="llama3-405b", gpus=2_048)
    for asked in (llama, StarterRequest("ramped", 70 * B, 1_400 * B, gpus=512)):
        recipe = laid_out(starter(asked), parse_cluster(f"{asked.gpus}xH100-80GB")).target
        assert len(recipe.batch.sizes) > 1
        require_trainable(recipe, recipe.layout.ranks)
    few = StarterRequest("few", 125_000_000, 125_000_000, gpus=4_096)
    with pytest.raises(InputError, match="^--gpus 4096xH100-SXM-80GB: .*; 256 GPUs would work$"):
        laid_out(starter(few), parse_cluster("4096xH100-80GB"))

    large = StarterRequest("large", 70 * B, 20 * B, gpus=1)
    with pytest.raises(InputError, match=r"^--gpus 1xL40S-48GB: nothing fits: .*; \d+xL40S-48GB would work$"):
        laid_out(starter(large), parse_cluster("1xL40S"))


def at_own_scale(id: str) -> Recipe:
    """Return the recipe of `leaven new --from` at the run's own size and length."""
    run = find_run(id)
    return new(run.params_total, run.tokens or 0, reference=id, proxy=None).target


@pytest.mark.parametrize("id", ["gpt3-13b", "smollm2-135m", "openelm-3b"])
def test_the_values_of_a_reference_stay_together(id: str) -> None:
    run = find_run(id)
    recipe = new(run.params_total / 2, 300 * B, reference=id, proxy=None).target
    assert recipe.hyperparameters.lr == run.peak_lr
    assert recipe.batch.tokens == pytest.approx(run.batch_tokens, rel=1e-3)
    assert recipe.hyperparameters.weight_decay == run.optim.weight_decay
    assert recipe.schedule.decay == run.decay
    assert recipe.model.params == pytest.approx(run.params_total / 2, rel=0.03)
    assert recipe.base.depth == run.arch.n_layers
    assert recipe.base.width == pytest.approx(run.arch.d_model, rel=0.01)
    assert every_value_has_a_reason(recipe)


@pytest.mark.parametrize(
    ("id", "sizes"),
    [
        # As published (arXiv 2407.21783: 4M, 8M after 252M tokens, 16M after 2.87T), in whole sequences of 8,192.
        ("llama3-405b", ((0, 488 * 8192), (252_000_000, 977 * 8192), (2_870_000_000_000, 1953 * 8192))),
        ("chinchilla-70b", ((0, 732 * 2048), (700_000_000_000, 1465 * 2048))),
        ("cerebras-gpt-13b", ((0, 720 * 2048), (84_049_920_000, 1080 * 2048))),
    ],
)
def test_stages_of_a_reference_are_repeated(id: str, sizes: tuple[tuple[int, int], ...]) -> None:
    recipe = at_own_scale(id)
    assert recipe.batch.sizes == sizes
    assert parse_recipe(render(recipe), "it") == recipe
    assert every_value_has_a_reason(recipe)


def test_the_ramp_of_a_reference_is_repeated() -> None:
    bloom = at_own_scale("bloom-176b")
    assert bloom.batch.ramp == Ramp(start_tokens=192 * 2048, increment_tokens=16 * 2048, over_tokens=20 * B)
    assert bloom.schedule.warmup_tokens == pytest.approx(375e6, rel=1e-3)
    shared = new(176 * B, 366 * B, reference="bloom-176b", proxy=None, gpus=64).target.batch
    assert all(size % (64 * 2048) == 0 for _, size in shared.sizes)


@pytest.mark.parametrize(
    ("id", "values"),
    [
        ("olmo2-7b", {"norm_placement": "output", "qk_norm": True, "qk_norm_whole": True}),
        ("gpt-j-6b", {"parallel_branches": True, "rotary_fraction": 0.25}),
        ("pythia-160m", {"parallel_branches": True, "rotary_fraction": 0.25}),
        ("qwen-14b", {"attention_bias": "qkv", "bias": False}),
    ],
)
def test_the_architecture_of_a_reference_is_repeated(id: str, values: dict[str, object]) -> None:
    recipe = at_own_scale(id)
    assert {name: getattr(recipe.model, name) for name in values} == values
    published = find_run(id).init_std
    assert published is None or recipe.hyperparameters.init_std == pytest.approx(published, rel=0.01)
    others = {row.path for row in diff_in_terms(find_run(id), recipe)}
    assert not {path for path in others if path.startswith(("model.norm", "model.parallel", "model.rotary", "arch."))}


@pytest.mark.parametrize(
    ("id", "experts", "values"),
    [
        ("olmoe-1b-7b", (64, 8, 1024, 0, 0, "softmax", False, "loss"), {"model.experts.router_z_loss": 0.001}),
        ("deepseek-v3", (256, 8, 2048, 1, 3, "sigmoid", True, "both"), {"model.experts.balance_loss": 1e-4}),
        ("glm-4.5", (160, 8, 1536, 1, 3, "sigmoid", True, "bias"), {"hyperparameters.muon.momentum": 0.95}),
    ],
)
def test_the_experts_of_a_reference_are_repeated(
    id: str, experts: tuple[object, ...], values: dict[str, Any]
) -> None:
    recipe, run = at_own_scale(id), find_run(id)
    own = recipe.model.experts
    found = (own.number, own.active, own.d_expert, own.shared, own.dense_layers, own.router, own.normalise)
    assert (*found, own.balance) == experts
    assert (recipe.model.n_layers, recipe.model.d_model) == (run.arch.n_layers, run.arch.d_model)
    assert recipe.model.params == pytest.approx(run.params_total, rel=0.03)
    assert {path: read(recipe, path) for path in values} == values
    assert (recipe.hyperparameters.optimizer, recipe.hyperparameters.lr) == (run.optimizer, run.peak_lr)
    assert every_value_has_a_reason(recipe)
    assert {recipe.why[f"model.experts.{name}"] for name in ("number", "d_expert", "router")} == {f"as {id}"}
    small = new(20 * B, 400 * B, reference=id).target  # a smaller shape, with the run as its base
    assert small.model.params == pytest.approx(20 * B, rel=0.03)
    assert small.base_shape.experts == own


def test_what_a_recipe_lacks_of_a_mixture_is_listed() -> None:
    (step,) = (one for one in new(671 * B, 14.8 * T, reference="deepseek-v3").steps if one.title == "neighbours")
    for lost in ("latent attention", "fp8 matrix products", "mtp_depth 1", "expert_groups 8"):
        assert lost in step.reason


def test_warm_up_and_cooldown_of_a_reference_are_repeated() -> None:
    marin = at_own_scale("marin-32b").schedule
    assert (marin.decay, marin.decay_ratio) == ("wsd", 0.4)
    assert marin.warmup_tokens == pytest.approx(0.01 * 6.44 * T, rel=1e-3)
    assert at_own_scale("smollm2-1.7b").schedule.decay_ratio == pytest.approx(0.1)
    # 8,000 steps: 63 of 4M until 252M tokens, the rest of 8M.
    # 2,000 steps in a linear ramp from 12.6 M to 62.9 M tokens in 469 B: the sum of 2,000 growing batches.
    batch = total = 3_072 * 4_096
    for _ in range(1_999):
        batch = 3_072 * 4_096 * (1 + 4 * total / 469e9)
        total += batch
    assert find_run("deepseek-v3").warmup_tokens == pytest.approx(total, rel=1e-3)
    llama = at_own_scale("llama3-405b").schedule.warmup_tokens
    assert llama == pytest.approx(252e6 + (8_000 - 63) * 8e6, rel=1e-3)
    # The bounds on the warm-ups of neighbours do not apply, but a warm-up longer than the run is refused.
    assert new(B, 10 * B, reference="olmo2-7b", proxy=None).target.schedule.warmup_tokens == pytest.approx(
        8.39e9, rel=1e-3
    )
    with pytest.raises(InputError, match=r"the warm-up of --from olmo2-7b alone takes 8.39 B; give more"):
        new(B, 2 * B, reference="olmo2-7b", proxy=None)


@pytest.mark.parametrize(("params", "experts"), [(300_000_000, None), (7 * B, (64, 8)), (47 * B, (8, 1))])
def test_an_untuned_recipe_has_the_values_of_leaven_new_for_its_size_and_batch(
    params: int, experts: tuple[int, int] | None
) -> None:
    """For a mixture of experts, the size is what a token uses in the chosen shape, not an estimate."""
    target = new(params, 20 * params, experts=experts).target
    plain = target.replace({"hyperparameters": {"lr": 1.0, "init_std": 1.0}, "schedule": {}})
    assert untuned(plain).hyperparameters == target.hyperparameters
    assert untuned(plain).schedule == target.schedule


@pytest.mark.parametrize(
    ("params", "experts"), [(7 * B, (64, 8)), (47 * B, (8, 2)), (30 * B, (128, 6)), (40e6, (16, 2))]
)
def test_experts_are_chosen_for_what_a_token_uses(params: float, experts: tuple[int, int]) -> None:
    """--params has all experts; lr and batch are about those of a dense model with the parameters in use."""
    started = starter(StarterRequest("wheat", int(params), int(20 * params), experts=experts))
    target, model = started.target, started.target.model
    assert (model.experts.number, model.experts.active) == experts
    assert model.params == pytest.approx(params, rel=0.05)
    used = model.experts.active + model.experts.shared
    assert model.d_ff == used * model.experts.d_expert
    assert 2 < model.d_ff / model.d_model < 6
    assert model.params_active == pytest.approx(used_params(int(params), experts), rel=0.25)
    dense = new(model.params_active, target.data.tokens).target
    sparse = new(params, target.data.tokens, experts=experts).target
    assert 0.7 < sparse.hyperparameters.lr / dense.hyperparameters.lr < 1.15  # OLMoE had a lower lr
    assert sparse.batch.tokens == pytest.approx(dense.batch.tokens, rel=0.5)
    assert "model.experts.d_expert" in target.why
    if (proxy := started.tuning.proxy) is not None:
        small = proxy.shape.experts
        assert (small.number, small.active) == experts
        assert (proxy.params, proxy.params_active) == (proxy.shape.params, proxy.shape.params_active)
        assert proxy.tokens / proxy.shape.params_active == pytest.approx(
            target.data.tokens / model.params_active, rel=0.01
        )
        assert proxy.shape.d_ff == used * small.d_expert


def test_published_experts_vote_on_experts() -> None:
    """Near 1.3 B parameters that a token uses these are OLMoE, DeepSeekMoE 16B and, with Muon, Moonlight."""
    why = new(7 * B, 140 * B, experts=(64, 8)).target.why
    for name in ("hyperparameters.lr", "batch.tokens", "model.vocab_size", "hyperparameters.beta2"):
        assert "olmoe-1b-7b" in why[name]
        assert "moonlight" not in why["hyperparameters.lr"]
    for name, value in {"active": "6", "d_expert": "5.5", "shared": "2 of 3", "dense_layers": "2 of 3"}.items():
        reason = why[f"model.experts.{name}"]
        assert value in reason
        assert all(id in reason for id in ("olmoe-1b-7b", "deepseek-moe-16b", "moonlight-16b-a3b"))
    dense = starter(StarterRequest("wheat", B, 20 * B)).target.why
    assert not any("olmoe" in reason for path, reason in dense.items())
    large = new(600 * B, 10 * T, experts=(256, 8)).target.model
    assert (large.experts.shared, large.experts.dense_layers) == (1, 3)  # GLM-4.5, DeepSeek-V3


@pytest.mark.parametrize(
    ("params", "experts"), [(47 * B, (8, 2)), (47 * B, (8, 1)), (B, (8, 2)), (40 * 10**6, (16, 2))]
)
def test_fine_experts_do_not_decide_for_few_large_experts(params: int, experts: tuple[int, int]) -> None:
    """Mixtral's shape: all published mixtures with shared experts use 6 or 8 of at least 64."""
    target = new(params, 20 * params, experts=experts).target
    model = target.model
    assert (model.experts.shared, model.experts.dense_layers, model.experts.router) == (0, 0, "softmax")
    assert "deepseek" in target.why["model.experts.shared"]
    assert "deepseek" in target.why["model.experts.dense_layers"]


@pytest.mark.parametrize(("params", "experts"), [(40 * 10**6, (16, 1)), (7 * B, (64, 8)), (47 * B, (8, 2))])
def test_new_experts_have_a_hugging_face_format_and_pass_the_checks(params: int, experts: tuple[int, int]) -> None:
    recipe = new(params, 20 * params, experts=experts).target
    assert any(not architecture.misfits(recipe.model) for architecture in ARCHITECTURES)
    assert {one.severity for one in findings(recipe, adamw_rows)} <= {"note"}


@pytest.mark.parametrize(("params", "experts"), [(1_150_000_000, None), (1_200_000_000, None), (7 * B, (64, 8))])
def test_the_share_in_the_reason_is_the_one_that_ties_the_embeddings(
    params: int, experts: tuple[int, int] | None
) -> None:
    """The reason must not give a share of 7% for tied embeddings if they are tied above 8%."""
    target = new(params, 20 * params, experts=experts).target
    share = re.search(r"the embedding has ([\d.]+)%", target.why["model.tied_embeddings"])
    off = float(share[1]) - 100 * TIED_SHARE
    assert off >= 0 if target.model.tied_embeddings else off <= 0


def test_a_proxy_of_experts_has_the_requested_size_with_all_experts() -> None:
    started = starter(StarterRequest("wheat", 7 * B, 140 * B, experts=(64, 8), proxy=150_000_000))
    assert started.tuning.proxy.params == started.tuning.proxy.shape.params == pytest.approx(150e6, rel=0.25)
