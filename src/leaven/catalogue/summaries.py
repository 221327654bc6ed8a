"""Rows of ``leaven recipes list`` and ``nearest``: published runs in a few fields."""

from typing import Any

from leaven.catalogue.neighbours import size_ratio
from leaven.catalogue.run import PublishedRun, Stack
from leaven.documents.catalogue import NearRun, RunSummary


def summary(run: PublishedRun) -> RunSummary:
    """The row of ``leaven recipes list``."""
    return RunSummary(**_fields(run))


def near_run(run: PublishedRun, distance: float, params: int, factor: float, wanted: Stack) -> NearRun:
    """The row of ``leaven recipes nearest``, at a distance from a model of ``params`` parameters."""
    ratio = size_ratio(run, params)
    return NearRun(
        **_fields(run),
        distance=distance,
        size_ratio=ratio,
        within_factor=ratio <= factor,
        same_stack=wanted.fits(run.stack),
        stack=run.stack.text,
    )


def _fields(run: PublishedRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "params": run.params_total,
        "tokens": run.tokens,
        "peak_lr": run.peak_lr,
        "batch_tokens": run.batch_tokens,
        "source": "; ".join(run.lr_sources),
        "params_active": run.params_active,
        "kind": run.kind,
        "optimizer": run.optimizer,
        "decay": run.decay,
        "lineage": run.lineage.name,
        "lr_comparable": run.lr_comparable,
    }
