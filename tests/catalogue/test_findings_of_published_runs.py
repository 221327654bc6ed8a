"""A published run, as a recipe, is not outside what was published."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from leaven.catalogue.findings import CHECKS, Case, Finding
from leaven.catalogue.run import Run
from leaven.catalogue.runs import find_run, load_runs
from leaven.catalogue.terms import terms
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve


def judged(recipe: Recipe) -> list[Finding]:
    """What is found, without trying what would mend it."""
    case = Case(recipe, resolve(recipe).rows)
    return [replace(one, check=check.name) for check in CHECKS for one in check.find(case)]


def ramp(run: Run, batch: int, seq_len: int) -> dict[str, Any]:
    """The published ramp in one step; a short one where it is not known whether there was any."""
    told, kind = terms(run), run.batch.rampup.kind if run.batch and run.batch.rampup else None
    if kind == "none":
        return {}
    start = round(told.get("batch.ramp.start_tokens", batch / 4) / seq_len) * seq_len
    over = told.get("batch.ramp.over_tokens", (run.tokens or 0) // 25)
    if start >= batch:
        return {}
    if kind == "stages":
        return {"stages": [{"from_tokens": 0, "tokens": start}, {"from_tokens": over, "tokens": batch}]}
    return {"ramp": {"start_tokens": start, "increment_tokens": batch - start, "over_tokens": over}}


def as_recipe(run: Run) -> Recipe | None:
    """A published run as a recipe; what it does not tell is as in an ordinary one. None where leaven has no such."""
    shape = run.model_shape()
    if shape is None or not run.lr_comparable or not run.tokens:
        return None
    told = terms(run)
    batch = round((run.batch_tokens or 4_194_304) / shape.seq_len) * shape.seq_len
    std = run.init_std or math.sqrt(1 / (3 * shape.d_model))
    ends = (run.residual_init_std or std / math.sqrt(2 * shape.n_layers)) / std
    tuned = {
        key.removeprefix("hyperparameters."): value
        for key, value in told.items()
        if key.startswith("hyperparameters.") and not key.endswith(("optimizer", "init_std"))
    }
    document = {
        "name": run.id,
        "model": shape.model_dump() | {"dropout": told.get("model.dropout", 0.0)},
        "data": {"tokens": run.tokens},
        "batch": {"tokens": batch} | ramp(run, batch, shape.seq_len),
        "schedule": {
            "warmup_tokens": told.get("schedule.warmup_tokens", run.tokens // 100),
            "decay": told.get("schedule.decay", "cosine"),
            "min_lr_ratio": told.get("schedule.min_lr_ratio", 0.1),
        },
        "hyperparameters": tuned
        | {
            "lr": run.peak_lr,
            "init_std": std,
            "modules": {"attention.out": {"init_std": ends}, "mlp.out": {"init_std": ends}},
        },
        "scaling": {"rule": "standard"},
    }
    return Recipe.model_validate(document)


def published() -> Iterator[tuple[Run, Recipe]]:
    for run in load_runs():
        recipe = as_recipe(run)
        if recipe is not None:
            yield run, recipe


def test_a_recipe_that_is_a_published_run_is_not_outside_what_was_published() -> None:
    runs = list(published())
    assert len(runs) > 50
    worst = {}
    for run, recipe in runs:
        came_up = judged(recipe)
        assert [one for one in came_up if one.severity != "note"] == [], run.id
        worst[run.id] = len(came_up)
    assert max(worst.values()) <= 8, worst


def test_what_a_published_run_itself_did_names_the_run() -> None:
    recipe = as_recipe(find_run("bigscience-tr1-13b"))
    assert recipe is not None
    by_check = {one.check: one for one in judged(recipe)}
    for check in ("beta2", "init std", "dropout"):
        assert by_check[check].severity == "note"
        assert "bigscience-tr1-13b" in by_check[check].alike
        assert "bigscience-tr1-13b" in by_check[check].did_so
