"""Many short runs, one better recipe. ``search`` is for any Python function; it needs no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.tuning.service.objective import search

__all__ = ["search"]


def __getattr__(name: str) -> Any:
    """Imports ``search`` on first use, so that `import leaven.tuning` does not wait for Optuna."""
    if name != "search":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from leaven.tuning.service.objective import search

    return search
