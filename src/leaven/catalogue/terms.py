"""Read the values of published runs at the paths of a recipe, so that runs and recipes can be compared."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from leaven.catalogue.groups import PublishedArchitecture
from leaven.catalogue.runs import PublishedRun
from leaven.documents.catalogue import RecipeDifference
from leaven.recipe.recipe import NOT_NUMBERS, Recipe, differing, flatten


def _sizes(recipe: Recipe) -> tuple[int, int] | tuple[None, None]:
    """Return (first batch size, tokens before the final batch size), or (None, None) for a constant batch."""
    if recipe.batch.ramp is not None:
        return recipe.batch.ramp.start_tokens, recipe.batch.ramp.over_tokens
    sizes = recipe.batch.sizes
    return (sizes[0][1], sizes[-1][0]) if len(sizes) > 1 else (None, None)


def _clip(recipe: Recipe) -> float | None:
    clip = recipe.hyperparameters.grad_clip
    return clip.limit if clip.mode == "global" else None


def _optimizer(recipe: Recipe) -> str:
    """Return the optimizer's name. ``adam`` adds the decay to the gradient, unlike the "Adam" of published runs."""
    tuned = recipe.hyperparameters
    return L2_DECAY if tuned.optimizer == "adam" and tuned.weight_decay else tuned.optimizer


def _rotary_fraction(arch: PublishedArchitecture) -> float | None:
    if arch.positional != "rotary":
        return None
    return arch.rotary_dims / arch.head_dim if arch.rotary_dims and arch.head_dim else arch.rotary_pct


def _balance(run: PublishedRun) -> str | None:
    loss, bias = (run.optim and run.optim.moe_load_balance_loss), (run.optim and run.optim.moe_bias_update_speed)
    return "both" if loss and bias else "loss" if loss else "bias" if bias else None


L2_DECAY = "adam, L2 decay"
# Paths of a recipe at which the value of a run must be computed.
_OF_RUN: dict[str, Callable[[PublishedRun], Any]] = {
    "model.vocab_size": lambda run: run.arch.vocab_padded or run.arch.vocab_size,
    "model.positions": lambda run: "rope" if run.arch.positional == "rotary" else run.arch.positional,
    "model.qk_norm_whole": lambda run: run.arch.qk_norm and run.arch.qk_norm_width == "model",
    "model.attention_bias": lambda run: "qkv" if run.arch.qkv_bias else None,
    "model.rotary_fraction": lambda run: _rotary_fraction(run.arch),
    # A mixture of experts without a d_ff has no layer without experts.
    "model.experts.dense_layers": lambda run: (
        0 if run.kind == "moe" and run.arch.d_ff is None else run.arch.n_dense_layers
    ),
    "model.experts.balance": _balance,
    "hyperparameters.z_loss": lambda run: (run.optim and run.optim.z_loss) or None,
    # An update RMS of 0.2 is that of Muon's ``adamw_rms``.
    "hyperparameters.muon.match": lambda run: "adamw_rms" if run.optim and run.optim.muon_update_rms == 0.2 else None,
    "schedule.warmup_tokens": lambda run: None if run.warmup_tokens is None else round(run.warmup_tokens),
}
# Paths at which the value of a recipe must be computed.
_OF_RECIPE: dict[str, Callable[[Recipe], Any]] = {
    "params": lambda recipe: recipe.model.params,
    "model.rope_theta": lambda recipe: recipe.model.rope_theta if recipe.model.positions == "rope" else None,
    "model.rotary_fraction": lambda recipe: (
        recipe.model.rotary_fraction if recipe.model.positions == "rope" else None
    ),
    "batch.ramp.start_tokens": lambda recipe: _sizes(recipe)[0],
    "batch.ramp.over_tokens": lambda recipe: _sizes(recipe)[1],
    "batch.micro_batch": lambda recipe: None if recipe.batch.micro_batch == "auto" else recipe.batch.micro_batch,
    "model.experts.balance_loss": lambda recipe: (
        recipe.model.experts.balance_loss if recipe.model.experts and recipe.model.experts.balanced_by_loss else None
    ),
    "model.experts.bias_step": lambda recipe: (
        recipe.model.experts.bias_step if recipe.model.experts and recipe.model.experts.balanced_by_bias else None
    ),
    "hyperparameters.grad_clip": _clip,
    "hyperparameters.optimizer": _optimizer,
    "hyperparameters.z_loss": lambda recipe: recipe.hyperparameters.z_loss or None,
}

