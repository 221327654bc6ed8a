"""The three ways to choose the big run's hyperparameters that the demo compares."""

from dataclasses import dataclass

from leaven.catalogue.starter.starter import untuned
from leaven.recipe.recipe import Recipe

ARMS = ("transferred", "copied", "untuned")


@dataclass(frozen=True)
class Arm:
    """One of the runs: same model, tokens, batch and seed; other hyperparameters."""

    key: str
    title: str
    why: str
    recipe: Recipe


def arms(target: Recipe) -> tuple[Arm, ...]:
    """The tuned values under the rule; the same without a rule; what a starter has that nobody has tuned."""
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
            "untuned",
            "untuned (leaven new)",
            "lr, init, decay, betas, eps, clip and schedule as leaven new has them for this size, batch and length: "
            "published runs and laws, moved there",
            untuned(target).replace({"name": "untuned"}),
        ),
    )
