"""Optuna's importance of each value, on a study that is made for it in memory."""

import warnings

import numpy as np
import optuna
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEWEST = 10  # trials: the best tenth of fewer is nobody


def ped_anova(points: Array, losses: Array) -> Array:
    """PED-ANOVA's shares for ``points`` (n, D) with ``losses`` (n,), infinite for divergence: (D,), of sum 1.

    It asks how differently the best tenth of the trials is spread along each value from all of them (Watanabe et al.
    2023, arXiv 2304.10255). Optuna's other two need scikit-learn. All 0 where there are too few trials to tell.
    """
    names = [str(i) for i in range(points.shape[1])]
    ended = losses[np.isfinite(losses)]
    if len(ended) < FEWEST or not points.any():
        return np.zeros(len(names))
    reach = float(np.abs(points).max())
    box = dict.fromkeys(names, optuna.distributions.FloatDistribution(-reach, reach))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    optuna.logging.set_verbosity(verbosity)
    study.add_trials(
        optuna.trial.create_trial(
            value=float(min(loss, ended.max())),
            params=dict(zip(names, x.tolist(), strict=True)),
            distributions={**box},
        )
        for x, loss in zip(points, losses, strict=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # until Optuna 5
        # Where the losses are all alike, the best tenth are all there are.
        warnings.filterwarnings("ignore", "Target and region quantiles select the same set of trials")
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return np.array([shares[name] for name in names])
