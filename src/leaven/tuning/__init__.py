"""Hyperparameter search without torch: ``search`` minimises any Python function, and ``TrustRegionSampler`` proposes the
trials of any Optuna study."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.tuning.service.search import search
    from leaven.tuning.service.trust_region_sampler import TrustRegionSampler

__all__ = ["TrustRegionSampler", "search"]


def __getattr__(name: str) -> Any:
    """Import ``search`` and ``TrustRegionSampler`` on first use, because Optuna is slow to import."""
    if name == "search":
        from leaven.tuning.service.search import search as found
    elif name == "TrustRegionSampler":
        from leaven.tuning.service.trust_region_sampler import TrustRegionSampler as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
