"""Functions for checks of a model's initialisation and shape. ``checks.toml`` has their names. A function
returns the check with its value and suggested changes, or None if the check does not apply."""

import math
from dataclasses import replace
from operator import attrgetter
from typing import Any

from leaven.catalogue.findings.case import Case, Check
from leaven.catalogue.neighbours import FACTOR, size_ratio
from leaven.catalogue.runs import PublishedRun, find_run, load_runs
from leaven.recipe.hyperparameters import Multipliers
from leaven.recipe.init_std import usual_std


def init_std(check: Check, case: Case) -> Check | None:
    """Compare the init std with sqrt(1 / (3 d_model)). BigScience's 104B model diverged at 3.7 times this value."""
    tuned, std, unit = case.recipe.hyperparameters, case.init_std, usual_std(case.recipe.model.d_model)
    if not std:
        return None
    named = tuned.init != "rule"
    written = {"hyperparameters.init_std": float(f"{(tuned.init_std or 0.0) * unit / std:.3g}")}
    return replace(
        check,
        value=std / unit,
        of_run=lambda run: run.init_std and run.arch.d_model and run.init_std / usual_std(run.arch.d_model),
        suggestions=[{"hyperparameters.init": "mt-nlg"} if named else written],
        path="hyperparameters.init" if named else check.path,
        facts={"std": std, "unit": unit, "width": case.recipe.model.d_model},
    )


def residual_std(check: Check, case: Case) -> Check | None:
    """Compare the init std of the matrices that end residual branches with that of the other matrices in blocks.

    The compared value is the ratio of the two stds, times sqrt(2 n_layers): 1 for GPT-2. Return None for models with
    norms on the outputs of branches, because these norms remove the effect of the std.
    """
    if not case.init_std or case.recipe.model.norm_placement != "pre":
        return None

    def of_run(run: PublishedRun) -> float | None:
        std, n_layers = run.residual_init_std, run.arch.n_layers
        if not (std and run.init_std and n_layers and run.arch.norm_placement == "pre"):
            return None
        return std / run.init_std * math.sqrt(2 * n_layers)

    ends, modules = 2 * case.recipe.model.n_layers, case.recipe.hyperparameters.modules
    values = {module: std / case.init_std * math.sqrt(ends) for module, std in case.residual_stds.items()}
    value, largest = max((value, module) for module, value in values.items())
    high = {module: value for module, value in values.items() if value > float(check.usual[1])}
    other = {
        f"hyperparameters.modules.{module}.init_std": float(
            f"{modules.get(module, Multipliers()).init_std / std:.2g}"
        )
        for module, std in high.items()
    }
    return replace(
        check,
        path=f"hyperparameters.modules.{largest}.init_std",
        value=value,
        of_run=of_run,
        suggestions=[other],
        facts={"share": value / math.sqrt(ends), "ends": ends, "modules": list(high)},
    )


def branch_stds(check: Check, case: Case) -> Check | None:
    """Compare the init_std multipliers of the last matrices of all residual branches, which should be about equal."""
    tuned = case.recipe.hyperparameters
    multipliers = {end: tuned.modules.get(end, Multipliers()).init_std for end in case.recipe.model.branch_ends}
    nonzero = {module: std for module, std in multipliers.items() if std}
    if tuned.init != "rule" or not nonzero:
        return None
    smallest = min(nonzero, key=nonzero.__getitem__)
    least = nonzero[smallest]
    larger = [module for module, std in nonzero.items() if std > float(check.usual[1]) * least]
    paths = [f"hyperparameters.modules.{module}.init_std" for module in larger]
    return replace(
        check,
        path=paths[0] if paths else check.path,
        value=max(nonzero.values()) / least,
        suggestions=[dict.fromkeys(paths, least)],
        facts={"larger": larger, "smallest": smallest},
    )


def dropout(check: Check, case: Case) -> Check | None:
    """Add facts about published dropout, which prevents memorising. Within one epoch that hardly happens."""
    if case.corpus_tokens is not None and case.tokens > 1.5 * case.corpus_tokens:
        return None
    rates = [run.optim.dropout for run in case.runs if run.optim and run.optim.dropout is not None]
    return replace(check, facts={"none": rates.count(0), "known": len(rates), "guessed": not case.corpus_tokens})


