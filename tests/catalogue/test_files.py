"""The files of the published runs: complete, with sources, and without contradictions."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from leaven.catalogue.groups import Provenance, PublishedGroup
from leaven.catalogue.runs import FOLDER, PublishedRun, find_run, load_runs
from leaven.planning.published import published_blueprint

IDS = sorted(path.stem for path in FOLDER.glob("*.toml"))
INCOMPLETE = {"glam-1.2t", "idefics-80b", "mimo-v2-flash"}  # shapes that are not published in full


def contradictions(run: PublishedRun) -> set[str]:
    """Return the fields whose values contradict other values of the same run."""
    return {
        field
        for found in (_shape, _count, _batch, _ramp, _schedule, _layout)
        for field, wrong in found(run).items()
        if wrong
    } | {
        f"{name}.{field}"
        for name, group in run
        if isinstance(group, PublishedGroup)
        for field in (*group.exceptions, *group.derived)
        if field not in group.model_fields_set
    }


def _shape(run: PublishedRun) -> dict[str, Any]:
    arch = run.arch
    own_width = arch.d_head is not None or arch.kv_lora_rank is not None
    latent = (arch.kv_lora_rank, arch.qk_nope_head_dim, arch.qk_rope_head_dim, arch.v_head_dim)
    return {
        "arch.n_heads": arch.d_model and arch.n_heads and not own_width and arch.d_model % arch.n_heads,
        "arch.n_kv_heads": arch.n_heads and arch.n_kv_heads and arch.n_heads % arch.n_kv_heads,
        "arch.vocab_padded": arch.vocab_size and arch.vocab_padded and arch.vocab_padded < arch.vocab_size,
        "arch.gated": arch.gated is not None and arch.gated != (arch.activation in ("swiglu", "geglu")),
        "arch.n_dense_layers": (arch.n_dense_layers or 0) > (arch.n_layers or math.inf),
        "arch.experts_per_token": arch.n_experts and not 0 < (arch.experts_per_token or 0) <= arch.n_experts,
        "arch.n_experts": (run.kind == "moe") != (arch.n_experts is not None),
        "arch.kv_lora_rank": len({value is None for value in latent}) > 1,
    }


def _count(run: PublishedRun) -> dict[str, Any]:
    """Compare the published count of parameters with that of the shape: exactly, or within 3% where it is rounded."""
    few = run.params_active > run.params_total or (run.kind == "dense" and run.params_active != run.params_total)
    if (run.params.shape_check or "").startswith("skip"):
        return {"params_active": few}
    found = published_blueprint(run.arch, run.seq_len or 2048).params
    expected = run.params_total + (run.params.shape_excess or 0)
    wrong = found != expected if run.params.precision == "exact" else abs(found / run.params_total - 1) > 0.03
    return {"params_active": few, "params_total": wrong}


def _batch(run: PublishedRun) -> dict[str, Any]:
    if run.batch is None or run.data is None:
        return {}
    samples, tokens, seq_len = run.batch.global_batch_samples, run.batch.global_batch_tokens, run.data.seq_len
    steps = run.schedule.total_steps if run.schedule else None
    known = steps and tokens and run.tokens and run.constant_batch and run.data.note is None
    return {
        "batch.global_batch_tokens": samples and tokens and seq_len and samples * seq_len != tokens,
        "data.tokens_total": known and not math.isclose((steps or 0) * (tokens or 0), run.tokens or 0, rel_tol=0.02),
    }


def _ramp(run: PublishedRun) -> dict[str, Any]:
    if run.batch is None or run.batch.rampup is None:
        return {}
    ramp, batch = run.batch.rampup, run.batch
    last = ramp.stages[-1] if ramp.stages else {}
    samples = last.get("samples") if ramp.stages else ramp.final_samples or ramp.end_samples
    tokens = last.get("tokens") if ramp.stages else ramp.end_tokens
    climb = ramp.n_increments and ramp.start_samples and ramp.increment_samples and ramp.final_samples
    reached = (ramp.start_samples or 0) + (ramp.n_increments or 0) * (ramp.increment_samples or 0)
    return {
        "batch.rampup": (samples and batch.global_batch_samples and samples != batch.global_batch_samples)
        or (tokens and batch.global_batch_tokens and tokens != batch.global_batch_tokens)
        or (climb and reached != ramp.final_samples)
    }


def _schedule(run: PublishedRun) -> dict[str, Any]:
    schedule, data = run.schedule, run.data
    if schedule is None or data is None:
        return {}
    peak, low, ratio = schedule.peak_lr, schedule.min_lr, schedule.min_lr_ratio
    step = (run.batch_tokens if run.constant_batch else None) or math.nan
    warmups = [
        schedule.warmup_tokens,
        schedule.warmup_samples and schedule.warmup_samples * (data.seq_len or math.nan),
        schedule.warmup_steps and schedule.warmup_steps * step,
    ]
    if schedule.warmup_steps is not None and schedule.warmup_fraction is not None and schedule.total_steps:
        warmups.append(schedule.warmup_fraction * schedule.total_steps * step)
    tokens = [each for each in warmups if each is not None and not math.isnan(each)]
    return {
        "schedule.min_lr_ratio": None not in (peak, low, ratio)
        and not math.isclose((peak or 0) * (ratio or 0), low or 0, rel_tol=0.01, abs_tol=1e-12),
        "schedule.warmup": any(not math.isclose(each, tokens[0], rel_tol=0.02) for each in tokens),
    }


def _layout(run: PublishedRun) -> dict[str, Any]:
    layout, count = run.parallel, run.hardware.count if run.hardware else None
    if layout is None:
        return {}
    samples = run.batch.global_batch_samples if run.batch else None
    ranks = (layout.tp or 0) * (layout.pp or 0) * (layout.dp or 0) * (layout.cp or 1)
    at_once = (layout.micro_batch or 0) * (layout.dp or 0) * (layout.grad_accum or 1)
    known = samples and at_once
    return {
        "parallel.dp": count and ranks and ranks != count,
        "parallel.grad_accum": known and layout.grad_accum and at_once != samples,
        "parallel.micro_batch": known and not layout.grad_accum and (samples or 0) % at_once,
    }


@pytest.mark.parametrize("id", IDS)
def test_a_file_is_complete_and_does_not_contradict_itself(id: str) -> None:
    run = find_run(id)
    assert not contradictions(run)
    assert (run.params.shape_check or "").startswith("skip") or id not in INCOMPLETE
    stated: list[Provenance] = [*run.instabilities]
    for _, group in run:
        if isinstance(group, PublishedGroup):
            stated += [group, *group.exceptions.values()]
    assert len(stated) >= 4
    assert all(source.strip() for one in stated for source in one.sources)
    text = (FOLDER / f"{id}.toml").read_text(encoding="utf-8")
    assert not re.findall(r"= -?\d{5,}(?![\d.])", text), "large numbers have underscores"


@pytest.mark.parametrize(
    ("id", "field", "group", "changes"),
    [
        ("pythia-70m", "arch.n_kv_heads", "arch", {"n_kv_heads": 3}),
        ("pythia-70m", "arch.gated", "arch", {"gated": True}),
        ("pythia-70m", "arch.experts_per_token", "arch", {"n_experts": 4, "experts_per_token": 5, "d_expert": 64}),
        ("pythia-70m", "params_total", "arch", {"d_ff": 2049}),
        ("pythia-70m", "batch.global_batch_tokens", "batch", {"global_batch_tokens": 2_097_153}),
        ("pythia-70m", "data.tokens_total", "data", {"tokens_total": 199_892_736_000}),
        ("pythia-70m", "schedule.min_lr_ratio", "schedule", {"min_lr": 0.0002}),
        ("pythia-70m", "schedule.warmup", "schedule", {"warmup_steps": 2000}),
        ("pythia-70m", "parallel.dp", "parallel", {"tp": 2}),
        ("pythia-70m", "arch.d_mlp", "arch", {"derived": ["d_mlp"]}),
        ("bloom-176b", "batch.rampup", "batch", {"rampup": {"kind": "increments", "final_samples": 1024}}),
    ],
)
def test_a_contradiction_is_found(id: str, field: str, group: str, changes: dict[str, Any]) -> None:
    document = find_run(id).model_dump(exclude_none=True)
    changed = PublishedRun.model_validate(document | {group: document[group] | changes})
    assert field in contradictions(changed)


# What is changed in a good file, and the beginning of the error.
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('source = "EleutherAI/pythia: README.md"', 'source = ""', r"data\.source"),
        ("grad_clip", "gradclip", r"optim\.gradclip"),
        ("n_layers = 6", "n_layers = six", "Invalid value"),
    ],
)
def test_an_error_in_a_file_names_file_and_field(
    right: str, wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / "pythia-70m.toml").read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "mine.toml").write_text(text.replace(right, wrong, 1), encoding="utf-8")
    monkeypatch.setattr("leaven.catalogue.runs.FOLDER", tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        load_runs()
    assert "mine.toml" in refused.value.__notes__[0]


def test_an_initial_std_is_what_its_formula_gives() -> None:
    formulas = {
        "sqrt(2/(5*d_model))": lambda d, n: (2 / (5 * d)) ** 0.5,
        "1/sqrt(d_model)": lambda d, n: d**-0.5,
        "sqrt(1/(3*d_model))": lambda d, n: (1 / (3 * d)) ** 0.5,
        "2/(n_layers*sqrt(d_model))": lambda d, n: 2 / (n * d**0.5),
        "1/(n_layers*sqrt(d_model))": lambda d, n: 1 / (n * d**0.5),
        "1/sqrt(d_model)/sqrt(2*n_layers)": lambda d, n: d**-0.5 / (2 * n) ** 0.5,
    }
    checked = 0
    for run in load_runs():
        init = run.init
        for formula, std in (
            ((init.std_formula, init.std), (init.residual_std_formula, init.residual_std)) if init else ()
        ):
            if formula in formulas and std is not None:
                assert formulas[formula](run.arch.d_model, run.arch.n_layers) == pytest.approx(std, rel=0.01), run.id
                checked += 1
    assert checked >= 27
