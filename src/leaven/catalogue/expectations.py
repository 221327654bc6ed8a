"""Predict the best lr, batch, weight decay and init std of a recipe, for ``leaven tune --prior laws``."""

import math
from dataclasses import dataclass
from statistics import pstdev

from leaven.catalogue.findings.case import Case
from leaven.catalogue.laws import power_lines_tau
from leaven.catalogue.starter.batch import batch_evidence
from leaven.catalogue.starter.optimizer import lr_evidence


@dataclass(frozen=True)
class Expectation:
    """The predicted best value of a hyperparameter, compared with the recipe's value after its scaling rule."""

    octaves: float  # log2(expected value / the recipe's value)
    deviation: float  # standard deviation of log2(value) over the values of the laws and runs


def expectations(case: Case) -> dict[str, Expectation]:
    """Return the predicted best values, by recipe path. Hyperparameters that are 0 in the recipe are left out."""
    near, lr, batch = case.size.near, lr_evidence(case.size, case.batch), batch_evidence(case.size)
    decays = near.values("hyperparameters.weight_decay")
    by_tau = case.batch / (case.hidden("lr") * case.tokens * power_lines_tau(case.params, case.tokens))
    stds = {
        run.id: run.init_std * math.sqrt(run.arch.d_model / case.recipe.model.d_model)
        for run in near.runs
        if run.init_std and run.arch.d_model
    }
    found = {
        "hyperparameters.lr": (case.hidden("lr"), lr.middle, [*lr.laws.by.values(), *lr.runs.by.values()]),
        "batch.tokens": (case.batch, batch.middle, [*batch.laws.by.values(), *batch.runs.by.values()]),
        "hyperparameters.weight_decay": (
            case.hidden("weight_decay"),
            near.middle(decays).value if decays else by_tau,
            [*decays.values(), by_tau],
        ),
    }
    if stds:
        found["hyperparameters.init_std"] = case.init_std, near.middle(stds).value, list(stds.values())
    return {
        path: Expectation(math.log2(expected / own), pstdev(map(math.log2, votes)))
        for path, (own, expected, votes) in found.items()
        if own > 0
    }