def aspect_ratio(check: Check, case: Case) -> Check:
    model = case.recipe.model
    near = [run.aspect for run in case.runs if size_ratio(run, case.params) <= FACTOR and run.aspect]
    return replace(
        check,
        value=model.d_model / model.n_layers,
        suggestions=[{"model.n_layers": max(round(model.d_model / 80), 1)}],
        facts={"near_least": min(near), "near_most": max(near)},
    )


def head_size(check: Check, case: Case) -> Check:
    model = case.recipe.model
    width = model.n_heads * model.d_head
    size = next((size for size in (128, 64) if width % size == 0), model.d_head)
    heads = {"model.d_head": size, "model.n_heads": width // size, "model.n_kv_heads": width // size}
    return replace(check, suggestions=[heads])


def mlp_ratio(check: Check, case: Case) -> Check | None:
    """Compare d_ff / d_model with published runs. Return None for a model with experts; see :func:`expert_width`."""
    model = case.recipe.model
    if model.experts:
        return None
    usual = 8 / 3 if model.gated else 4.0
    return replace(
        check if model.gated else replace(check, **check.otherwise),
        value=model.d_ff / model.d_model,
        of_run=lambda run: run.mlp_ratio if bool(run.arch.gated) is model.gated else None,
        suggestions=[{"model.d_ff": max(round(model.d_model * usual / 64) * 64, 64)}],
        facts={"gated": model.gated},
    )


def expert_width(check: Check, case: Case) -> Check | None:
    """Compare w / d_model with published MoEs, where w is the total width of the experts that a token uses."""
    model = case.recipe.model
    if not model.experts:
        return None
    used = model.experts.active + model.experts.shared
    d_expert = max(round(8 / 3 * model.d_model / used / 8), 1) * 8
    return _with_published(
        check,
        value=used * model.experts.d_expert / model.d_model,
        of_run=attrgetter("expert_ratio"),
        suggestions=[{"model.experts.d_expert": d_expert, "model.d_ff": used * d_expert}],
    )


def balance(check: Check, case: Case) -> Check | None:
    experts = case.recipe.model.experts
    if not experts or experts.balance != "none" or experts.active == experts.number:
        return None
    balanced = [run for run in load_runs() if run.optim and run.optim.moe_load_balance_loss]
    return replace(check, value=0.0, runs=balanced)


def balance_loss(check: Check, case: Case) -> Check | None:
    """Compare the coefficient of the balance loss with published runs, if the model has this loss."""
    experts = case.recipe.model.experts
    if not experts or not experts.balanced_by_loss:
        return None
    usual = 1e-4 if experts.balanced_by_bias else 0.01
    return _with_published(check, suggestions=[{"model.experts.balance_loss": usual}])


def bias_step(check: Check, case: Case) -> Check | None:
    experts = case.recipe.model.experts
    return _with_published(check) if experts and experts.balanced_by_bias else None


def router_z_loss(check: Check, case: Case) -> Check | None:
    return _with_published(check) if case.recipe.model.experts else None


def _with_published(check: Check, **changes: Any) -> Check:
    """Return ``check`` with ``changes``, and with the published MoEs that have a value for it as ``runs``."""
    check = replace(check, **changes)
    known = [(run, value) for run in load_runs() if run.kind == "moe" and (value := check.of_run(run))]
    values = [value for _, value in known]
    return replace(check, runs=[run for run, _ in known], facts={"least": min(values), "most": max(values)})


def vocabulary(check: Check, case: Case) -> Check | None:
    vocab, unit = case.recipe.model.vocab_size, 64 * case.recipe.layout.tp
    if vocab % unit == 0:
        return None
    return replace(
        check,
        value=float(vocab),
        suggestions=[{"model.vocab_size": -(-vocab // unit) * unit}],
        runs=[find_run("gpt2-124m-nanogpt")],
        facts={"unit": unit},
    )


def sequence_length(check: Check, case: Case) -> Check:
    return replace(check, suggestions=[{"model.seq_len": 1024 if case.recipe.model.seq_len < 1024 else 8192}])
