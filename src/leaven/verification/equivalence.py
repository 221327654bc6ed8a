"""The equivalence check: does another batch at the same data train the same model?

The batch rule of Adam (Malladi et al. 2022, arXiv 2205.10287; with decay Mlodozeniec et al. 2025) says that
batches kappa times larger with an lr sqrt(kappa) times higher, betas to the power kappa and so on follow the same
stochastic differential equation: the final loss is the same as long as gradients are mostly noise. It does not say
that it is the best one. The control arm moves the batch and nothing else; if its loss stays as well, the check has
seen nothing.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.verification.runs import run_all
from leaven.verification.verdict import Row, Verdict, curve

TOLERANCE = 0.02
"""Of the loss that was learnt since a uniform guess. The equation is a limit of small lrs: measured on a toy, the
rule holds to 5% of the excess loss from batch x 1/4 to x 8, where no rule is off by 50%."""

ARMS = ("rule", "no rule")


def equivalence(
    recipe: Recipe,
    ratios: Sequence[float],
    folder: Path,
    *,
    seeds: int = 3,
    workers: int = 2,
    on_run: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Run the check, or go on with it, at batches of ``ratios`` times the recipe's.

    Raises:
        InputError: if a batch is no whole number of sequences, or the folder is in use.
        Stopped: if ``stop`` said so; what has ended is in the folder.
    """
    kappas = sorted({1.0, *ratios})
    if len(kappas) < 2:
        raise InputError("an equivalence check needs another batch: --batch-ratios 0.25,4")

    def member(arm: str, kappa: float, seed: int) -> Recipe:
        moved = transfer(recipe, batch_tokens=round(recipe.batch.tokens * kappa))
        if arm == "no rule":
            # With its own batch as base, nothing but the batch moves.
            base = moved.base.model_dump()
            base["batch_tokens"] = round(recipe.base.batch_tokens * kappa)
            moved = moved.replace({"scaling.base": base})
        return moved.replace({"data.seed": recipe.data.seed + seed})

    every = {(arm, k, seed): member(arm, k, seed) for arm in ARMS for k in kappas for seed in range(seeds)}
    outcome = run_all(every.values(), folder, workers, on_run=on_run, stop=stop)
    losses = {
        arm: np.array([[outcome(every[arm, k, seed]).loss for seed in range(seeds)] for k in kappas]) for arm in ARMS
    }
    limit = _limit(losses["rule"], recipe.model.vocab_size, kappas.index(1.0))
    rows = [_row(arm, kappas, losses[arm], limit) for arm in ARMS]
    return Verdict(
        check="equivalence",
        subject=recipe.name,
        quantity="largest difference of the final loss to that of batch x 1, nats per token",
        rows=tuple(rows),
        curves=tuple(curve(arm, "batch", "loss", kappas, losses[arm].tolist()) for arm in ARMS),
        settings={
            "rule": recipe.scaling.rule,
            "batch_ratios": kappas,
            "seeds": seeds,
            "tokens": recipe.data.tokens,
        },
    )


def _limit(losses: np.ndarray, vocab_size: int, one: int) -> float:
    """What seeds alone may differ by, two standard errors of a difference of means, or the rule's own inexactness."""
    learnt = math.log(vocab_size) - float(losses[one].mean())
    if losses.shape[1] < 2:
        return TOLERANCE * learnt
    noise = math.sqrt(float(losses.var(axis=1, ddof=1).mean()))
    return max(2 * noise * math.sqrt(2 / losses.shape[1]), TOLERANCE * learnt)


def _row(arm: str, kappas: Sequence[float], losses: np.ndarray, limit: float) -> Row:
    means = losses.mean(1)
    differences = means - means[list(kappas).index(1.0)]
    worst = float(differences[int(np.abs(differences).argmax())])
    parts = {f"x{kappa:g}": float(value) for kappa, value in zip(kappas, differences, strict=True)}
    same = abs(worst) <= limit
    if arm == "rule":
        note = "" if same else "the loss moves with the batch"
        return Row(arm, "batch", worst, limit, same, parts, note, max(abs(worst) - limit, 0.0))
    note = (
        "moves with the batch, as it should" if not same else "moves no more than noise: longer runs or more ratios"
    )
    return Row(arm, "batch", worst, limit, not same, parts, note)
