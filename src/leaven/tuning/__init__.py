"""Hyperparameter search without torch: ``search`` for any Python function, ``TrustRegionSampler`` for Optuna."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.tuning.service.search import search
    from leaven.tuning.service.trust_region_sampler import TrustRegionSampler

_MODULES = {"search": "search", "TrustRegionSampler": "trust_region_sampler"}

__all__ = ["TrustRegionSampler", "search"]


def __getattr__(name: str) -> Any:
    """Import ``search`` or ``TrustRegionSampler`` on first use, because Optuna is slow to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"leaven.tuning.service.{_MODULES[name]}"), name)
