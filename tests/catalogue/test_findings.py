"""Checks of a recipe against the published runs: planted faults are found, and each suggestion fixes its fault."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.catalogue.published import published

from leaven.catalogue.findings import CHECKS, Case, combined, find, findings, training_checks
from leaven.catalogue.neighbours import Neighbours
from leaven.catalogue.runs import find_run, load_runs
from leaven.documents.catalogue import FindingRow
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterRow, adamw_rows, parameter_table
from leaven.scaling.tested_ranges import warnings

# 360 M parameters and 8 B tokens with common values.
HEALTHY: dict[str, Any] = {
    "name": "healthy",
    "model": {
        "n_layers": 24, "d_model": 1024, "n_heads": 16, "n_kv_heads": 16, "d_head": 64, "d_ff": 2752,
        "vocab_size": 32_768, "seq_len": 2048,
    },
    "data": {"tokens": 8_000_000_000, "source": "text.jsonl"},
    "batch": {"tokens": 524_288},
    "schedule": {"warmup_tokens": 80_000_000},
    "hyperparameters": {
        "lr": 6e-4, "init_std": 0.018,
        "modules": {"attention.out": {"init_std": 0.144}, "mlp.out": {"init_std": 0.144},
                    "embedding": {"weight_decay": 0.0}},
    },
    "scaling": {"rule": "standard"},
}  # fmt: skip


def healthy(**changes: Any) -> Recipe:
    return Recipe.model_validate(HEALTHY).replace({path.replace("__", "."): value for path, value in changes.items()})


def rows_of(recipe: Recipe) -> tuple[ParameterRow, ...]:
    """Return the rows of a recipe. Each recipe has its rows computed once: they take most of the time of a check."""
    return _rows_of(recipe.model_dump_json())


@cache
def _rows_of(recipe: str) -> tuple[ParameterRow, ...]:
    return adamw_rows(Recipe.model_validate_json(recipe))


def found(recipe: Recipe, corpus_tokens: int | None = None) -> list[FindingRow]:
    return findings(recipe, rows_of, corpus_tokens)


def outside(recipe: Recipe, corpus_tokens: int | None = None) -> set[str]:
    return {check for check, severity in severities(recipe, corpus_tokens).items() if severity != "note"}


def severities(recipe: Recipe, corpus_tokens: int | None = None) -> dict[str, str]:
    """Return the severity of each finding by check, without trying the suggestions."""
    case = Case(recipe, rows_of(recipe), corpus_tokens)
    return {check.name: one.severity for check in CHECKS if (one := find(check, case))}


def assert_suggestions_fix(recipe: Recipe, one: FindingRow, corpus_tokens: int | None = None) -> None:
    """Assert that each suggestion removes the finding, even a note, and moves no other value outside."""
    before = outside(recipe, corpus_tokens)
    for suggestion in one.mends:
        after = severities(recipe.replace(suggestion), corpus_tokens)
        assert one.check not in after, (one, suggestion)
        assert {check for check, severity in after.items() if severity != "note"} <= before, (one, suggestion)


def test_the_healthy_recipe_passes() -> None:
    assert found(healthy()) == []


RAMP = {"start_tokens": 131_072, "increment_tokens": 131_072, "over_tokens": 320_000_000}
SMALL_START = {"start_tokens": 2048, "increment_tokens": 2048}
LARGE = {"batch__tokens": 2**26, "data__tokens": 2_000_000_000_000, "schedule__warmup_tokens": 20_000_000_000}
EXPERTS: dict[str, Any] = {
    "model__experts": {"number": 64, "active": 8, "d_expert": 344},
    "hyperparameters__modules": {
        "attention.out": {"init_std": 0.144}, "mlp.experts.out": {"init_std": 0.144},
        "embedding": {"weight_decay": 0.0},
    },
}  # fmt: skip


MUON: dict[str, Any] = {"hyperparameters__optimizer": "muon"}


def experts(**changes: Any) -> dict[str, Any]:
    return EXPERTS | {"model__experts": EXPERTS["model__experts"] | changes}


# Check, severity, a fault that it must find, and a similar recipe that passes.
PLANTED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("size", "note", {"model__n_layers": 1, "model__d_model": 128, "model__n_heads": 2, "model__n_kv_heads": 2}, {}),
    ("z-loss weight", "far outside", {"hyperparameters__z_loss": 0.5}, {"hyperparameters__z_loss": 1e-4}),
    ("muon lr", "far outside", MUON | {"hyperparameters__muon": {"lr": 0.5}}, MUON),
    # The same size of a step: lr sqrt(max(1, out / in)) is 0.2 x lr sqrt(max(out, in)) at an eighth of this lr.
    ("muon lr", "far outside", MUON | {"hyperparameters__muon": {"match": "spectral", "lr": 0.5}},
     MUON | {"hyperparameters__muon": {"match": "spectral", "lr": 0.003}}),
    ("muon decay", "outside", MUON | {"hyperparameters__muon": {"weight_decay": 0.0}}, MUON),
    ("muon momentum", "far outside", MUON | {"hyperparameters__muon": {"momentum": 0.1}}, MUON),
    ("lr", "outside", {"hyperparameters__lr": 5e-3}, {"hyperparameters__lr": 2.9e-3}),
    ("lr", "outside", {"hyperparameters__lr": 5e-5}, {"hyperparameters__lr": 2e-4}),
    ("lr", "far outside", {"hyperparameters__lr": 0.2}, {}),
    ("qk-norm", "outside", {"hyperparameters__lr": 8e-3}, {"hyperparameters__lr": 8e-3, "model__qk_norm": True}),
    ("z-loss", "note", {"hyperparameters__lr": 5e-3}, {"hyperparameters__lr": 5e-3, "hyperparameters__z_loss": 1e-5}),
    ("beta1", "outside", {"hyperparameters__beta1": 0.98}, {"hyperparameters__beta1": 0.9}),
    ("beta2", "outside", {"hyperparameters__beta2": 0.999}, {"hyperparameters__beta2": 0.98}),
    ("eps", "far outside", {"hyperparameters__eps": 1e-3}, {"hyperparameters__eps": 1e-9}),
    ("weight decay", "outside", {"hyperparameters__weight_decay": 0.0}, {"hyperparameters__weight_decay": 0.05}),
    ("timescale", "outside", {"hyperparameters__weight_decay": 0.01}, {"hyperparameters__weight_decay": 0.1}),
    ("l2 decay", "note", {"hyperparameters__optimizer": "adam"},
     {"hyperparameters__optimizer": "adam", "hyperparameters__weight_decay": 0.0}),
    ("muon", "note", {"hyperparameters__optimizer": "muon"}, {}),
    ("decay of gains", "note", {"hyperparameters__decay_norm_and_bias": True}, {}),
    ("decay of embeddings", "note", {"hyperparameters.modules.embedding.weight_decay": 1.0}, {}),
    ("clip", "far outside", {"hyperparameters__grad_clip": 0.0}, {}),
    ("clip", "note", {"hyperparameters__grad_clip": {"mode": "per-module", "limit": 1.0}}, {}),
    ("tokens per parameter", "outside", {"data__tokens": 1_500_000_000}, {"data__tokens": 200_000_000_000}),
    ("steps", "outside", {"batch__tokens": 2048 * 8000}, {}),
    ("batch", "outside", {"batch__tokens": 2048 * 4000}, {"batch__tokens": 2**20}),
    ("critical batch", "outside", {"batch__tokens": 2048 * 4000}, {}),
    ("no ramp", "outside", LARGE, LARGE | {"batch__ramp": RAMP | {"over_tokens": 60_000_000_000}}),
    ("ramp start", "outside", {"batch__ramp": RAMP | SMALL_START}, {"batch__ramp": RAMP}),
    ("ramp length", "outside", {"batch__ramp": RAMP | {"over_tokens": 2_000_000_000}}, {"batch__ramp": RAMP}),
    ("warm-up", "outside", {"schedule__warmup_tokens": 7_000_000}, {"schedule__warmup_tokens": 8_000_000}),
    ("warm-up", "outside", {"schedule__warmup_tokens": 2_500_000_000}, {"schedule__warmup_tokens": 800_000_000}),
    ("final lr", "far outside", {"schedule__decay": "constant"}, {"schedule__decay": "wsd"}),
    ("final lr", "outside", {"schedule__min_lr_ratio": 0.3}, {"schedule__min_lr_ratio": 0.0}),
    ("init std", "outside", {"hyperparameters__init_std": 0.04}, {"hyperparameters__init_std": 0.006}),
    ("residual std", "note", {"hyperparameters.modules": {}}, {}),
    ("residual std", "outside", {"hyperparameters.modules": {}, "model__n_layers": 48}, {}),
    ("dropout", "outside", {"model__dropout": 0.1}, {}),
    ("precision", "note", {"precision__compute": "fp16"}, {"precision__compute": "bf16"}),
    ("aspect ratio", "outside", {"model__n_layers": 80}, {}),
    ("head size", "outside", {"model__d_head": 32, "model__n_heads": 32, "model__n_kv_heads": 32}, {}),
    ("mlp ratio", "outside", {"model__d_ff": 1024}, {}),
    ("residual std", "note", experts(shared=1), experts()),  # the shared expert's end has the std of other matrices
    ("branch stds", "note", experts(dense_layers=1), experts(dense_layers=1) | {"hyperparameters.modules": {}}),
    ("branch stds", "note", {"hyperparameters.modules.attention.out.init_std": 0.03}, {}),
    ("expert width", "outside", experts(d_expert=200), experts()),
    ("expert width", "note", experts(d_expert=800), experts(shared=1, d_expert=600)),
    ("balance", "outside", experts(balance="none"), experts(balance="bias")),
    ("balance", "outside", experts(balance="none"), experts(active=64, d_expert=43, balance="none")),
    ("balance loss", "outside", experts(balance_loss=0.5), experts(balance_loss=0.01)),
    ("balance loss", "far outside", experts(balance_loss=0.0), experts(balance_loss=0.0, balance="bias")),
    ("balance loss", "far outside", experts(balance="both", balance_loss=5.0),
     experts(balance="both", balance_loss=1e-4)),
    ("bias step", "outside", experts(balance="bias", bias_step=0.05), experts(bias_step=0.05)),
    ("bias step", "outside", experts(balance="both", bias_step=3e-5), experts(balance="both", bias_step=0.001)),
    ("router z-loss", "outside", experts(router_z_loss=0.05), experts(router_z_loss=0.001)),
    ("vocabulary", "note", {"model__vocab_size": 32_769}, {}),
    ("sequence length", "outside", {"model__seq_len": 256}, {"model__seq_len": 4096}),
]  # fmt: skip


def test_the_nearest_run_may_be_a_mixture_and_is_compared_by_what_a_token_uses() -> None:
    """OLMoE has 6.9 B parameters, of which a token uses 1.28 B: fewer than 6 B."""
    near = Neighbours(6_000_000_000, (find_run("olmoe-1b-7b"),), experts=True)
    case: Any = SimpleNamespace(params=near.params, neighbours=(), size=SimpleNamespace(near=near))
    (check,) = [check for check in CHECKS if check.name == "size"]
    found = training_checks.size(check, case)
    assert found.facts == {"nearest": "olmoe-1b-7b", "side": "smaller", "apart": pytest.approx(4.69, rel=0.01)}


@pytest.mark.long
@pytest.mark.parametrize(("check", "severity", "fault", "sound"), PLANTED, ids=lambda value: str(value)[:60])
def test_a_planted_fault_is_found_and_each_suggestion_fixes_it(
    check: str, severity: str, fault: dict[str, Any], sound: dict[str, Any]
) -> None:
    recipe = healthy(**fault)
    (one,) = [one for one in found(recipe) if one.check == check]
    assert one.severity == severity, one
    assert one.says
    assert one.source
    assert {run.id for run in load_runs()} >= {*one.runs, *one.did_so}
    assert check not in severities(healthy(**sound))
    assert one.mends or check in ("size", "steps", "muon"), one
    assert_suggestions_fix(recipe, one)


def test_every_check_has_a_planted_fault() -> None:
    assert {check.name for check in CHECKS} == {check for check, *_ in PLANTED} | {"epochs"}


def test_the_first_suggestions_of_all_findings_are_combined() -> None:
    recipe = healthy(hyperparameters__lr=0.02, schedule__warmup_tokens=0)
    changes = combined(recipe, found(recipe))
    assert changes.keys() >= {"hyperparameters.lr", "schedule.warmup_tokens"}
    assert not {"lr", "warm-up"} & outside(recipe.replace(changes))
    assert combined(healthy(), []) == {}


def test_a_suggestion_that_breaks_another_value_is_left_out() -> None:
    """Too long a timescale: a higher decay comes first, unless no run had so much; then lr or batch."""
    recipe = healthy(hyperparameters__lr=1e-4, hyperparameters__weight_decay=0.03)
    (one,) = [one for one in found(recipe) if one.check == "timescale"]
    assert one.mends
    assert_suggestions_fix(recipe, one)
    (one,) = [one for one in found(healthy(hyperparameters__lr=1e-12)) if one.check == "timescale"]
    assert [list(suggestion) for suggestion in one.mends] == [["hyperparameters.lr"]]  # no decay of millions


def test_experts_count_with_the_parameters_that_a_token_uses() -> None:
    """64 experts of which 8 are used, together as wide as the MLP: compared as the dense model, in every check."""
    dense = healthy()
    sparse = healthy(**EXPERTS)
    assert sparse.model.params > 4 * dense.model.params
    case, other = (Case(recipe, adamw_rows(recipe)) for recipe in (sparse, dense))
    routers = 24 * 64 * 1024
    assert case.params == other.params + routers
    assert case.size.tokens_per_parameter == pytest.approx(8e9 / (other.params + routers))
    assert case.neighbours[0].id == "olmoe-1b-7b"  # mixtures of experts come first
    assert {run.id for run in case.neighbours[1:]} < {run.id for run in other.neighbours}
    for ours, theirs in zip(case.size.laws, other.size.laws, strict=True):
        assert ours.lr == pytest.approx(theirs.lr, rel=0.01)
    assert found(sparse) == []
    short = healthy(**EXPERTS, data__tokens=3_000_000_000)
    (few,) = [one for one in found(short) if one.check == "tokens per parameter"]
    assert "tokens per parameter that a token uses" in few.says


def test_the_residual_std_is_judged_for_each_branch() -> None:
    """Adding a shared expert or a dense layer adds a branch whose end has no smaller std: it is named."""
    for changes, module in (({"shared": 1}, "mlp.shared.out"), ({"dense_layers": 1}, "mlp.out")):
        (one,) = [one for one in found(healthy(**experts(**changes))) if one.check == "residual std"]
        assert one.path == f"hyperparameters.modules.{module}.init_std"
        assert f"({module})" in one.says
        assert [list(each) for each in one.mends] == [[one.path]]


def test_epochs_and_dropout_use_the_length_of_the_text() -> None:
    dropped = healthy(model__dropout=0.1)
    assert "dropout" in outside(dropped, corpus_tokens=8_000_000_000)
    assert "dropout" not in outside(dropped, corpus_tokens=2_000_000_000)
    assert "epochs" not in {one.check for one in found(healthy(), corpus_tokens=2_000_000_000)}
    (six,) = [one for one in found(healthy(), corpus_tokens=1_333_333_333) if one.check == "epochs"]
    assert six.severity == "outside"
    assert six.factor == pytest.approx(1.5)
    assert six.mends
    assert_suggestions_fix(healthy(), six, corpus_tokens=1_333_333_333)


def test_values_are_compared_after_the_scaling_rule() -> None:
    """A muP recipe whose lr is right at width 128 has an eighth of it at 1024; unmoved it is 8 times too high."""
    base = {"width": 128, "depth": 24, "batch_tokens": 524_288, "tokens": 8_000_000_000}
    written = healthy(hyperparameters__lr=4.8e-3, scaling__base=base)
    assert "lr" in outside(written)
    moved = written.replace({"scaling.rule": "mup"})
    assert "lr" not in {one.check for one in found(moved)}
    too_high = moved.replace({"hyperparameters.lr": 0.16})
    (one,) = [one for one in found(too_high) if one.check == "lr"]
    assert one.value == pytest.approx(0.02)
    changed = parameter_table(too_high.replace(one.mends[0]))
    assert changed["layers.12.mlp.in.weight"].lr == pytest.approx(4e-4, rel=0.5)
    assert_suggestions_fix(too_high, one)


def test_the_suggestion_for_a_beta_is_a_value_at_the_base() -> None:
    base = {"width": 1024, "depth": 24, "batch_tokens": 65_536, "tokens": 8_000_000_000}
    moved = healthy(scaling__rule="complete-d-p", scaling__base=base)
    (one,) = [one for one in found(moved) if one.check == "beta1"]
    assert one.value == pytest.approx(0.9**8)
    changed = parameter_table(moved.replace(one.mends[0]))
    assert changed["layers.12.mlp.in.weight"].beta1 == pytest.approx(0.9, abs=5e-3)


def test_without_near_runs_a_law_gives_at_most_a_note() -> None:
    sizes = {"n_layers": 4, "d_model": 128, "n_heads": 2, "n_kv_heads": 2, "d_head": 64, "d_ff": 384}
    small = {f"model__{key}": value for key, value in sizes.items()}
    faults = {
        "timescale": {"hyperparameters__lr": 1e-6},
        "critical batch": {"batch__tokens": 2**25},
        "tokens per parameter": {"data__tokens": 1_000_000, "schedule__warmup_tokens": 0},
    }
    for check, fault in faults.items():
        assert severities(healthy(**small, **fault))[check] == "note"
        assert severities(healthy(**fault))[check] != "note"


def powers(low: int, high: int) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


@pytest.mark.long
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(
    width=st.sampled_from([1, 4, 16, 64]),
    layers=st.integers(1, 12),
    sequences=powers(0, 4).map(round),
    tokens=powers(6, 13).map(round),
    tuned=st.fixed_dictionaries(
        {
            "lr": powers(-6, -1), "init_std": powers(-4, 0), "weight_decay": st.just(0.0) | powers(-4, 0),
            "beta1": st.floats(0, 0.999), "beta2": st.floats(0, 0.99999), "eps": powers(-12, -2),
            "grad_clip": st.just(0.0) | powers(-3, 2),
        }
    ),
    share=st.floats(0, 1), rule=st.sampled_from(["standard", "mup", "complete-d-p"]),
    decay=st.sampled_from(["cosine", "constant", "wsd"]), zero_ends=st.booleans(),
)  # fmt: skip
def test_every_suggestion_for_a_random_recipe_is_valid_and_fixes_its_finding(
    width: int, layers: int, sequences: int, tokens: int, tuned: dict[str, float], share: float, rule: str,
    decay: str, zero_ends: bool,
) -> None:  # fmt: skip
    shape = {"n_layers": layers, "d_model": 64 * width, "n_heads": width, "n_kv_heads": width, "d_head": 64}
    recipe = healthy(
        **{f"model__{key}": value for key, value in (shape | {"d_ff": 128 * width}).items()},
        batch__tokens=2048 * sequences,
        data__tokens=tokens,
        schedule={"warmup_tokens": round(share * tokens), "decay": decay},
        scaling={
            "rule": rule, "base": {"width": 64, "depth": 4, "batch_tokens": 2048 * sequences, "tokens": tokens},
        },
        hyperparameters=tuned | {"modules": {"mlp.out": {"init_std": 0.0 if zero_ends else 1.0}}},
    )  # fmt: skip
    for one in found(recipe):
        assert one.factor is None or one.factor >= 1
        assert_suggestions_fix(recipe, one)


def test_a_value_found_by_a_study_is_a_note() -> None:
    """A measured value outside the published range is a note; the same value without a study is a fault."""
    copied = healthy(hyperparameters__beta1=0.7)
    assert {one.severity for one in found(copied) if one.check == "beta1"} == {"outside"}
    measured = copied.replace({"why": {"hyperparameters.beta1": "study crumb, trial 7 (trust-region, 16 trials)"}})
    one = next(one for one in found(measured) if one.check == "beta1")
    assert one.severity == "note"
    assert "a search found this value" in one.says


@pytest.mark.parametrize(
    ("values", "module"),
    [
        ({"beta1": 0.27}, "the hidden weights have"),
        ({"beta1": 0.991}, "the hidden weights have"),
        ({"beta2": 0.899}, "the hidden weights have"),
        ({"modules": {"embedding": {"beta2": 4.0}}}, "embedding has"),
    ],
)
def test_a_beta_that_a_transfer_warns_about_is_outside_even_after_a_study(
    values: dict[str, Any], module: str
) -> None:
    beta = "beta1" if "beta1" in values else "beta2"
    why = {f"hyperparameters.{beta}": "study crumb, trial 7 (trust-region, 16 trials)"}
    recipe = healthy(**{f"hyperparameters__{name}": value for name, value in values.items()}, why=why)
    assert beta in {warning.about for warning in warnings(recipe)}
    one = next(one for one in found(recipe) if one.check == beta)
    assert one.severity != "note"
    assert one.says.startswith(f"{module} {beta} ")
    assert "runs have trained well with 0." in one.says


@pytest.mark.long
def test_published_runs_are_never_outside_the_published_range() -> None:
    runs = list(published())
    assert len(runs) > 50
    worst = {}
    for run, recipe in runs:
        notes = severities(recipe)
        assert set(notes.values()) <= {"note"}, run.id
        worst[run.id] = len(notes)
    assert max(worst.values()) <= 8, worst
