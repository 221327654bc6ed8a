"""Load the TuRBO sampler (Eriksson et al. 2019, arXiv 1910.01739) of OptunaHub, for comparisons of search methods.

The code is downloaded from the hub, or read from the clone of github.com/optuna/optunahub-registry in
``$OPTUNAHUB_REGISTRY``.
"""

import os
from functools import cache
from typing import Any

import optuna


@cache
def _hub() -> Any:
    import optunahub

    if folder := os.environ.get("OPTUNAHUB_REGISTRY"):
        return optunahub.load_local_module("samplers/turbo", registry_root=f"{folder}/package")
    return optunahub.load_module("samplers/turbo")


def turbo(dimensions: int, seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler with one trust region, the paper's failure tolerance, and up to ten start-up trials."""
    sampler: optuna.samplers.BaseSampler = _hub().TuRBOSampler(
        n_startup_trials=min(2 * dimensions, 10),
        n_trust_region=1,
        failure_tolerance=max(5, dimensions),
        seed=seed,
        warn_independent_sampling=False,
    )
    return sampler
