import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.planning.shapes import LLAMA_8B, LLAMA_405B, SMALL, plan

from leaven.documents.planning import PlanDocument
from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement, parse_layout, written
from leaven.planning.flops import flops_per_token
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.layouts import Job, LayoutCandidate, ranked
from leaven.planning.memory import GIB
from leaven.planning.plan import plan as plan_job
from leaven.planning.plan import plan_recipe
from leaven.planning.published import plan_run
from leaven.planning.training_codes import OFFERED, Moments
from leaven.recipe.batch import Batch, BatchStage
from leaven.recipe.files import read_recipe
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape, Role
from leaven.recipe.units import format_parameters
from leaven.views.terminal.plan import plan_screen


@pytest.mark.parametrize("name", OFFERED)
def test_runs_and_recipes_are_planned_for_every_program_that_is_offered(name: str) -> None:
    for run, how in (("olmo-1b", "tp=2,zero=1,mbs=1"), ("olmoe-1b-7b", "ep=8,zero=1,mbs=1")):
        assert name in plan_run(run, "64xH100-80GB", how, code=name).cautions[-1]
    recipe = read_recipe(Path("examples/350m.toml"))
    half = recipe.replace({"precision.compute": "bf16"})
    assert plan_recipe(half, "8xH100-80GB", code=name).job.code.name == name


