"""Hyperparameter search. ``search`` minimises any Python function and does not need torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.tuning.service.search import search

__all__ = ["search"]


def __getattr__(name: str) -> Any:
    """Import ``search`` on first use, because Optuna is slow to import."""
    if name != "search":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from leaven.tuning.service.search import search

    return search