_DATA = tomllib.loads(Path(__file__).with_name("terms.toml").read_text(encoding="utf-8"))
TERMS: dict[str, list[str]] = _DATA["published"]
"""{path of a value in a recipe: paths of the same value in a published run}. Of the paths in a run, :func:`term`
reads only the first. Some values are computed."""


def read(source: Any, path: str) -> Any:
    """Return the attribute of ``source`` at a dotted path, or None if a part of the path is missing."""
    for name in path.split("."):
        source = getattr(source, name, None)
    return source


def diff_in_terms(
    a: PublishedRun | Recipe,
    b: PublishedRun | Recipe,
    resolved: Callable[[Recipe], dict[str, Any]] = lambda recipe: {},
) -> list[RecipeDifference]:
    """Return the values in which two runs or recipes differ. An unknown value is None.

    ``resolved`` returns a recipe's values after the scaling rule, by path. They replace the recipe's own values,
    because published runs also state values after scaling.
    """
    in_a, in_b = (terms(one) | (resolved(one) if isinstance(one, Recipe) else {}) for one in (a, b))
    rows = [(path, in_a.get(path), in_b.get(path), True) for path in TERMS]
    if isinstance(a, Recipe) and isinstance(b, Recipe):
        # Part of a value in TERMS, such as grad_clip.limit, is left out if the value itself says what differs.
        shown = tuple(f"{path}." for path, own, other, _ in rows if own != other and None not in {own, other})
        set_in_a, set_in_b = (one.model_dump(exclude=NOT_NUMBERS, exclude_defaults=True) for one in (a, b))
        whole_a, whole_b = (flatten(one.model_dump()) for one in (a, b))
        rows += [
            (path, whole_a.get(path), whole_b.get(path), True)
            for path, _, _ in differing(set_in_a, set_in_b)
            if path not in TERMS and not path.startswith(shown)
        ]
    else:
        alone_a, alone_b = dict(without_counterpart(a)), dict(without_counterpart(b))
        same_kind = type(a) is type(b)
        rows += [(path, alone_a.get(path), alone_b.get(path), same_kind) for path in {**alone_a, **alone_b}]
    return [
        RecipeDifference(path=path, a=own, b=other, counterpart=both)
        for path, own, other, both in rows
        if own != other
    ]


def term(of: PublishedRun | Recipe, path: str) -> Any:
    """Return the value of a run or recipe at a path in `TERMS`, or None if it is not known."""
    if isinstance(of, PublishedRun):
        return _OF_RUN[path](of) if path in _OF_RUN else read(of, TERMS[path][0])
    return _OF_RECIPE[path](of) if path in _OF_RECIPE else read(of, path)


def terms(of: PublishedRun | Recipe) -> dict[str, Any]:
    """Return {path: value} for the paths in `TERMS`. Values that the run or recipe does not state are left out."""
    return {path: value for path in TERMS if (value := term(of, path)) is not None}


def without_counterpart(of: PublishedRun | Recipe) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each value without a counterpart: only runs have it, or only recipes.

    Skip the defaults of a recipe, the values of a run that are False, and the paths that ``terms.toml`` excludes.
    """
    left_out = _DATA["not_compared"]
    if isinstance(of, Recipe):
        for path, value in flatten(of.model_dump(mode="json", exclude_defaults=True)).items():
            counted = path in TERMS or path.startswith(("batch.ramp.", "batch.stages"))
            if not counted and path.partition(".")[0] not in left_out["parts_of_a_recipe"]:
                yield path, value
        return
    taken = {path for published in TERMS.values() for path in published} | {*left_out["follow_from_others"]}
    endings = tuple(left_out["endings"])
    for path, value in of.flat().items():
        if path in taken or path.partition(".")[0] in left_out["parts_of_a_run"] or path.endswith(endings):
            continue
        # The start and the length of a batch ramp are in TERMS; its other keys are left out.
        if not path.startswith("batch.rampup.") and value is not False and _DATA["given"].get(path) != value:
            yield path, value