def test_layouts_are_parsed() -> None:
    layout, micro_batch = parse_layout("tp=8,pp=12,dp=4,zero=1,mbs=2,recompute=full", 384)
    assert layout == Layout(dp=4, tp=8, pp=12, zero=1, recompute="full")
    assert micro_batch == 2
    assert parse_layout(" tp=4 , pp=2 ", 64) == (Layout(dp=8, tp=4, pp=2), None)
    replicas, _ = parse_layout("dp_replicate=2,zero=1,tp=2", 8)
    assert (replicas.dp, replicas.dp_replicate) == (4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=8,pp=6,dp=2", r"is 96 ranks, but there are 48 GPUs; dp=1 would work"),
        ("tp=7,pp=5", r"is 35 ranks, but there are 48 GPUs; tp x pp x cp must divide 48"),
        ("tpp=8", r"no such key 'tpp'; did you mean tp\?"),
        ("tp=eight", r"tp must be a whole number from 1 on"),
        ("mbs=0", r"mbs must be a whole number from 1 on"),
        ("zero=4", r"zero must be 0, 1, 2 or 3"),
        ("schedule,pp=2", r"'schedule' is wrong; schedule must be gpipe, 1f1b, interleaved or zero-bubble"),
        ("pp=2,pp=4", r"pp appears twice"),
        ("pp=1,schedule=gpipe", r"pp = 1 has no pipeline"),
        ("tp=8", r"12 heads, .* are not all divisible by 8; tp of 1, 2 or 4 works"),
        ("pp=16", r"there are only 12 layers; at most 12 stages work"),
        ("dp=48", r"a batch of 64 sequences cannot be split evenly over dp 48; a batch of 49,152 tokens would work"),
    ],
)
def test_impossible_layouts_are_refused_with_what_would_work(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        plan(SMALL, 65_536, "48xA100", text)
    assert "\n" not in str(raised.value)


def test_an_error_names_how_many_gpus_would_fit() -> None:
    with pytest.raises(InputError, match=r"nothing fits: .* limit 68 of 80 GiB .* on each GPU; .* would") as raised:
        plan(LLAMA_8B, 64 * 8192, "1xA100-80GB")
    would_do = str(raised.value).split("; ")[1].removesuffix(" would work")
    assert plan(LLAMA_8B, 64 * 8192, would_do).chosen.fits


def test_a_cpu_that_is_too_small_is_not_told_to_take_more_processes() -> None:
    cpu = replace(parse_cluster("cpu").accelerator, memory_gib=4.5)
    with pytest.raises(InputError, match=r"of 4\.5 GiB .* on each GPU; use an accelerator with more memory or a"):
        plan_job(Job(SMALL, Batch(tokens=65_536), Cluster(1, cpu)), 10**9)


def test_a_given_layout_is_planned_even_if_it_does_not_fit_and_one_that_fits_is_named() -> None:
    cluster, batch = "64xH100-80GB", 4_194_304
    found = plan(LLAMA_8B, batch, cluster, "dp=64")
    assert not found.chosen.fits
    assert found.chosen.memory.total > 80 * GIB
    assert found.chosen.arrangement.micro_batch == 1
    changes, gib = re.fullmatch(r".*; (.*) would fit in (.*) GiB", found.cautions[0]).groups()
    changed = plan(LLAMA_8B, batch, cluster, f"dp=64,{changes}")
    assert changed.chosen.fits
    assert f"{changed.chosen.memory.total / GIB:.1f}" == gib
    assert len(changes.split(",")) == 1


def test_the_numbers_of_a_document_are_consistent() -> None:
    found = plan(LLAMA_8B, 4_194_304, "64xH100-80GB")
    document, speed = found.document("tp=8"), found.speed
    assert PlanDocument.model_validate(json.loads(json.dumps(document.dump()))) == document
    assert sum(document.memory.parts.values()) == pytest.approx(document.memory.gib)
    assert sum(document.time.values()) == pytest.approx(speed.step_seconds)
    assert document.explain is not None
    assert speed.tokens_per_second == pytest.approx(4_194_304 / speed.step_seconds)
    assert speed.tflops_per_gpu * 64e12 == pytest.approx(flops_per_token(LLAMA_8B) * speed.tokens_per_second)
    assert speed.mfu == pytest.approx(speed.tflops_per_gpu / 989)
    assert speed.mfu_causal < speed.mfu <= speed.hfu
    assert document.days == pytest.approx(10**12 / speed.tokens_per_second / 86_400, rel=1e-4)
    assert document.gpu_hours == pytest.approx(document.days * 24 * 64)
    others = [Arrangement.read(other.layout).layout for other in document.alternatives]
    assert len({*others, found.chosen.arrangement.layout}) == 6
    assert all(other.step_seconds >= speed.step_seconds * 0.99 for other in document.alternatives)  # 1% is equal


@pytest.mark.long
@settings(max_examples=30)
@given(gpus=st.sampled_from([1, 2, 6, 8, 24, 64, 96]), power=st.integers(16, 22))
def test_every_plan_divides_the_batch_and_fits(gpus: int, power: int) -> None:
    found = plan(SMALL, 2**power, f"{gpus}xA100-40GB")
    how = found.chosen.arrangement
    assert how.layout.ranks == gpus
    assert how.layout.dp * how.micro_batch * how.grad_accumulation * SMALL.seq_len == 2**power
    assert SMALL.n_heads % how.layout.tp == 0
    assert found.chosen.fits
    assert found.chosen.memory.total < 0.85 * 40 * 2**30


def test_among_equally_fast_plans_the_simpler_wins() -> None:
    job = Job(SMALL, Batch(tokens=2**19), parse_cluster("1xH100"))
    same = LayoutCandidate(job, Arrangement(Layout(), 8, 64))  # 8,192 tokens
    others = [Arrangement(Layout(), size, 512 // size) for size in (1, 4, 16, 64)]
    others += [Arrangement(Layout(dp=2, zero=zero), 8, 32) for zero in (1, 3)]

    def of_time(how: Arrangement, share: float) -> LayoutCandidate:
        candidate = LayoutCandidate(job, how)
        vars(candidate)["time"] = replace(same.time, compute=share * same.time.compute)
        return candidate

    slightly_faster = [of_time(how, 1 - n / 1000) for n, how in enumerate(others, 1)]
    assert ranked([*slightly_faster, same])[0] is same
    faster = of_time(others[-1], 0.97)
    assert ranked([same, faster]) == [faster, same]


def test_the_first_batch_of_a_ramp_fills_the_pipeline() -> None:
    """70B on 512 GPUs from 64 sequences on: dp 16 and pp 8 would leave stages without a micro-batch."""
    sizes = {"n_layers": 80, "d_model": 8192, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28_672, "vocab_size": 32_000}
    shape = LLAMA_405B.model_copy(update=sizes | {"seq_len": 4096})
    tokens, first = 2048 * shape.seq_len, 64 * shape.seq_len
    cluster = "512xH100-80GB"
    stages = (BatchStage(from_tokens=0, tokens=first), BatchStage(from_tokens=10**9, tokens=tokens))
    whole, ramped = plan(shape, tokens, cluster), plan(shape, Batch(tokens=tokens, stages=stages), cluster)
    for found in (ramped.chosen.arrangement, *(other.arrangement for other in ramped.exploration.fitting[:20])):
        assert -(-64 // found.layout.dp // found.micro_batch) >= found.layout.pp
    assert whole.chosen.time.step <= ramped.chosen.time.step
    with pytest.raises(InputError, match="pp=8: the smallest batch of 64 sequences gives a rank only 4 micro"):
        plan(shape, Batch(tokens=tokens, stages=stages, micro_batch=1), cluster, "dp=16,tp=4,pp=8")


def test_blocks_are_compiled_in_every_layout_if_the_recipe_or_the_layout_says_so(tiny: Recipe) -> None:
    compiled = tiny.replace({"layout.compile": True})
    plain, faster = (plan_recipe(recipe, "2xH100") for recipe in (tiny, compiled))
    assert {one.arrangement.layout.compile for one in faster.exploration.fitting} == {True}
    assert {one.arrangement.layout.compile for one in plain.exploration.fitting} == {False}
    assert faster.chosen.time.step <= plain.chosen.time.step
    for recipe, layout, there in (
        (compiled, "tp=1", True),
        (compiled, "compile=false", False),
        (tiny, "compile=true", True),
    ):
        found = plan_recipe(recipe, "2xH100", layout)
        assert {one.arrangement.layout.compile for one in (found.chosen, *found.exploration.fitting)} == {there}
        assert str(found.chosen.arrangement).endswith(" · compiled") is there
        assert parse_layout(written(found.chosen.arrangement.layout), 2)[0] == found.chosen.arrangement.layout


@pytest.mark.long
def test_a_published_run_with_experts_is_planned_by_its_id() -> None:
    found = plan_run("olmoe-1b-7b", "64xH100-80GB")
    assert found.chosen.fits
    assert found.exploration.untrained is None
    # 6.9 B parameters, of which a token passes 1.3 B, are 6 N and some attention.
    assert flops_per_token(found.job.model) == pytest.approx(6 * 1.3e9, rel=0.35)
    asked, without = (plan_run("olmoe-1b-7b", "64xH100-80GB", f"ep={ep},zero=1,mbs=1") for ep in (8, 1))
    assert asked.chosen.memory.weights < without.chosen.memory.weights
    with pytest.raises(InputError, match="did you mean"):
        plan_run("olmo-1b-7b", "64xH100")
    with pytest.raises(InputError, match="ep=3: 64 experts are not divisible by 3"):
        plan_run("olmoe-1b-7b", "48xH100-80GB", "ep=3")


def shown(document: PlanDocument) -> str:
    """The terminal screen of a plan."""
    out = Console(width=120, record=True, file=StringIO(), soft_wrap=True)
    for part in plan_screen(document):
        out.print(part)
    return out.export_text()


def test_a_recipe_with_experts_is_planned_and_expert_parallelism_is_explained() -> None:
    experts = {"number": 64, "active": 8, "d_expert": 1024}
    shape = ModelShape.model_validate(
        LLAMA_8B.model_dump() | {"n_layers": 16, "d_model": 2048, "d_head": 64, "experts": experts}
    )
    found = plan(shape, Batch(tokens=4_194_304, micro_batch=1), "64xH100-80GB", "dp=64,ep=8,zero=1")
    document = found.document()
    assert (document.params, document.params_active) == (shape.params, shape.params_active)
    screen = shown(document)
    assert format_parameters(shape.params, shape.params_active) in screen
    assert "exchange in blocks" in screen
    assert "all-reduce" not in screen
    assert "published mixtures of experts" in screen
    # the experts of a rank are an eighth, and its gradients and weights with them
    one = plan(shape, Batch(tokens=4_194_304, micro_batch=1), "64xH100-80GB", "dp=64,zero=1")
    routed = 16 * 64 * 3 * 2048 * 1024
    assert one.chosen.memory.grads - found.chosen.memory.grads == pytest.approx(4 * routed * 7 / 8)


def test_fp32_is_slower_larger_and_refused_where_no_peak_is_known(tiny: Recipe) -> None:
    fp32, bf16 = (
        plan_recipe(tiny.replace({"precision.compute": compute}), "1xH100", "mbs=8") for compute in ("fp32", "bf16")
    )
    assert fp32.chosen.time.compute > bf16.chosen.time.compute
    assert fp32.chosen.memory.activations > bf16.chosen.memory.activations
    with pytest.raises(InputError, match=r"no peak of TPUv4-32GB in fp32 is known.*--set precision\.compute=bf16"):
        plan_recipe(tiny, "1xTPUv4")


@pytest.mark.parametrize(("moments", "matrix", "rest"), [("adam", 8, 8), ("adam-8bit", 2, 2), ("muon", 4, 8)])
def test_a_plan_for_another_optimizer_keeps_its_moments(moments: Moments, matrix: int, rest: int) -> None:
    recipe = read_recipe(Path("examples/350m.toml"))
    found = plan_recipe(recipe, "1xH100", "mbs=1", moments).document().memory
    matrices = sum(p.size for p in recipe.model.parameters() if p.role is Role.HIDDEN_WEIGHT)
    kept = matrix * matrices + rest * (recipe.model.params - matrices)
    assert sum(state.bytes for state in found.states if "moment" in state.name) == kept
    assert found.parts["optimizer"] == pytest.approx(kept / GIB)
    assert sum(found.activations.values()) == pytest.approx(found.parts["activations"])


def test_a_recipe_with_muon_has_one_momentum_and_makes_matrices_orthogonal() -> None:
    plain = read_recipe(Path("examples/350m.toml"))
    recipe = plain.replace({"hyperparameters.optimizer": "muon"})
    with_muon, with_adam = (plan_recipe(each, "8xH100", "dp=8,mbs=1") for each in (recipe, plain))
    moments = plan_recipe(plain, "8xH100", "dp=8,mbs=1", "muon")
    assert with_muon.chosen.memory == moments.chosen.memory
    # 7 matrices in each of L blocks, one after the other on 8 ranks, at most at the peak of the device.
    shape = recipe.model
    sizes = [sorted(p.shape) for p in shape.parameters() if p.role is Role.HIDDEN_WEIGHT]
    flops = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sizes) / 8
    more = with_muon.chosen.time.optimizer - with_adam.chosen.time.optimizer
    assert more > flops / (with_muon.job.cluster.accelerator.peak_tflops * 1e12)
    assert more < 8 * flops / (with_muon.job.cluster.accelerator.peak_tflops * 1e12)  # not all on one rank
    assert moments.chosen.time == with_adam.chosen.time  # other codes: only the memory
    # With ZeRO 1 each rank gets its eighth of each result, without ZeRO all of it.
    sharded, replicated = (step_extra(plain, recipe, f"dp=8,mbs=1,zero={zero}") for zero in (1, 0))
    sent = sum(2 * m * n for m, n in sizes) * 7 / 8  # bytes to the other ranks, once
    accelerator = with_muon.job.cluster.accelerator
    assert replicated - sharded > 0.8 * (1 - 1 / 8) * sent / (accelerator.link_gb_s * 1e9)


def step_extra(plain: Recipe, muon: Recipe, layout: str) -> float:
    """Return the additional seconds of the optimizer with Muon, besides its states."""
    with_muon, moments = plan_recipe(muon, "8xH100", layout), plan_recipe(plain, "8xH100", layout, "muon")
    return with_muon.chosen.time.optimizer - moments.chosen.time.optimizer


def test_a_plan_says_if_compiling_would_save_more_than_an_hour() -> None:
    """A proxy that `leaven new` writes is not compiled, because each of its trials would compile again."""
    recipe = read_recipe(Path(__file__).parents[2] / "examples" / "350m.toml")

    def said(changes: dict[str, bool | int]) -> list[str]:
        found = plan_recipe(recipe.replace(changes), "1xH100-SXM-80GB").cautions
        return [one for one in found if one.startswith("not compiled: with layout.compile = true, steps are planned")]

    assert len(said({"layout.compile": False})) == 1
    assert not said({"layout.compile": True})
    assert not said({"layout.compile": False, "data.tokens": 300_000_000, "schedule.warmup_tokens": 3_000_000})


def test_a_plan_says_that_a_mask_is_slower_than_planned() -> None:
    recipe = read_recipe(Path(__file__).parents[2] / "examples" / "350m.toml")

    def said(changes: dict[str, str | int], gpus: str = "1xH100-SXM-80GB", code: str | None = None) -> bool:
        found = plan_recipe(recipe.replace(changes), gpus, code=code).cautions
        return any(one.startswith("the time is optimistic: with isolated documents") for one in found)

    for changes in ({"data.documents": "isolated"}, {"model.positions": "alibi"}, {"model.window": 256}):
        assert said(changes)
        assert not said(changes, code="megatron-flash")
    assert not said({})
    assert not said({"data.documents": "isolated"}, "cpu")
