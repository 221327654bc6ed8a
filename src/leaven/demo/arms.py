"""The three ways to choose the big run's hyperparameters that the demo compares."""

from dataclasses import dataclass
from typing import Any

from leaven.catalogue.groups import Provenance
from leaven.catalogue.runs import Run, nearest
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity

ARMS = ("transferred", "copied", "published")


@dataclass(frozen=True)
class Arm:
    """One of the runs: same model, tokens, batch and seed; other hyperparameters."""

    key: str
    title: str
    why: str
    recipe: Recipe


def arms(target: Recipe) -> tuple[Arm, ...]:
    """(a) transferred; (b) the same values in an ordinary parametrisation; (c) those of the nearest published run."""
    run = nearest(target.model.params, target.data.tokens, limit=1)[0][0]
    return (
        Arm(
            "transferred",
            "transferred (complete-d-p)",
            "the tuned values, moved over width, depth and duration by the rule",
            target.replace({"name": "transferred"}),
        ),
        Arm(
            "copied",
            "copied unchanged (standard)",
            "the tuned values as they are, in an ordinary parametrisation",
            target.replace({"name": "copied", "scaling.rule": "standard"}),
        ),
        Arm(
            "published",
            f"values of {run.id} (standard)",
            f"lr, init, decay, betas, eps, clip and schedule of the nearest published run, {run.id} "
            f"({format_quantity(run.params_total)} parameters, {format_quantity(run.tokens or 0)} tokens)",
            published(target, run),
        ),
    )


def published(target: Recipe, run: Run) -> Recipe:
    """The target with a published run's hyperparameters and schedule, as the numbers stand there.

    Batch and duration stay the target's: at the run's own batch this one would be over in a few steps. The warm-up
    is taken as a share of the run. What the run does not state keeps leaven's default, and GPT-2's init std of 0.02.
    """
    optim, of_schedule = run.optim, run.schedule
    assert optim is not None
    assert of_schedule is not None  # a run without a learning rate is nobody's neighbour
    stated: dict[str, tuple[Any, Provenance | None]] = {
        "lr": (run.peak_lr, of_schedule),
        "init_std": (run.init_std or 0.02, run.init),
        "optimizer": (optim.optimizer, optim),
        **{key: (getattr(optim, key), optim) for key in ("weight_decay", "beta1", "beta2", "eps", "grad_clip")},
    }
    hyperparameters = {key: value for key, (value, _) in stated.items() if value is not None}
    why = {
        f"hyperparameters.{key}": f"{run.id}: {', '.join(group.sources)}"
        for key, (value, group) in stated.items()
        if value is not None and group is not None
    }
    if run.residual_init_std is not None and run.init_std:
        smaller = {"init_std": run.residual_init_std / run.init_std}
        hyperparameters["modules"] = {"attention.out": smaller, "mlp.out": smaller}
    schedule = {
        "warmup_tokens": round((run.warmup_fraction or 0.01) * target.data.tokens),
        "decay": run.decay,
        "min_lr_ratio": 0.1 if run.min_lr_ratio is None else run.min_lr_ratio,
    }
    return target.replace(
        {
            "name": "published",
            "hyperparameters": hyperparameters,
            "schedule": schedule,
            "scaling": {"rule": "standard"},
            "why": why | {"schedule": f"{run.id}: {', '.join(of_schedule.sources)}; warm-up as a share of the run"},
        }
    )
