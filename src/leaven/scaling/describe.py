"""Build the document of ``leaven show`` and ``leaven transfer``, with a comparison with published inits."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from leaven.catalogue.messages import sentence
from leaven.documents.runs import CautionRow, ParameterValues, ShowDocument, Totals, WorthRow
from leaven.recipe.init_std import COMPARED, INITS, usual_std
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.scaling.apply import AT_BASE
from leaven.scaling.table import ParameterTable, parameter_table, ramp_factors


@dataclass(frozen=True)
class ModuleStart:
    """The initial standard deviation of a module's matrices in some blocks."""

    module: str
    layers: str  # indices of the blocks, such as "0-11" or "3"; "" for a module outside the blocks
    std: float  # std in this recipe, with the scaling rule and all multipliers applied
    published: dict[str, float]  # std that each published init would give, by the name of the init


def starts(recipe: Recipe, table: ParameterTable) -> list[ModuleStart]:
    """Return the initial std of each module's matrices, and the std that each published init would give.

    A module has one entry for all blocks, or two, for the first and last block, if its stds differ between blocks.
    """
    by_module: dict[str, list[ModuleStart]] = {}
    depth = recipe.model.n_layers
    for row in table.rows:
        if row.role.is_matrix:
            published = {name: init.std(row, depth, recipe.model.gated) for name, init in COMPARED.items()}
            layer = "" if row.layer is None else str(row.layer)
            by_module.setdefault(row.module, []).append(ModuleStart(row.module, layer, row.init_std, published))
    found: list[ModuleStart] = []
    for lines in by_module.values():
        if len({(line.std, *line.published.values()) for line in lines}) > 1:
            found += (lines[0], lines[-1])
        else:
            layers = f"{lines[0].layers}-{lines[-1].layers}" if len(lines) > 1 else lines[0].layers
            found.append(replace(lines[0], layers=layers))
    return found


def _nearest(found: Sequence[ModuleStart]) -> list[dict[str, Any]]:
    """Return the published inits, the nearest first, each with its mean distance in octaves."""
    away = []
    for name in COMPARED:
        pairs = [(start.std, start.published[name]) for start in found if start.std and start.published[name]]
        if pairs:
            away.append({"init": name, "octaves": fmean(abs(math.log2(own / theirs)) for own, theirs in pairs)})
    return sorted(away, key=lambda each: each["octaves"])


def describe(
    recipe: Recipe,
    flops_per_token: float,
    warnings: Sequence[CautionRow] = (),
    worth: Sequence[WorthRow] = (),
) -> ShowDocument:
    """Return the document of ``leaven show`` and ``leaven transfer`` for a recipe."""
    table, model, tuned = parameter_table(recipe), recipe.model, recipe.hyperparameters
    found, clip = starts(recipe, table), tuned.grad_clip
    first, _ = ramp_factors(recipe, 0)
    named, muon = INITS.get(tuned.init), tuned.muon

    def why(message: str, **facts: Any) -> str:
        return sentence("show", message, facts, Path(__file__).parent)

    return ShowDocument(
        name=recipe.name,
        start=recipe.start.weights,
        scale={
            "width": model.d_model,
            "depth": model.n_layers,
            "batch_tokens": recipe.batch.tokens,
            "tokens": recipe.data.tokens,
            "base": recipe.base.model_dump(exclude_none=True),
        },
        rule=table.rule.name,
        ratios=asdict(table.ratios),
        totals=Totals(
            params=model.params,
            params_active=model.params_active,
            params_non_embedding=model.params_non_embedding,
            flops_per_token=flops_per_token,
        ),
        blocks={
            key: value for key, value in model.model_dump(mode="json").items() if key in ModelShape.added_defaults()
        },
        attention_scale=table.attention_scale,
        optimizer={
            "name": tuned.optimizer,
            "why": why(tuned.optimizer, muon=muon, spectral=muon is not None and muon.match == "spectral"),
        },
        init={
            "name": tuned.init,
            "why": why(
                "init",
                named=named,
                name=tuned.init,
                init_std=tuned.init_std,
                rule=table.rule.name,
                source=named and named.source,
            ),
            "usual_std": usual_std(model.d_model),
            "nearest": _nearest(found),
            "starts": [asdict(start) for start in found],
            "published": {name: {"std": init.text, "source": init.source} for name, init in COMPARED.items()},
        },
        clip=clip.model_dump() | {"why": why(f"clip {clip.mode}" if clip.limit else "clip off", limit=clip.limit)},
        ramp={
            "rule": recipe.batch.rule,
            "why": None
            if first == AT_BASE
            else why("ramp", batch=recipe.batch.sizes[0][1], first=first, rule=table.rule.name),
        },
        parameters=[ParameterValues(**asdict(row)) for row in table.rows],
        warnings=list(warnings),
        worth=list(worth),
    )
