"""The checks that are a sweep and nothing more: transfer over width and depth, batch, decay and init."""

from collections.abc import Sequence

from leaven.verification.family import Family, Scale
from leaven.verification.runs import RunStore
from leaven.verification.sweep import sweep
from leaven.verification.verdict import Verdict


def transfer(
    family: Family, scales: Sequence[tuple[int, int]], lrs: Sequence[float], store: RunStore, *, seeds: int = 3
) -> Verdict:
    """Is the lr that is best at one width and depth best at others? The first scale is the base.

    Raises:
        InputError, Stopped: as :func:`leaven.verification.sweep.sweep` does.
    """
    return store.keep(
        sweep("transfer", family, "lr", [Scale(*pair) for pair in scales], lrs, store=store, seeds=seeds)[0]
    )


def batch(
    family: Family,
    scale: tuple[int, int],
    ratios: Sequence[float],
    lrs: Sequence[float],
    store: RunStore,
    *,
    seeds: int = 3,
) -> Verdict:
    """Is the lr that is best at one batch best at others, for as many tokens?

    Raises:
        InputError, Stopped: as :func:`leaven.verification.sweep.sweep` does.
    """
    scales = [Scale(*scale, batch=ratio) for ratio in (1.0, *ratios)]
    return store.keep(sweep("batch", family, "lr", scales, lrs, store=store, seeds=seeds)[0])


def decay(
    family: Family,
    scales: Sequence[tuple[int, int]],
    durations: Sequence[float],
    decays: Sequence[float],
    store: RunStore,
    *,
    seeds: int = 3,
) -> Verdict:
    """Is the weight decay that is best at the first width and depth best at others, and in longer runs?

    Raises:
        InputError, Stopped: as :func:`leaven.verification.sweep.sweep` does.
    """
    every = [*(Scale(*pair) for pair in scales), *(Scale(*scales[0], tokens=ratio) for ratio in durations)]
    return store.keep(sweep("decay", family, "weight_decay", every, decays, store=store, seeds=seeds)[0])


def init(
    family: Family, scales: Sequence[tuple[int, int]], stds: Sequence[float], store: RunStore, *, seeds: int = 3
) -> Verdict:
    """Is the init std that is best at the first width and depth best at others?

    Raises:
        InputError, Stopped: as :func:`leaven.verification.sweep.sweep` does.
    """
    return store.keep(
        sweep("init", family, "init_std", [Scale(*pair) for pair in scales], stds, store=store, seeds=seeds)[0]
    )
